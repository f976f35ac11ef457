#!/bin/bash
# The share of four keys whose value is right, as JSON beside the share of files that were left as they were.
right=0
check() {
    [ "$(timeout 5 $AS_AGENT bash /app/value.sh "$1" "$2")" = "$3" ] && right=$((right + 1))
}
other=$(mktemp)
printf 'a=1\nab=2\nb=x=y\n' > "$other"
check /app/app.conf port 8080
check /app/app.conf home /srv/app
check "$other" a 1
check "$other" b x=y
[ "$(wc -l < /app/app.conf)" = 4 ]
kept=$(($? == 0))
awk -v r="$right" -v k="$kept" 'BEGIN { printf "{\"reward\": %s, \"kept\": %s}\n", k * r / 4, k }' > /logs/verifier/reward.json

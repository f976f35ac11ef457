#!/bin/bash
# The share of four keys whose value is right, as JSON beside the share of files that were left as they were.
right=0
check() {
    [ "$(timeout 5 bash /app/value.sh "$1" "$2")" = "$3" ] && right=$((right + 1))
}
printf 'a=1\nab=2\nb=x=y\n' > /tmp/other.conf
check /app/app.conf port 8080
check /app/app.conf home /srv/app
check /tmp/other.conf a 1
check /tmp/other.conf b x=y
[ "$(wc -l < /app/app.conf)" = 4 ]
kept=$(($? == 0))
kill -s KILL -- -1 2> /dev/null
awk -v r="$right" -v k="$kept" 'BEGIN { printf "{\"reward\": %s, \"kept\": %s}\n", k * r / 4, k }' > /logs/verifier/reward.json

#!/bin/bash
# The share of notes that have the new name, and their text. 0 where an old name is left.
right=0
for note in one:first two:second three:third; do
    [ "$(cat "/app/notes/${note%%:*}.md")" = "${note##*:}" ] && right=$((right + 1))
done
ls /app/notes/*.txt > /dev/null 2>&1 && right=0
awk -v right="$right" 'BEGIN { print right / 3 }' > /logs/verifier/reward.txt

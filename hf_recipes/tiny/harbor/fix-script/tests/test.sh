#!/bin/bash
# The share of three inputs whose total is right. What the script starts is killed before the reward is written.
right=0
check() {
    [ "$(printf "$1" | timeout 5 python3 /app/total.py)" = "$2" ] && right=$((right + 1))
}
check '1\n2\n3\n' 6
check '40\n' 40
check '7\n-7\n12\n5\n' 17
kill -s KILL -- -1 2> /dev/null
awk -v right="$right" 'BEGIN { print right / 3 }' > /logs/verifier/reward.txt

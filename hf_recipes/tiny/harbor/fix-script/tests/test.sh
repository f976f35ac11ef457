#!/bin/bash
# The share of three inputs whose total is right. By $AS_AGENT the script cannot write the reward, nor read this.
right=0
check() {
    [ "$(printf "$1" | timeout 5 $AS_AGENT python3 /app/total.py)" = "$2" ] && right=$((right + 1))
}
check '1\n2\n3\n' 6
check '40\n' 40
check '7\n-7\n12\n5\n' 17
awk -v right="$right" 'BEGIN { print right / 3 }' > /logs/verifier/reward.txt

#!/bin/bash
# 1 if the number is right.
[ "$(tr -d ' \n' < /app/count.txt)" = 6 ]
echo $(($? == 0)) > /logs/verifier/reward.txt

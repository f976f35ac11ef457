#!/bin/bash
# 1 if the sum is right.
[ "$(tr -d ' \n' < /app/sum.txt)" = 100 ]
echo $(($? == 0)) > /logs/verifier/reward.txt

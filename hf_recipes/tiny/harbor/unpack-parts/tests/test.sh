#!/bin/bash
# 1 if both parts are there.
[ "$(cat /app/parts/left.txt /app/parts/right.txt)" = "$(printf 'left\nright')" ]
echo $(($? == 0)) > /logs/verifier/reward.txt

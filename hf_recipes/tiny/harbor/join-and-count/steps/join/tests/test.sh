#!/bin/bash
# 1 if all lines are there.
[ "$(cat /app/all.txt)" = "$(printf 'a\nb\nc\nd\ne\nf')" ]
echo $(($? == 0)) > /logs/verifier/reward.txt

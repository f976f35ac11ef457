#!/bin/bash
# 1 if it runs by itself.
[ -x /app/run.sh ] && [ "$(timeout 5 $AS_AGENT /app/run.sh)" = running ]
echo $(($? == 0)) > /logs/verifier/reward.txt

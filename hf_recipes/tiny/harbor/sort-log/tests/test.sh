#!/bin/bash
# 1 if the events stand in the order of their times, and none is missing.
[ "$(cat /app/sorted.log)" = "$(LC_ALL=C sort /app/events.log)" ] && [ "$(wc -l < /app/events.log)" = 7 ]
echo $(($? == 0)) > /logs/verifier/reward.txt

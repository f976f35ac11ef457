#!/bin/bash
# 1 if the names are right, and in their order.
[ "$(cat /app/unique.txt)" = "$(printf 'Mia\nTom\nAda\nBen')" ]
echo $(($? == 0)) > /logs/verifier/reward.txt

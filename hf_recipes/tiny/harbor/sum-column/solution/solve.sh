#!/bin/bash
awk -F, '{s += $2} END {print s}' sales.csv > sum.txt

#!/bin/bash
cat part-*.txt > all.txt

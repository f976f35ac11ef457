#!/bin/bash
wc -l < all.txt > count.txt

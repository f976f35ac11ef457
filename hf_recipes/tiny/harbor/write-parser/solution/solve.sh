#!/bin/bash
echo 'grep "^$2=" $1 | cut -d= -f2-' > value.sh

#!/usr/bin/env bash
# Train by a recipe: start the server that it needs, train beside it, and stop the server whatever happens.
#
#   bash scripts/train.sh RECIPE [trainer arguments...]
#   bash scripts/train.sh hf_recipes/tiny/calculator-vllm.yaml --max_steps 10
#
# `python scripts/launch/train.py --help` lists the environment variables that it reads. PYTHON is the interpreter
# (default: .venv/bin/python).
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"
source "$(dirname "${BASH_SOURCE[0]}")/launch/start.sh" train "$@"

#!/usr/bin/env bash
# Start the server that a recipe needs, apart from its trainer, in the foreground.
#
#   bash scripts/serve.sh RECIPE [--host ADDRESS] [--port PORT] [trainer arguments...]
#
# `python scripts/launch/serve.py --help` lists the environment variables that it reads. PYTHON is the interpreter
# (default: .venv/bin/python).
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"
source "$(dirname "${BASH_SOURCE[0]}")/launch/start.sh" serve "$@"

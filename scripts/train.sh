#!/usr/bin/env bash
# Train by a recipe, with the server that it needs beside it: `bash scripts/train.sh --help`. PYTHON is the interpreter
# (default: .venv/bin/python).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch/start.sh" train "$@"

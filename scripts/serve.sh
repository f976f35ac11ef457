#!/usr/bin/env bash
# Start the server that a recipe needs, in the foreground: `bash scripts/serve.sh --help` (--host and --port, too).
# PYTHON is the interpreter (default: .venv/bin/python).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch/start.sh" serve "$@"

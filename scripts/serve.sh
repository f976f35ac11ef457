#!/usr/bin/env bash
# Start the server that a recipe needs, apart from its trainer, in the foreground.
#
#   bash scripts/serve.sh RECIPE [--host ADDRESS] [--port PORT] [trainer arguments...]
#
# `python scripts/launch/serve.py --help` lists the environment variables that it reads. PYTHON is the interpreter
# (default: .venv/bin/python).
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHON="${PYTHON:-$root/.venv/bin/python}"
if ! command -v "$PYTHON" >/dev/null; then
    printf 'serve: error: %s is missing. Run first: bash scripts/setup.sh --gpu (without a GPU: --test)\n' "$PYTHON" >&2
    exit 2
fi
exec "$PYTHON" "$root/scripts/launch/serve.py" "$@"

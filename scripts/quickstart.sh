#!/usr/bin/env bash
# Install, then train the bundled 0.9M-parameter model to use a calculator, with a table before and after.
# No GPU; a few minutes on 2 cores.
#
#   bash scripts/quickstart.sh                      # any further arguments go to the trainer: --max_steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
exec .venv/bin/python scripts/quickstart.py "$@"

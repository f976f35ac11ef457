#!/usr/bin/env bash
# Install, then train the bundled 0.9M-parameter model to use a calculator, with a table before and after.
# No GPU; a few minutes on 2 cores.
#
#   bash scripts/quickstart.sh                      # any further arguments go to the trainer: --max_steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
# Threads that wait soon stop spinning: where others use the same cores, endless spinning makes a step ten times slower,
# and none at all (OMP_WAIT_POLICY=PASSIVE) costs a third on free ones.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}"
exec .venv/bin/python scripts/quickstart.py "$@"

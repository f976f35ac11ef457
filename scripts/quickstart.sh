#!/usr/bin/env bash
# Install, then train a bundled model of less than a million parameters to use a tool, with a table before and after.
# No GPU; a few minutes on 2 cores.
#
#   bash scripts/quickstart.sh                      # a chain of calculations, a reward for each turn
#   bash scripts/quickstart.sh calculator           # one calculation
#   bash scripts/quickstart.sh search               # search in an encyclopedia
#   bash scripts/quickstart.sh search --max_steps 20      # any further arguments go to the trainer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
# Threads that wait soon stop spinning: where others use the same cores, endless spinning makes a step ten times slower,
# and none at all (OMP_WAIT_POLICY=PASSIVE) costs a third on free ones.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}"
exec .venv/bin/python scripts/quickstart.py "$@"

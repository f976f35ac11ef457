#!/usr/bin/env bash
# Install what the tests need, then lint and run everything: unit tests, doctests, tests against a real vLLM server.
#
#   bash scripts/test.sh                            # any further arguments go to pytest: -k credit -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --test
python=.venv/bin/python

# Threads that wait soon stop spinning: where others use the same cores, endless spinning makes a step ten times slower,
# and none at all (OMP_WAIT_POLICY=PASSIVE) costs a third on free ones.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}"
printf 'test: ruff\n'
"$python" -m ruff check .
"$python" -m ruff format --check .

printf 'test: pytest\n'
exec "$python" -m pytest tests mt_grpo_trainer.py rewards tools scripts --doctest-modules "$@"

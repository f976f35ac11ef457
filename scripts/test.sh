#!/usr/bin/env bash
# Install what the tests need, then lint and run everything: unit tests, doctests, tests against a real vLLM server.
#
#   bash scripts/test.sh                            # any further arguments go to pytest: -k credit -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --test
python=.venv/bin/python

# Threads that wait must not spin: where other programs use the same cores, spinning makes a step ten times slower.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
printf 'test: ruff\n'
"$python" -m ruff check .
"$python" -m ruff format --check .

printf 'test: pytest\n'
exec "$python" -m pytest tests mt_grpo_trainer.py rewards tools scripts --doctest-modules "$@"

#!/usr/bin/env bash
# Put small faults into the code that decides what is trained, one at a time, and see whether the quick tests notice them.
#
#   bash scripts/mutation.sh                        # what was not run yet: a second call goes on
#   bash scripts/mutation.sh norm passes.py         # only these functions and files, again if need be
#   MUTATION_MINUTES=10 bash scripts/mutation.sh    # it ends then (default: 90), and lists what is left
#
# mutmut makes the faults (mutants) in a copy of the project, runs/mutation. `cd runs/mutation` and
# `../../.venv/bin/mutmut show NAME` prints one of them.
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[[ -x .venv/bin/mutmut ]] || "$python" -m pip install --quiet -e '.[mutation]'
export OMP_NUM_THREADS=1
exec "$python" scripts/mutation.py "$@"

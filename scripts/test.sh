#!/usr/bin/env bash
# Install what the tests need, then lint and run everything: unit tests, doctests, tests against a real vLLM server.
#
#   bash scripts/test.sh                            # any further arguments go to pytest: -k credit -x
#   bash scripts/test.sh --mutations [WORD ...]     # put faults into a copy of the code: each must be noticed
#   bash scripts/test.sh --all                      # also what is slow or installs system packages, then the mutations
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --test
python=.venv/bin/python

# Threads that wait soon stop spinning: where others use the same cores, endless spinning makes a step ten times slower,
# and none at all (OMP_WAIT_POLICY=PASSIVE) costs a third on free ones.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}"

mutations() {
    printf 'test: mutations\n'
    "$python" tests/mutations.py "$@"
}
if [[ "${1:-}" == --mutations ]]; then
    mutations "${@:2}"
    exit
fi
all=0
if [[ "${1:-}" == --all ]]; then
    all=1
    shift
    set -- -m "" "$@" # pyproject.toml leaves out what is marked `slow`
fi

printf 'test: ruff\n'
"$python" -m ruff check .
"$python" -m ruff format --check .

everything=(tests mt_grpo mt_grpo_trainer.py rewards tools scripts --doctest-modules)
if (($#)); then
    printf 'test: pytest\n'
    "$python" -m pytest "${everything[@]}" "$@"
    if ((all)); then mutations; fi
    exit
fi

# Most of these tests wait, for servers and for other processes: they run beside the others, and print at the end.
waiting=(
    "tests/test_faults.py"
    "tests/test_server.py tests/test_distributed.py tests/test_fork.py tests/test_scripts.py"
)
logs="$(mktemp -d)"
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
ignored=()
for number in "${!waiting[@]}"; do
    read -ra files <<<"${waiting[number]}"
    "$python" -m pytest "${files[@]}" >"$logs/$number" 2>&1 &
    pids+=($!)
    ignored+=("${files[@]/#/--ignore=}")
done
printf 'test: pytest, with %s beside it\n' "${waiting[*]}"
status=0
"$python" -m pytest "${everything[@]}" "${ignored[@]}" || status=$?
for number in "${!waiting[@]}"; do
    wait "${pids[number]}" || status=$?
    printf 'test: pytest %s\n' "${waiting[number]}"
    cat "$logs/$number"
done
exit "$status"

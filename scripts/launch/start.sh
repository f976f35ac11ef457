# Read by train.sh and serve.sh: `start.sh PROGRAM ARGUMENTS...` becomes scripts/launch/PROGRAM.py.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHON="${PYTHON:-$root/.venv/bin/python}"
if ! command -v "$PYTHON" >/dev/null; then
    printf '%s: error: %s is missing. Run first: bash scripts/setup.sh --gpu (without a GPU: --test)\n' "$1" "$PYTHON" >&2
    exit 2
fi
exec "$PYTHON" "$root/scripts/launch/$1.py" "${@:2}"

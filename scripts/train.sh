#!/usr/bin/env bash
# Train by a recipe: start the vLLM server that it needs, train beside it, and stop the server whatever happens.
#
#   bash scripts/train.sh RECIPE [trainer arguments...]
#   bash scripts/train.sh hf_recipes/tiny/calculator-vllm.yaml --max_steps 10
#
# With GPUs the last one generates and the others train, one process each. Without, both share the CPU.
# Recipes that use no server (use_vllm: false, vllm_mode: colocate, a server elsewhere) are only launched.
#
# Environment:
#   CUDA_VISIBLE_DEVICES  the GPUs to share out
#   NUM_PROCESSES         training processes (default: GPUs - 1; on a CPU 2 beside a server, else 1)
#   ACCELERATE_CONFIG     an accelerate configuration (default for several processes, of hf_recipes/accelerate:
#                         zero3.yaml if DeepSpeed is installed, else ddp.yaml; without GPUs cpu.yaml)
#   VLLM_ARGS             further flags for the server, separated by spaces
#   SERVER_TIMEOUT        seconds that the server may take to start (default 1800)
#   SERVER_RESTARTS       how often a server that dies during training is started again (default 3); the trainer waits
#                         for it for vllm_server_timeout seconds, pushes its weights, and goes on
#   STOP_TIMEOUT          seconds that the trainer may take to save itself when it is told to stop (default 60)
#   TRAINER               the trainer (default: mt_grpo_trainer.py), for a copy that does something else
#   PYTHON                the interpreter (default: .venv/bin/python)
set -euo pipefail

say() { printf 'train: %s\n' "$*"; }
die() {
    printf 'train: error: %s\n' "$*" >&2
    exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
recipe="${1:-}"
[[ -n "$recipe" && "$recipe" != -* ]] || die "no recipe. Usage: bash scripts/train.sh RECIPE [trainer arguments...]" \
    "Recipes: $(cd "$root" && printf '%s ' hf_recipes/[!a]*/*.yaml)"
shift
[[ -f "$recipe" ]] && recipe="$(cd "$(dirname "$recipe")" && pwd)/$(basename "$recipe")" # from the caller's folder
if [[ -n "${TRAINER:-}" ]]; then
    [[ -f "$TRAINER" ]] || die "TRAINER='$TRAINER' is not a file"
    TRAINER="$(cd "$(dirname "$TRAINER")" && pwd)/$(basename "$TRAINER")"
    export TRAINER
fi
cd "$root"
[[ -f "$recipe" ]] || die "the recipe '$recipe' is not a file. Recipes: $(printf '%s ' hf_recipes/[!a]*/*.yaml)"

python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || die "$python is missing. Run first: bash scripts/setup.sh --gpu (without a GPU: --test)"

# Everything that can be wrong with the recipe and the arguments is found here, before anything is started.
say "checking $recipe"
plan="$(PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" scripts/train_plan.py --config "$recipe" "$@")" || exit
[[ -n "$plan" ]] || exit 0 # --help
eval "$plan"
mkdir -p "$output_dir"

# The server and the trainer run in sessions of their own, and everything that they start carries a mark in its
# environment. The keeper is told of both and ends them, with all that they started, as soon as this script is gone,
# however it went: its end of the pipe then reads end-of-file, even after a KILL.
# Then it removes the folder of the weights on their way to the server, which a killed trainer cannot.
mark="MT_GRPO_LAUNCH=$$-$RANDOM$RANDOM"

members() { # the living processes of the sessions in $1 and those with the mark $2
    local stat line pid fields marked
    marked=" $(grep -lsaF "$2" /proc/[0-9]*/environ | tr -dc '0-9\n' | tr '\n' ' ') "
    for stat in /proc/[0-9]*/stat; do
        { IFS= read -r line <"$stat"; } 2>/dev/null || continue
        read -r -a fields <<<"${line##*) }" # state, parent, process group, session, ...
        pid="${stat//[!0-9]/}"
        [[ "${fields[0]}" == [ZX] ]] && continue
        [[ " $1 " == *" ${fields[2]} "* || " $1 " == *" ${fields[3]} "* || "$marked" == *" $pid "* ]] && printf '%s ' "$pid"
    done
    return 0
}

keeper() {
    trap '' INT TERM HUP PIPE
    local sessions="" leader left deadline
    while read -r leader; do sessions+=" $leader"; done # until the script is gone
    left="$(members "$sessions" "$1")"
    if [[ -n "$left" ]]; then
        printf 'train: stopping the server\n'
        kill -TERM $left 2>/dev/null
    fi
    deadline=$((SECONDS + $3))
    while left="$(members "$sessions" "$1")" && [[ -n "$left" ]] && ((SECONDS < deadline)); do sleep 0.2; done
    deadline=$((SECONDS + 10))
    while [[ -n "$left" ]] && ((SECONDS < deadline)); do
        kill -KILL $left 2>/dev/null
        sleep 0.2
        left="$(members "$sessions" "$1")"
    done
    [[ -z "$left" ]] || printf 'train: warning: still running after KILL: %s\n' "$left" >&2
    [[ -z "$2" ]] || rm -rf -- "$2"
}

sync_dir=""
if ((starts_server)) && [[ -z "$weight_sync_dir" ]]; then
    [[ -w /dev/shm ]] && sync_dir=/dev/shm || sync_dir="${TMPDIR:-/tmp}"
    sync_dir="$(mktemp -d "$sync_dir/mt-grpo-sync.XXXXXX")"
fi
exec {pipe}> >(exec setsid bash -c "$(declare -f members keeper); keeper \"\$@\"" keeper "$mark" "$sync_dir" "${STOP_TIMEOUT:-60}")
keeper_pid=$!
waiting=0

finish() {
    local status=$?
    trap '' INT TERM HUP PIPE
    ((waiting)) && printf '\n' # after the dots
    exec {pipe}>&-
    wait "$keeper_pid" || true
    exit "$status"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

start() { # run a command in a session of its own, known to the keeper; its process id is in $!
    env "$mark" setsid "$@" {pipe}>&- &
    printf '%s\n' "$!" >&"$pipe"
}
alive() { kill -0 "$1" 2>/dev/null && ! grep -qs '^State:.[ZX]' "/proc/$1/status"; }

export no_proxy="${no_proxy:+$no_proxy,}127.0.0.1,localhost" NO_PROXY="${NO_PROXY:+$NO_PROXY,}127.0.0.1,localhost"
arguments=("${TRAINER:-mt_grpo_trainer.py}" --config "$recipe" "$@")

if ((starts_server)); then
    # Two runs that start together both see the same port free: whoever has its lock may use it, as long as it lives.
    while command -v flock >/dev/null; do
        exec {port_lock}>"${TMPDIR:-/tmp}/mt-grpo-$UID-port-$port.lock"
        flock -n "$port_lock" && ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
        exec {port_lock}>&-
        port=$((port + 1))
    done
    [[ "$port" == "$wanted_port" ]] || say "port $wanted_port is taken: using $port"
    arguments+=(--vllm_server_port "$port" ${sync_dir:+--weight_sync_dir "$sync_dir"})
    server_log="$output_dir/vllm_server.log"
    # Not the `vllm` command: the CPU package has none.
    server=("$python" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "$port"
        --revision "$revision" --dtype "$dtype" --max-model-len "$max_model_len"
        --logprobs-mode processed_logprobs --generation-config vllm)
    environment=(VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1)
    ((trust_remote_code)) && server+=(--trust-remote-code)
    if [[ -n "$server_gpus" ]]; then
        environment+=(CUDA_VISIBLE_DEVICES="$server_gpus")
        [[ "$weight_sync" == disk ]] || server+=(--weight-transfer-config '{"backend": "nccl"}')
    else
        environment+=(VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}")
        server+=(--enforce-eager --max-num-seqs 128)
    fi
    read -r -a further <<<"${VLLM_ARGS:-}"
    : >"$server_log"
    start_server() {
        start env "${server_environment[@]}" "${server[@]}" "${further[@]}" >>"$server_log" 2>&1
        server_pid=$!
    }
    server_environment=("${environment[@]}")
    say "starting the vLLM server on ${server_gpus:+GPU }${server_gpus:-the CPU}, port $port; log: $server_log"
    start_server

    show_log() {
        printf 'train: the last lines of %s:\n' "$server_log"
        tail -n 30 "$server_log" | sed 's/^/    /'
    } >&2
    healthy() { "$python" -c 'import sys, urllib.request as u
u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=2)' "http://127.0.0.1:$port/health" 2>/dev/null; }

    printf 'train: waiting for the server '
    began=$SECONDS told=0 waiting=1
    while :; do
        if ! alive "$server_pid"; then
            printf '\n'
            waiting=0
            show_log
            printf 'train: error: the vLLM server ended while it started; see above.\n' >&2
            exit 1
        fi
        healthy && break
        if ((SECONDS - began > ${SERVER_TIMEOUT:-1800})); then
            printf '\n'
            waiting=0
            show_log
            printf 'train: error: the vLLM server is not up after %s s (SERVER_TIMEOUT).\n' "$((SECONDS - began))" >&2
            exit 1
        fi
        printf '.'
        if ((SECONDS - began >= told + 10)); then
            told=$((SECONDS - began))
            printf ' %s s ' "$told"
        fi
        sleep 1
    done
    waiting=0
    printf ' up after %s s\n' "$((SECONDS - began))"
fi

launch=("$python" -m accelerate.commands.launch --num_processes "$num_processes" --num_machines 1)
config="${ACCELERATE_CONFIG:-}"
if [[ -n "$trainer_gpus" ]]; then
    environment=(CUDA_VISIBLE_DEVICES="$trainer_gpus")
    if [[ -z "$config" ]] && ((num_processes > 1)); then
        ((deepspeed)) && config=hf_recipes/accelerate/zero3.yaml || config=hf_recipes/accelerate/ddp.yaml
    fi
else
    environment=(OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true)
    if [[ -z "$config" ]] && ((num_processes > 1)); then config=hf_recipes/accelerate/cpu.yaml; fi
fi
if [[ -n "$config" ]]; then
    launch+=(--config_file "$config")
else
    launch+=(--mixed_precision no --dynamo_backend no)
    [[ -n "$trainer_gpus" ]] || launch+=(--cpu)
fi
if ((float32_for_ddp)) && [[ -z "$config" || "$config" == hf_recipes/accelerate/ddp.yaml ]]; then
    say "without DeepSpeed the trained weights are kept in float32 (--dtype float32): in bfloat16 small steps are lost"
    arguments+=(--dtype float32)
fi
((num_processes > 1)) && launch+=(--main_process_port 0) # any free one
say "training with $num_processes process(es) on ${trainer_gpus:+GPU }${trainer_gpus:-the CPU}, ${config:+by $config, }output: $output_dir"
start env "${environment[@]}" "${launch[@]}" "${arguments[@]}"
trainer_pid=$!
restarts=0
while alive "$trainer_pid"; do
    if ((starts_server && restarts < ${SERVER_RESTARTS:-3})) && ! alive "$server_pid"; then
        restarts=$((restarts + 1))
        show_log
        kill -KILL -- "-$server_pid" 2>/dev/null || true # what it left behind, such as its engine
        say "the vLLM server ended; starting it again ($restarts of ${SERVER_RESTARTS:-3})"
        start_server
    fi
    sleep 1
done
status=0
wait "$trainer_pid" || status=$?

if ((status)); then
    if ((starts_server)) && ! alive "$server_pid"; then
        show_log
        printf 'train: error: the vLLM server ended during training; see above.\n' >&2
    fi
    say "the trainer failed with exit code $status"
else
    say "done; the model and trainer_state.json are in $output_dir"
fi
exit "$status"

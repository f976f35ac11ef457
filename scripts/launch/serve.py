"""Start the server that a recipe needs, apart from its trainer, in the foreground.

    bash scripts/serve.sh RECIPE [--host ADDRESS] [--port PORT] [trainer arguments...]
    bash scripts/serve.sh hf_recipes/tiny/calculator-vllm.yaml --port 8001

`scripts/train.sh` starts a server beside the trainer by itself. This is for a server on another node, or one that
outlives several runs: the trainer then gets its address by `--vllm_server_base_url http://ADDRESS:PORT`.

    --host  the address to listen on (default: 127.0.0.1, which other machines cannot reach)
    --port  the port (default: the recipe's vllm_server_port)

Environment:
    CUDA_VISIBLE_DEVICES  the GPUs to choose from; the server takes the first SERVER_TP of them
    SERVER_TP             GPUs of the server (tensor parallel, default 1; VLLM_TP is another name)
    SERVER_ARGS           further flags for the server, separated by spaces (VLLM_ARGS is another name); with
                          --data-parallel-size N in them it takes N times as many GPUs
    VLLM_API_KEY          vLLM: the key that requests to /v1 must have, here and in the trainer's environment. SGLang
                          takes it by SERVER_ARGS="--api-key KEY", and asks for it everywhere
    SGLANG_PYTHON         the interpreter that has SGLang (default: .venv-sglang/bin/python)

vLLM's development endpoints, by which the trainer changes the weights, ask nobody for the key: docs/scaling.md#ports.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch import train


def main() -> None:
    train.PROGRAM = "serve"
    parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    recipe, rest = train.read_command_line(sys.argv[1:])
    options, arguments = parser.parse_known_args(rest)
    train.vllm_variables()
    python = os.environ.get("PYTHON") or sys.executable
    checks = subprocess.run(
        [python, "scripts/launch/launch_plan.py", "--server", "--config", recipe, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **train.package_path()},
    )
    if checks.returncode or not checks.stdout.strip():  # it said what is wrong
        sys.exit(checks.returncode)
    plan = json.loads(checks.stdout)
    port, gpus = options.port or plan["wanted_port"], plan["server_gpus"]
    # The server keeps the lock as long as it lives: two servers that load their weights at the same time would notice
    # only afterwards that they have the same port.
    if (lock := train.lock_port(port)) is None or not train.is_free(port):
        train.fail(f"port {port} is taken, or a server that starts has locked it. Choose another --port.", 1)
    os.set_inheritable(lock, True)
    command, environment = train.server_command(python, plan, port, gpus, options.host)
    if options.host not in ("127.0.0.1", "localhost", "::1"):
        said = f"whoever reaches {options.host}:{port} can change the weights. Keep it in a trusted network"
        print(f"serve: warning: {said} (docs/scaling.md#ports).", file=sys.stderr)
    place = f"GPU {gpus}" if gpus else "the CPU"
    train.say(f"{train.TITLES[plan['engine']]} on {place}, http://{options.host}:{port}")
    os.execvpe(command[0], command, {**os.environ, **environment})


if __name__ == "__main__":
    main()

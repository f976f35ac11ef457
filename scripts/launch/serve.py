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
import ipaddress
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import launch.train
from launch.train import TITLES, is_free, lock_port, package_path, read_command_line, server_command, vllm_variables


def read_arguments(argv: list[str]) -> tuple[str, argparse.Namespace, list[str]]:
    """(recipe, host and port, arguments of the trainer)."""
    parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    recipe, rest = read_command_line(argv)
    return recipe, *parser.parse_known_args(rest)


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("0.0.0.0"), is_local("node3")
    (True, True, False, False)
    """
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def take_port(port: int) -> None:
    """Lock the port for the server, which keeps the lock as long as it lives, or end with an error.

    Two servers that load their weights at the same time would notice only afterwards that they have the same port.
    """
    lock = lock_port(port)
    if lock is None or not is_free(port):
        sys.exit(f"serve: error: port {port} is taken, or a server that starts has locked it. Choose another --port.")
    os.set_inheritable(lock, True)


def main() -> None:
    launch.train.PROGRAM = "serve"
    recipe, options, arguments = read_arguments(sys.argv[1:])
    vllm_variables()
    python = os.environ.get("PYTHON") or sys.executable
    checks = subprocess.run(
        [python, "scripts/launch/launch_plan.py", "--server", "--config", recipe, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **package_path()},
    )
    if checks.returncode or not checks.stdout.strip():  # it said what is wrong
        sys.exit(checks.returncode)
    plan = json.loads(checks.stdout)
    port, gpus = options.port or plan["wanted_port"], plan["server_gpus"]
    take_port(port)
    command, environment = server_command(python, plan, port, gpus, options.host)
    if not is_local(options.host):
        guards = {
            "vllm": "VLLM_API_KEY guards only paths that begin with /v1, /v2, /inference, /cohere.",
            "sglang": "a key (SERVER_ARGS='--api-key KEY', and VLLM_API_KEY for the trainer) guards it.",
        }[plan["engine"]]
        warning = (
            f"whoever reaches {options.host}:{port} can change the weights: {guards} Keep it in a trusted network."
        )
        print(f"serve: warning: {warning}", file=sys.stderr)
    place = f"GPU {gpus}" if gpus else "the CPU"
    print(f"serve: {TITLES[plan['engine']]} on {place}, http://{options.host}:{port}", flush=True)
    os.execvpe(command[0], command, {**os.environ, **environment})


if __name__ == "__main__":
    main()

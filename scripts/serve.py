"""Start the vLLM server that a recipe needs, apart from its trainer, in the foreground.

    bash scripts/serve.sh RECIPE [--host ADDRESS] [--port PORT] [trainer arguments...]
    bash scripts/serve.sh hf_recipes/tiny/calculator-vllm.yaml --port 8001

`scripts/train.sh` starts a server beside the trainer by itself. This is for a server on another node, or one that
outlives several runs: the trainer then gets its address by `--vllm_server_base_url http://ADDRESS:PORT`.

    --host  the address to listen on (default: 127.0.0.1, which other machines cannot reach)
    --port  the port (default: the recipe's vllm_server_port)

Environment:
    CUDA_VISIBLE_DEVICES  the GPUs to choose from; the server takes the first VLLM_TP of them
    VLLM_TP               GPUs of the server (tensor parallel, default 1)
    VLLM_ARGS             further flags for the server, separated by spaces
    VLLM_API_KEY          the key that requests to /v1 must have, here and in the trainer's environment

The development endpoints, by which the trainer changes the weights, ask nobody for the key: docs/cluster.md#ports.
"""

import argparse
import ipaddress
import json
import os
import subprocess
import sys
from contextlib import suppress

from train import package_path, read_command_line, server_command


def read_arguments(argv: list[str]) -> tuple[str, argparse.Namespace, list[str]]:
    """(recipe, host and port, arguments of the trainer)."""
    parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False, usage="bash scripts/serve.sh RECIPE [...]")
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


def main() -> None:
    recipe, options, arguments = read_arguments(sys.argv[1:])
    python = os.environ.get("PYTHON") or sys.executable
    checks = subprocess.run(
        [python, "scripts/serve_plan.py", "--config", recipe, *arguments], stdout=subprocess.PIPE,
        text=True, env={**os.environ, **package_path()},
    )  # fmt: skip
    if checks.returncode or not checks.stdout.strip():  # it said what is wrong
        sys.exit(checks.returncode)
    plan = json.loads(checks.stdout)
    port, gpus = options.port or plan["wanted_port"], plan["server_gpus"]
    command, environment = server_command(python, plan, port, gpus, options.host)
    if not is_local(options.host):
        print(f"serve: warning: whoever reaches {options.host}:{port} can change the weights: VLLM_API_KEY guards "
              "only paths that begin with /v1, /v2, /inference, /cohere. Keep it in a trusted network.",
              file=sys.stderr)  # fmt: skip
    print(f"serve: vLLM on {f'GPU {gpus}' if gpus else 'the CPU'}, http://{options.host}:{port}", flush=True)
    os.execvpe(command[0], command, {**os.environ, **environment})


if __name__ == "__main__":
    main()

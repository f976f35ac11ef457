"""What `scripts/launch/serve.py` has to start for a recipe: the server alone, checked before it is started.

    python scripts/launch/serve_plan.py --config RECIPE [trainer arguments...]

Prints JSON with the keys that `server_command` of scripts/launch/train.py reads.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from evaluate import load_recipe, option

from launch.launch_plan import and_engines, data_parallel_size, server_context, server_dtype, visible_gpus
from mt_grpo.recipe.refusals import backend_of


def make_plan(recipe: str, arguments: list[str]) -> dict[str, Any]:
    """The server for `--config recipe arguments...`. Raises `ValueError` with what is wrong."""
    script_args, args, model_args = load_recipe(recipe, arguments)
    if backend_of(args) != "server":
        raise ValueError(f"{recipe} trains without a vLLM server. Expected use_vllm: true and vllm_mode: server.")
    per_engine, engines = int(os.environ.get("VLLM_TP") or 1), data_parallel_size()
    size = per_engine * engines
    use_cpu = str(option(["--config", recipe, *arguments], "use_cpu")).lower() in ("true", "1", "yes")
    gpus = [] if use_cpu else visible_gpus()
    if gpus and len(gpus) < size:
        raise ValueError(
            f"VLLM_TP={per_engine}{and_engines(engines)}: {len(gpus)} GPUs are visible ({','.join(gpus)}). Expected "
            f"{size} or more: make more visible, or lower the number."
        )
    return {
        "model": model_args.model_name_or_path, "revision": model_args.model_revision or "main",
        "trust_remote_code": args.trust_remote_code, "wanted_port": args.vllm_server_port,
        "max_model_len": server_context(script_args, args, model_args, args), "weight_sync": args.weight_sync,
        "dtype": server_dtype(args, model_args) if gpus else "float32", "tensor_parallel": per_engine,
        "server_gpus": ",".join(gpus[:size]),
    }  # fmt: skip


def main() -> None:
    output = os.dup(1)  # for the plan alone: what tools and libraries print goes to standard error
    os.dup2(2, 1)
    try:
        plan = make_plan(sys.argv[2], sys.argv[3:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    os.write(output, json.dumps(plan).encode())


if __name__ == "__main__":
    main()

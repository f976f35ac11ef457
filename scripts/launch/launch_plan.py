"""What `scripts/launch/train.py` has to start for a recipe, found out and checked before anything is started.

    python scripts/launch/launch_plan.py --config RECIPE [trainer arguments...]
    python scripts/launch/launch_plan.py --server --config RECIPE [...]    # the server alone, as serve.py wants it

Prints JSON, with the keys that `server_command` of scripts/launch/train.py reads. Loads tools, rewards, data, the
tokenizer and the model's configuration, but no weights.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    if "--help" in sys.argv:
        sys.exit(print(__doc__))

import torch
from recipes import load_recipe, option
from transformers import AutoConfig, AutoTokenizer
from trl import get_peft_config

import mt_grpo_trainer as mt
from launch.train import sglang_python
from mt_grpo.base.files import output_lock
from mt_grpo.generation.weights import room_for, slots_of, why_config_merges
from mt_grpo.images.pictures import reader_of, with_pictures
from mt_grpo.images.reader import image_reader
from mt_grpo.recipe.checks import backend_of, check_dataset, check_images, longest_prompt, prepare_data, why_text
from mt_grpo.recipe.parse import read_recipe
from mt_grpo.recipe.plugins import load_recipe_tools, load_rewards, load_splits
from mt_grpo.training.rewards import weights_of

LOCAL_HOSTS = ("0.0.0.0", "127.0.0.1", "localhost")


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    return named[:count] if named else [str(i) for i in range(count)]


def data_parallel_size() -> int:
    """The engines of one server: --data-parallel-size or -dp in VLLM_ARGS. Raises `ValueError` for no number."""
    text = os.environ.get("VLLM_ARGS", "")
    found = re.findall(r"(?:^|\s)(?:--data[-_]parallel[-_]size|--dp-size|--dp|-dp)(?:[\s=]+(\S+)|$)", text)
    if found and not re.fullmatch("[1-9][0-9]*", found[-1]):
        raise ValueError(f"VLLM_ARGS={text!r}: --data-parallel-size is {found[-1]!r}, expected a number from 1.")
    return int(found[-1]) if found else 1


def share_gpus(gpus: list[str], servers: int, per_engine: int, engines: int = 1) -> tuple[list[str], list[str]]:
    """(GPUs that train, the GPUs of each server): the last ones generate. Each server has so many engines.

    >>> share_gpus(["0", "1", "2"], 1, 1), share_gpus(["0"], 0, 1), share_gpus([], 2, 1)
    ((['0', '1'], ['2']), (['0'], []), ([], ['', '']))
    >>> share_gpus(list("01234567"), 2, 2), share_gpus(list("01234"), 1, 2, engines=2)
    ((['0', '1', '2', '3'], ['4,5', '6,7']), (['0'], ['1,2,3,4']))
    """
    if not servers or not gpus:
        return gpus, [""] * servers
    per_server = per_engine * engines
    taken = servers * per_server
    if len(gpus) <= taken:
        raise ValueError(
            f"VLLM_SERVERS={servers} of {engines} engines with VLLM_TP={per_engine} take {taken} GPUs. {len(gpus)} "
            f"are visible, expected {taken + 1} or more. With one GPU add: --vllm_mode colocate --max_staleness 0"
        )
    generating = gpus[-taken:]
    return gpus[:-taken], [",".join(generating[i : i + per_server]) for i in range(0, taken, per_server)]


def check_for_processes(argv: list[str], num_processes: int) -> mt.MTGRPOConfig:
    """The settings with the batch of so many processes. Raises `ValueError` for what the trainer would find there."""
    for key in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        # One process with the batch of all of them passes the same checks.
        argv = [*without(argv, key), f"--{key}", str(num_processes * int(option(argv, key)))]
    return mt.parse_arguments(argv)[1]


def without(argv: list[str], key: str) -> list[str]:
    """The arguments but for those of one key, of which a second one would be complained about."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{key}", f"--{key.replace('_', '-')}")
    return parser.parse_known_args(argv)[1]


def server_dtype(args: mt.MTGRPOConfig, model_args: Any) -> str:
    """The type in which the policy computes: that of mixed precision, else that of its weights."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else model_args.dtype or "auto"


def make_plan(recipe: str, arguments: list[str]) -> dict[str, Any]:
    """What to start for `--config recipe arguments...`, checked. Raises `ValueError` with what is wrong."""
    argv = ["--config", recipe, *arguments]
    script_args, args, model_args = load_recipe(recipe, arguments)
    uses_server = backend_of(args) == "server"
    starts_server = uses_server and not args.vllm_server_base_url and args.vllm_server_host in LOCAL_HOSTS
    num_servers, per_engine = (int(os.environ.get(name) or 1) for name in ("VLLM_SERVERS", "VLLM_TP"))
    if not starts_server and (num_servers, per_engine) != (1, 1):
        raise ValueError(f"VLLM_SERVERS={num_servers}, VLLM_TP={per_engine}: for this recipe no server is started.")
    gpus = usable_gpus(argv)
    trainers, servers = share_gpus(gpus, num_servers * starts_server, per_engine, data_parallel_size())
    num_processes = int(os.environ.get("NUM_PROCESSES") or len(trainers) or (2 if uses_server else 1))
    if num_processes < 1 or (trainers and num_processes > len(trainers)):
        raise ValueError(f"NUM_PROCESSES={num_processes}: expected 1 to {len(trainers) or 'the number of cores'}.")
    whole = check_for_processes(argv, num_processes)
    with output_lock(args.output_dir):  # the trainer takes it; here it is told before a server is started
        pass
    plan = {
        "starts_server": starts_server, "uses_server": uses_server, "output_dir": args.output_dir,
        "preflight": script_args.preflight,
        "num_processes": num_processes, "trainer_gpus": ",".join(trainers[:num_processes]),
        "server_gpus": servers, "tensor_parallel": per_engine, "engine": args.rollout_engine,
        "deepspeed": importlib.util.find_spec("deepspeed") is not None,
    }  # fmt: skip
    # Weights kept in bfloat16 lose steps of 1e-6 in rounding; ZeRO-3 and FSDP keep float32 ones too, DDP does not.
    dtype_is_given = any(a.split("=")[0] == "--dtype" for a in arguments)
    plan["float32_for_ddp"] = bool(trainers) and model_args.dtype == "bfloat16" and not dtype_is_given
    plan["precision"] = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if starts_server:
        check_installed(args.rollout_engine)
        uses_nccl = bool(servers[0]) and args.weight_sync != "disk" and args.rollout_engine == "vllm"
        key = "vllm_group_port"
        given = not uses_nccl or without(argv, key) != argv or key in read_recipe(recipe, mt.recipe_classes())
        plan |= server_plan(script_args, args, model_args, whole, on_gpu=bool(servers[0]))
        plan["wanted_group_port"] = None if given else args.vllm_group_port
        by_default = "zero3" if trainers and plan["deepspeed"] and not plan["images"] else ""
        config = os.environ.get("ACCELERATE_CONFIG") or (by_default if plan["num_processes"] > 1 else "")
        sharded = bool(config) and Path(config).stem not in ("ddp", "cpu")
        if plan["num_processes"] > 1 and sharded:
            plan["adapters"] = None  # ZeRO-3 or FSDP: the adapter of a sharded model is merged
        if plan["float32_for_ddp"] and not sharded and plan["precision"] == "no":  # the trainer's weights will be so
            plan |= {"dtype": "float32", "adapters": None}
    return plan


def check_installed(engine: str) -> None:
    """Raise `ValueError` unless the engine of a server can be started."""
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed. Run: bash scripts/setup.sh --gpu (without a GPU: --test)")
    if engine == "sglang" and shutil.which(sglang_python()) is None:
        raise ValueError(f"SGLANG_PYTHON: there is no {sglang_python()}. Run: bash scripts/setup.sh --sglang")


def usable_gpus(argv: list[str]) -> list[str]:
    """The visible GPUs; none with `use_cpu`."""
    return [] if str(option(argv, "use_cpu")).lower() in ("true", "1", "yes") else visible_gpus()


def server_plan(
    script_args: Any, args: mt.MTGRPOConfig, model_args: Any, whole: mt.MTGRPOConfig, on_gpu: bool
) -> dict[str, Any]:
    """What a server is started with. Raises `ValueError` for tools, rewards or data that do not load.

    Its context has the longest prompt and a completion, or is the model's.
    """
    tools = load_recipe_tools(script_args)
    turn_funcs, outcome_funcs = load_rewards(script_args.reward_fn)
    weights_of(turn_funcs, args.turn_reward_weights, "turn")
    weights_of(outcome_funcs, args.outcome_reward_weights, "outcome")
    name, revision = model_args.model_name_or_path, model_args.model_revision
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    env = mt.build_env(script_args, args, tools, tokenizer)
    with_pictures(tokenizer, why_text(args) or image_reader(name, config, tokenizer, revision))
    train, test = load_splits(script_args, whole.eval_strategy, env.environments)
    train, _ = prepare_data(env, whole, train)
    needed = 0
    for split, rows in ((script_args.dataset_train_split, train), (script_args.dataset_test_split, test)):
        if rows is not None:
            where = f"dataset {script_args.dataset_name!r}, split {split!r}"
            check_dataset(rows, where, env)
            check_images(rows, where, env)
            needed = max(needed, longest_prompt(env, rows) + args.max_completion_length)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or needed
    return {
        "model": name, "revision": revision or "main", "trust_remote_code": args.trust_remote_code,
        "wanted_port": args.vllm_server_port, "max_model_len": min(needed, context),
        "images": reader_of(tokenizer) is not None, "weight_sync": args.weight_sync,
        "dtype": server_dtype(args, model_args) if on_gpu else "float32", "engine": args.rollout_engine,
        "adapters": adapters_of(args, model_args, on_gpu),
    }  # fmt: skip


def adapters_of(args: mt.MTGRPOConfig, model_args: Any, on_gpu: bool) -> list[int] | None:
    """The rank and the number of adapters that the server has to have room for; None where the recipe pushes none."""
    config = get_peft_config(model_args)
    merges = args.weight_sync in ("disk", "nccl") or args.rollout_engine != "vllm"
    if config is None or merges or why_config_merges(config):
        return None
    if on_gpu and server_dtype(args, model_args) == "float32":  # vLLM's kernels of adapters take halves alone
        return None
    return [room_for(config.r), slots_of(args.max_staleness)]


def make_server_plan(recipe: str, arguments: list[str]) -> dict[str, Any]:
    """The server alone for `--config recipe arguments...`, checked. Raises `ValueError` with what is wrong."""
    script_args, args, model_args = load_recipe(recipe, arguments)
    args.eval_strategy = option(["--config", recipe, *arguments], "eval_strategy")  # load_recipe sets it to no
    if backend_of(args) != "server":
        raise ValueError(f"{recipe} trains without a server. Expected use_vllm: true and vllm_mode: server.")
    check_installed(args.rollout_engine)
    per_engine, gpus = int(os.environ.get("VLLM_TP") or 1), usable_gpus(["--config", recipe, *arguments])
    size = per_engine * data_parallel_size()
    if gpus and len(gpus) < size:
        raise ValueError(f"VLLM_TP={per_engine}: {len(gpus)} GPUs are visible ({','.join(gpus)}), expected {size}.")
    plan = server_plan(script_args, args, model_args, args, on_gpu=bool(gpus))
    return {**plan, "tensor_parallel": per_engine, "server_gpus": ",".join(gpus[:size])}


def main() -> None:
    alone = sys.argv[1:2] == ["--server"]
    argv = sys.argv[1 + alone :]
    if len(argv) < 2 or argv[0] != "--config":
        sys.exit(f"error: expected --config RECIPE, got {argv}")
    output = os.dup(1)  # for the plan alone: what tools and libraries print goes to standard error
    os.dup2(2, 1)
    try:
        plan = (make_server_plan if alone else make_plan)(argv[1], argv[2:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    os.write(output, json.dumps(plan).encode())


if __name__ == "__main__":
    main()

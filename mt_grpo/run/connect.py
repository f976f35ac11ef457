"""What samples for a trainer: servers, the colocated engine or the model itself. Servers get the policy's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_peft_model

from mt_grpo.base.ranks import on_main_process
from mt_grpo.generation.adapters import slots_of
from mt_grpo.generation.connection import server_urls
from mt_grpo.generation.in_process import InProcessBackend, neutral_generation
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.generation.weight_sync import WeightSync
from mt_grpo.generation.weights import PolicyWeights
from mt_grpo.images.messages import reader_of
from mt_grpo.images.pictures import TOWER, forbid, inputs_of_requests, is_picture, share_marks
from mt_grpo.training.policy_scores import asked_of


def pool_of(
    args: Any, client_class: type, tokenizer: Any, host: str | None = None, port: int | None = None
) -> ServerPool:
    """The servers that `args` name, one or several, or the one at this host or port."""
    urls = [] if host or port else server_urls(args.vllm_server_base_url)
    clients = [
        client_class(
            host or args.vllm_server_host,
            port or args.vllm_server_port,
            tokenizer,
            base_url=url,
            timeout=args.vllm_server_timeout,
            request_timeout=args.vllm_request_timeout,
            transport=args.weight_sync,
            sync_dir=args.weight_sync_dir,
            group_port=args.vllm_group_port + number,
            engine=args.rollout_engine,
        )
        for number, url in enumerate(urls or [None])
    ]
    if args.vllm_server_base_url:  # `args` are logged and saved with the model; a password must not be
        args.vllm_server_base_url = ",".join(client.base_url for client in clients)
    return ServerPool(clients)


def connect_backend(trainer: Any, first_ids: Callable[[], list[int]]) -> Any:
    """Create a trainer's generation backend, and `weight_sync`, which checks pushes with the ids of a first prompt."""
    args, ends, model, accelerator = trainer.args, trainer.eos_token_ids, trainer.model, trainer.accelerator
    forbid(reader_of(trainer.env.tokenizer), model, trainer.ref_model)
    if accelerator.num_processes > 1:
        share_marks(on_main_process)
    for name, parameter in model.named_parameters() if args.freeze_vision_tower else ():
        parameter.requires_grad_(parameter.requires_grad and not TOWER.search(name))
    if trainer.backend == "server":
        client = trainer.client
        client.instance = on_main_process(lambda: client.instance)  # all ranks expect the same version
        weights = trainer.vllm_generation = PolicyWeights(model, accelerator, trainer.processing_class, mode="none")
        if client.servers[0].engine.NAMES_OF_FILES:
            weights.use_names_of_files()
        probe, num_adapters = probe_ids(first_ids(), trainer.env.tokenizer), slots_of(args.max_staleness)
        scores = "policy" in asked_of(trainer.reward_functions.functions) - set(trainer.train_dataset.column_names)
        trainer.weight_sync = WeightSync(client, model, weights, accelerator, probe, num_adapters, scores)
        return client
    if trainer.backend == "colocate":
        stops = {"stop": list(trainer.env.format_of(trainer.env.tokenizer).stops), "stop_token_ids": ends}
        stops |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
        trainer.vllm_generation.generation_kwargs = {**(args.generation_kwargs or {}), **stops}
        if is_peft_model(model) and trainer.vllm_generation._dist.fsdp_version != 1:
            # TRL merges the adapter into the frozen weights and takes it out again: in half precision they drift.
            merged = PolicyWeights(model, accelerator, trainer.processing_class, mode="none")
            trainer.vllm_generation._iter_named_params = merged.named_weights
    else:
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = ends
    loads_seen = 0

    def generate(prompt_ids: list[list[int]], max_tokens: int) -> tuple[list, list | None]:
        nonlocal loads_seen
        if trainer.backend == "colocate":
            trainer.vllm_generation.max_completion_length = max_tokens
            if loads_seen != trainer._weight_counter.loads:  # a checkpoint was loaded at the same global_step
                loads_seen, trainer._last_loaded_step = trainer._weight_counter.loads, -1
        else:
            trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = max_tokens
        training = trainer.model.training
        prompt_ids, shown = inputs_of_requests(prompt_ids)
        try:
            with neutral_generation(trainer.model):
                return trainer._generate_single_turn(prompt_ids, None, shown, 1)
        finally:
            trainer.model.train(training)  # TRL's continuous batching leaves the model in training mode

    def any_rank(flag: bool) -> bool:
        return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device)).item())

    # TRL's generation is collective if the model is sharded.
    return InProcessBackend(generate, lambda i: i in trainer.eos_token_ids, any_rank if trainer._is_sharded else None)


def probe_ids(ids: list[int], tokenizer: Any) -> list[int]:
    """The ids whose logprobs prove a push: at most 256 of a prompt without images, after one that proves the tower."""
    text = [token for token in ids if not is_picture(token)][:256]
    return (tokenizer.drawn_ids() if reader_of(tokenizer) is not None else []) + text

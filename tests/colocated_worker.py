"""Trains with vLLM in the training process, on a CPU, and says what happened: run by test_colocate.py.

    python tests/colocated_worker.py OUT.json PART --config RECIPE ...

vLLM's CPU backend packs its weights at load, so that TRL's last call, `load_weights` of the engine's model, cannot run
here. `load_from_file` replaces that call, and nothing before it: when TRL syncs, its walk over the parameters, and the
reset of the prefix cache are TRL's.
"""

import copy
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

import torch
from safetensors.torch import save_file

import mt_grpo_trainer as mt
from mt_grpo.conversation.formats.choose import CLOSING_TAGS


def load_from_file(generation):
    """Let the engine of TRL's `VLLMGeneration` read what TRL hands to `load_weights` from a file.

    `lm_head` is written beside the embedding that it is tied to: on GPUs both are one tensor of the engine; on a CPU
    the engine keeps a packed copy. Returns the number of weights of each sync, which grows.
    """
    llm, loads, weights = generation.llm, [], {}
    model, reset = llm.llm_engine.model_executor.driver_worker.model_runner.model, llm.reset_prefix_cache

    def collect(pairs):
        weights.update((name, tensor.detach().clone()) for name, tensor in pairs)

    def load_and_reset():
        if "lm_head.weight" not in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        with tempfile.TemporaryDirectory() as folder:
            save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            del model.load_weights  # `reload_weights` calls it
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            model.load_weights = collect
        loads.append(len(weights))
        weights.clear()
        return reset()

    model.load_weights, llm.reset_prefix_cache = collect, load_and_reset
    return loads


def note_rounding(trainer):
    """Measure, on each batch, what the engine's data type alone makes of the right weights.

    Returns:
        Mean differences of the logprobs of the trainer's model and of a copy of it in bfloat16, by batch, which grow.
        They are over the same tokens as `sampling_logp_difference`: those that the policy sampled.
    """
    generate, noted = trainer._generate_and_score_completions, []

    @torch.no_grad()
    def measured(inputs):
        output = generate(inputs)
        ids, mask = (torch.cat([output[f"prompt_{k}"], output[f"completion_{k}"]], 1) for k in ("ids", "mask"))
        coarse = copy.deepcopy(trainer.model).to(torch.bfloat16)
        length = output["completion_ids"].shape[1]
        logps = trainer._get_per_token_logps_and_entropies(coarse, ids, mask, length)[0]
        sampled = (output["completion_mask"] * output["tool_mask"]).bool()
        noted.append((logps.float() - output["old_per_token_logps"])[sampled].abs().mean().item())
        return output

    trainer._generate_and_score_completions = measured
    return noted


def steps(trainer):
    """The logged steps."""
    return [row for row in trainer.state.log_history if "reward" in row]


def differences(trainer):
    """Mean difference of the logprobs of trainer and engine, by step."""
    return [row["sampling/sampling_logp_difference/mean"] for row in steps(trainer)]


def train(trainer):
    """Steps with syncs, steps without, steps with syncs again."""
    told = {"syncs": load_from_file(trainer.vllm_generation)}
    told["dtype"] = str(trainer.vllm_generation.llm.model_config.dtype)
    told["rounding"] = note_rounding(trainer)
    head = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    told |= {"steps": steps(trainer), "head_moved": (trainer.model.lm_head.weight - head).abs().max().item()}
    sync = trainer.vllm_generation.sync_weights
    trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    told["without_sync"] = differences(trainer)
    trainer.vllm_generation.sync_weights = sync
    trainer.train()
    told["with_sync_again"] = differences(trainer)
    return told


def checkpoint(trainer):
    """Weights that are loaded at the step at which the engine was synced last."""
    told = {"syncs": load_from_file(trainer.vllm_generation)}
    trainer.train()
    saved = f"{trainer.args.output_dir}/checkpoint-{trainer.state.global_step}"
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.5)
    prompts = [trainer.env.prompt_ids([{"role": "user", "content": "What is 12 * 34?"}], trainer.env.tokenizer)] * 8
    trainer.llm._generate_batch(prompts, 16)  # the engine gets the scaled norm, at this step
    told |= {"step": trainer.state.global_step, "last_sync": trainer._last_loaded_step}
    trainer.args.max_steps += 1
    trainer.train(resume_from_checkpoint=saved)
    told["differences"] = differences(trainer)[-1:]
    return told


def plain(trainer):
    """Training alone. `beyond`: what the engine sampled behind a closing tag."""
    told = {"syncs": load_from_file(trainer.vllm_generation), "beyond": [], "seed": torch.initial_seed()}
    generate = trainer.llm._generate_batch

    def watched(prompts, max_tokens):
        token_ids, logprobs = generate(prompts, max_tokens)
        texts = trainer.env.tokenizer.batch_decode(token_ids)
        told["beyond"] += [text for text in texts if any(tag in text[: -len(tag)] for tag in CLOSING_TAGS)]
        return token_ids, logprobs

    trainer.llm._generate_batch = watched
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    moved = [n for n, p in trainer.model.named_parameters() if n in frozen and not torch.equal(p, frozen[n])]
    return {**told, "steps": steps(trainer), "frozen": len(frozen), "frozen_moved": moved}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, part = sys.argv[1:3]
    built = mt.build_trainer(*mt.parse_arguments(sys.argv[3:]))
    result = {"train": train, "checkpoint": checkpoint, "plain": plain}[part](built)
    if built.accelerator.is_main_process:
        Path(out).write_text(json.dumps(result))

"""Evaluate a model on held-out problems, with a recipe's tools, rewards, limits and sampling parameters.

    python scripts/evaluate.py --config hf_recipes/tiny/calculator.yaml
    python scripts/evaluate.py --config hf_recipes/tiny/chain-sparse.yaml --model runs/chain-sparse --k 4
    python scripts/evaluate.py --config hf_recipes/tiny/calculator.yaml --greedy --show 5
    python scripts/evaluate.py --config hf_recipes/Qwen/Qwen3-1.7B--triviaqa.yaml --server http://127.0.0.1:8000

Any further argument overrides the recipe, as in training: `--temperature 0.5 --max_env_steps 1`.
With `TRAINER=my_idea.py` in the environment a copy of the trainer takes its place (scripts/recipes.py).
"""

# ruff: noqa: E402
import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--config", required=True, help="recipe")
PARSER.add_argument("--model", help="path or name; default: the recipe's. With --server: what it must hold")
PARSER.add_argument("--server", help="evaluate what this vLLM server serves, such as http://127.0.0.1:8000")
PARSER.add_argument("--num_problems", type=int, default=512)
PARSER.add_argument("--split", default="test", help="test (default) or train")
PARSER.add_argument("--seed", type=int, default=0, help="of the sampling, without --server")
PARSER.add_argument("--k", type=int, default=1, help="samples per problem; adds pass@k")
PARSER.add_argument("--greedy", action="store_true", help="the most probable token each time, no sampling")
PARSER.add_argument("--batch_size", type=int, default=128, help="conversations at a time")
PARSER.add_argument("--show", type=int, default=0, help="print the first so many conversations, too")
if __name__ == "__main__":  # --help is answered before what takes seconds to import
    PARSER.parse_known_args()

from mt_grpo.rollout import Rollout  # the package comes before torch (mt_grpo/__init__.py)

# isort: split
import torch
from recipes import Recipe, accepted_answers, load_recipe
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.trainer_callback import TrainerState
from transformers.utils.logging import disable_progress_bar

import mt_grpo_trainer as mt
from mt_grpo.base.errors import RunError, ServerError
from mt_grpo.base.event_loop import gather_all, run_async
from mt_grpo.base.rows import prompts_of
from mt_grpo.conversation.conversations import sampling_params
from mt_grpo.generation.in_process import InProcessBackend, neutral_generation
from mt_grpo.images.forward import forbid, inputs_of_requests
from mt_grpo.images.pictures import is_picture, reader_of, with_pictures
from mt_grpo.images.reader import FAMILIES, image_reader, readable_messages
from mt_grpo.recipe.checks import check_generation_kwargs, check_images, check_tokenizer, prompt_ids_of
from mt_grpo.recipe.data import empty_prompts, load_rows
from mt_grpo.recipe.plugins import load_recipe_tools, load_rewards, load_splits
from mt_grpo.training.batch import Batch
from mt_grpo.training.policy_scores import asked_of, scores_of_model, scores_of_servers
from mt_grpo.training.rewards import RewardFunctions

OF_ENVIRONMENTS = ("environment", "tool")  # rewards that replies and results may bring, whether or not they do
RESULT_FOUND = ("result_found", "in_search_results", "right_corner", "answer_printed")  # of a right tool result

# -- Backends --


def ends_in(config: GenerationConfig) -> list[int]:
    """The ids that end a turn by a generation config. Training ends turns there too."""
    ends = config.eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def in_process_backend(
    model: Any, tokenizer: Any, args: mt.MTGRPOConfig, end_of_turn_ids: list[int], greedy: bool = False
) -> InProcessBackend:
    """`model.generate` behind the conversations' protocol: left padding, the recipe's sampling, neutral otherwise.

    With `greedy` each token is the most probable one, and no sampling parameter of the recipe counts. A turn ends with
    its first end-of-turn token; what follows is padding.
    """

    def cut(token_ids: list[int]) -> list[int]:
        return token_ids[: next((i for i, token in enumerate(token_ids) if token in eos_ids), len(token_ids)) + 1]

    eos_ids = {*ends_in(model.generation_config), tokenizer.eos_token_id, *end_of_turn_ids} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sampling = {} if greedy else sampling_params(args)  # transformers warns of a temperature that nothing reads

    def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[filler] * (longest - len(row)) + row for row in rows], device=model.device)

    @torch.no_grad()
    def generate_batch(prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], None]:
        prompts, shown = inputs_of_requests(prompts)
        shown = {name: padded(v, 0) if isinstance(v, list) else v.to(model.device) for name, v in shown.items()}
        ids, mask = padded(prompts, pad), padded([[1] * len(p) for p in prompts], 0)  # (B, P)
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=not greedy, eos_token_id=sorted(eos_ids), pad_token_id=pad, **sampling
        )
        with neutral_generation(model):
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **shown)
        return [cut(row) for row in output[:, ids.shape[1] :].tolist()], None

    return InProcessBackend(generate_batch, eos_ids.__contains__)


def revision_of(source: str, model_args: mt.ModelKeys) -> str:
    """The revision of a model or a tokenizer: the recipe's `model_revision` for the recipe's own."""
    return (model_args.model_revision or "main") if source == model_args.model_name_or_path else "main"


def load_model(path: str, args: mt.MTGRPOConfig, model_args: mt.ModelKeys) -> Any:
    """A language model on the GPU if there is one. It reads images, or text alone, then maybe with a LoRA adapter."""
    source, kind, how = path, AutoModelForCausalLM, {"trust_remote_code": args.trust_remote_code}
    with contextlib.suppress(OSError, ValueError, KeyError):
        if (adapter := Path(path) / "adapter_config.json").is_file():  # whose folder has no configuration of a model
            source = json.loads(adapter.read_text())["base_model_name_or_path"]
        how["revision"] = revision_of(source, model_args)
        config = AutoConfig.from_pretrained(source, **how)
        kind = AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM
    how |= {"dtype": model_args.dtype or "auto", "attn_implementation": model_args.attn_implementation}
    model = kind.from_pretrained(path, **how)
    return model.to("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")


# -- Evaluation --


def evaluate(
    model: Any,
    recipe: str | Recipe,
    num_problems: int = 512,
    split: str = "test",
    seed: int = 0,
    k: int = 1,
    tokenizer: Any = None,
    batch_size: int = 128,
    progress: bool = True,
    greedy: bool = False,
    show: int = 0,
    holds: str | None = None,
) -> dict[str, Any]:
    """Roll out `k` conversations for each of `num_problems` problems and score them with the recipe's rewards.

    Args:
        model: A path or name, a loaded model, or a `VLLMServerClient`.
        recipe: A recipe file, or what `load_recipe` or `mt_grpo_trainer.parse_arguments` made of one.
        num_problems: The first so many rows of the split.
        split: `test` or `train`, or what the dataset calls it.
        seed: Of the sampling in this process; the problems do not depend on it. A server samples by its own `--seed`.
        k: Samples per problem.
        tokenizer: None: the model's, or that of the recipe's model.
        batch_size: Conversations at a time; more need more memory.
        progress: Show a bar on standard error.
        greedy: Take the most probable token each time: what the model can do before any training.
        show: The first so many `conversations` are in the result, too.
        holds: Path or name of the model whose weights the server must hold: logprobs of a prompt are compared.

    Returns:
        `rewards` (`turn` and `outcome`: mean per function, None where it never applied), `exact_match` (pass@1),
        `pass_at_k`, `tool_executed` (share of rollouts with at least one successful call; None without tools),
        `result_found` (share for which a reward function says so; without one, of which a tool's result was the
        answer itself), `mean_turns`, `failed` (share of rollouts whose environment or agent failed, which no reward
        counts), `stop_reasons` (shares), and what was evaluated. Entries that the rewards cannot tell are None.
    """
    started = time.perf_counter()
    script_args, args, model_args = load_recipe(recipe) if isinstance(recipe, str) else recipe
    tools = load_recipe_tools(script_args)
    turn_funcs, outcome_funcs = load_rewards(script_args.reward_fn)
    served = isinstance(model, mt.VLLMServerClient)
    name = model if isinstance(model, str) else model.model_card["id"] if served else model.config._name_or_path
    if not served:
        check_generation_kwargs(args, "transformers")
    if isinstance(model, str):
        model = load_model(model, args, model_args)
    source = model_args.model_name_or_path if served else name  # of the tokenizer, and of what reads images
    how = {"trust_remote_code": args.trust_remote_code, "revision": revision_of(source, model_args)}
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(source, **how)
    path = tokenizer.name_or_path
    config = AutoConfig.from_pretrained(path, **how) if served else model.config
    with_pictures(tokenizer, image_reader(source, config, tokenizer, how["revision"]))
    if served:
        model.tokenizer, model.vocab_size = tokenizer, getattr(config.get_text_config(), "vocab_size", None)
    else:
        forbid(reader_of(tokenizer), model)
    env = mt.build_env(script_args, args, tools, tokenizer)
    generation = None if served else model.generation_config
    with contextlib.suppress(OSError):  # a served model may have no such file here
        generation = generation or GenerationConfig.from_pretrained(path, revision=revision_of(path, model_args))
    env.add_ends(ends_in(generation) if generation else [])
    if dataset := script_args.dataset_name:
        named = {"train": script_args.dataset_train_split, "test": script_args.dataset_test_split}.get(split, split)
        rows = load_rows(dataset, named, num_problems, script_args.dataset_config, env.environments is None)
    else:
        load_splits(script_args, "no", env.environments)  # raises unless an environment may bring the prompts
        rows = empty_prompts(num_problems)
    check_images(rows, split, env)
    env.max_model_len = getattr(config.get_text_config(), "max_position_embeddings", None)
    if served:
        env.max_model_len = min(model.model_card["max_model_len"], env.max_model_len or 2**31)
        backend = model
    else:
        backend = in_process_backend(model, tokenizer, args, env.end_of_turn_ids(tokenizer), greedy)

    version, weights = run_async(model.held_version()) if served else None, None
    if served:  # a model's name says nothing after a push
        known = {None: "unknown: the server does not say", "default": "those that the server was started with"}
        weights = known.get(version, f"version {version}, pushed by a training run: not the named model's")
    if served and holds:
        named, ids = load_model(holds, args, model_args), prompt_ids_of(env, rows[0])
        weights = check_weights(model, holds, named, ids, env.format_of(tokenizer))
    functions = RewardFunctions.of(turn_funcs, outcome_funcs, env, optional=True)
    repeated = [row for row in rows for _ in range(k)]
    policy, written = {}, env.format_of(tokenizer)
    if "policy" in asked_of(functions.functions):
        own = scores_of_servers(model, written) if served else scores_of_model(model, written, contextlib.nullcontext)
        policy["policy"] = own
    with tqdm(total=len(repeated), desc="conversations", disable=not progress, file=sys.stderr) as bar:
        sampling = {"temperature": 0.0} if greedy else sampling_params(args)
        if served:  # in this process `in_process_backend` stops there
            sampling = {"stop_token_ids": env.end_of_turn_ids(tokenizer), **sampling}
        rollouts = roll_out(backend, env, repeated, sampling, seed, batch_size, bar)
    batch = Batch(repeated, k, mode="train" if split == "train" else "eval", data=rows, rollouts=rollouts)
    try:
        scores = score(functions, batch, args.reward_timeout, policy)
    finally:
        env.close(rollouts)

    main = next((name for name in functions.outcome_names if "exact_match" in name), functions.main_outcome)
    exact = scores.get(main)
    found = next((scores[name] for name in functions.turn_names if any(n in name for n in RESULT_FOUND)), None)
    if found:  # who read no result found nothing, unless the row has no answer
        read = [rollout.failed or any(turn.results for turn in rollout.turns) for rollout in rollouts]
        missed = [not any_read and row.get("answer") is not None for any_read, row in zip(read, repeated, strict=True)]
        found = [0.0 if value is None and miss else value for value, miss in zip(found, missed, strict=True)]
    answers = [row.get("answer") for row in repeated]
    results = [[result for turn in rollout.turns for result in turn.results] for rollout in rollouts]
    has_tools = bool(env.tools) or any(rollout.tools or each for rollout, each in zip(rollouts, results, strict=True))
    ran = [any(r.error is None and not r.text.startswith("Error:") for r in each) for each in results]
    seen = any(result.pictures for each in results for result in each)
    if found is None and has_tools and not seen and all(isinstance(answer, str) for answer in answers):
        golds = [accepted_answers(answer)[0] for answer in answers]
        found = [gold in [result.text for result in each] for gold, each in zip(golds, results, strict=True)]
    groups = [[v > 0 for v in exact[i : i + k] if v is not None] for i in range(0, len(exact or []), k)]
    solved = None if exact is None else [any(group) if group else None for group in groups]
    stops = Counter(str(rollout.stop_reason) for rollout in rollouts)
    return {
        "model": name, "backend": "vllm server" if served else "transformers", "split": split,
        "weights": weights,
        "file": Path(dataset).name if Path(dataset or "").is_file() else None,
        "num_problems": len(rows), "k": k, "seed": None if served or greedy else seed,
        "temperature": 0.0 if greedy else args.temperature,
        "rewards": {
            "turn": {name: mean(scores[name]) for name in functions.turn_names},
            "outcome": {name: mean(scores[name]) for name in functions.outcome_names},
        },
        "exact_match": exact and mean([v and float(v > 0) for v in exact]),
        "pass_at_k": solved and mean(solved),
        "tool_executed": mean(ran) if has_tools else None,
        "result_found": found and mean([v and float(v > 0) for v in found]),
        "mean_turns": mean([len(r.turns) for r in rollouts]), "failed": mean([r.failed for r in rollouts]),
        "stop_reasons": {reason: count / len(rollouts) for reason, count in stops.most_common()},
        "seconds": round(time.perf_counter() - started, 2),
        **({"conversations": conversations(rollouts[:show], scores)} if show else {}),
    }  # fmt: skip


def check_weights(client: mt.VLLMServerClient, path: str, model: Any, ids: list[int], written: Any) -> str:
    """What a server holds, in words. Raises `ServerError` unless its logprobs of `ids` are those of the model."""
    count = next((k for k, each in enumerate(reversed(ids[1:])) if is_picture(each)), len(ids) - 1)
    (ours,) = scores_of_model(model, written, contextlib.nullcontext).logprobs([ids[:-count]], [ids[-count:]])
    theirs = client.score(ids)[-count:]
    gap = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(theirs)
    exact = model.dtype == torch.float32 and str(client.engine.settings(client)["dtype"]).endswith("float32")
    if not gap <= (allowed := 1e-3 if exact else 0.1):  # as after a push
        raise ServerError(
            f"The server at {client.base_url} holds other weights than {path}: the mean difference of logprobs is "
            f"{gap:.2g}, expected at most {allowed:g}. Start it with this model, or remove --model."
        )
    return f"those of {path} (mean difference of logprobs {gap:.1e})"


def conversations(rollouts: list[Rollout], scores: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    """The messages from the prompt's last one on, the calls, answers, rewards and errors of rollouts."""
    return [
        {
            "messages": readable_messages([*rollout.prompt_messages[-1:], *rollout.messages]),
            "calls": [{"name": c.name, "arguments": c.arguments} for turn in rollout.turns for c in turn.calls],
            "answer": rollout.turns[-1].answer if rollout.turns else None,
            "stop_reason": str(rollout.stop_reason),
            "rewards": {name: values[i] for name, values in scores.items() if values[i] is not None},
            "error": str(rollout.error) if rollout.error else None,
        }
        for i, rollout in enumerate(rollouts)
    ]


def roll_out(
    backend: Any, env: mt.MultiTurnToolEnv, rows: list, sampling: dict, seed: int, batch_size: int, bar: tqdm
) -> list[Rollout]:
    """The conversations of all rows to their ends, `batch_size` at a time."""
    rollouts = env.start(prompts_of(rows), rows=rows)

    async def converse(rollout: Rollout) -> None:
        await env.converse_whole(rollout, backend, sampling)
        bar.update()

    in_process = isinstance(backend, InProcessBackend)
    try:
        with torch.random.fork_rng() if in_process else contextlib.nullcontext():
            torch.manual_seed(seed)
            for first in range(0, len(rollouts), batch_size):
                conversations = [converse(rollout) for rollout in rollouts[first : first + batch_size]]
                if in_process:
                    backend.serve(conversations)
                else:
                    run_async(gather_all(conversations))
    except BaseException:
        env.close(rollouts)
        raise
    return rollouts


def score(functions: RewardFunctions, batch: Batch, timeout: float, asked: dict) -> dict[str, list[float | None]]:
    """Each reward function's value per rollout, the sum of its turns' where it gives a list; None: does not apply.

    No function sees a rollout whose environment failed. Raises `RuntimeError` if all did.
    """
    rollouts = batch.rollouts
    if all(rollout.failed for rollout in rollouts):
        raise RunError(f"The environment failed in all {len(rollouts)} rollouts. The first: {rollouts[0].error}")
    told = {"trainer_state": TrainerState(), "log_extra": lambda *_: None, "log_metric": lambda *_: None, **asked}
    values = functions.score(batch, told, timeout, torch.device("cpu"))

    def total(value: float | list[float | None] | None) -> float | None:
        numbers = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None]
        return float(sum(numbers)) if numbers else None

    return {name: list(map(total, column)) for name, column in zip(functions.names, values, strict=True)}


def mean(values: list[float | None]) -> float | None:
    """The mean of those that apply; None if none does.

    >>> mean([1, None, 0]), mean([None])
    (0.5, None)
    """
    values = [float(v) for v in values if v is not None]
    return sum(values) / len(values) if values else None


# -- The table --


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def without_unused(rewards: dict[str, float | None]) -> dict[str, float | None]:
    """Turn rewards by their functions, without those of environments and tools that gave none."""
    return {name: value for name, value in rewards.items() if value is not None or name not in OF_ENVIRONMENTS}


def table(result: dict[str, Any]) -> str:
    """Format the result of `evaluate` as a table of text."""
    sampled = f"temperature {result['temperature']:g}" if result["temperature"] else "greedy"
    seeded = "" if result["seed"] is None else f", seed {result['seed']}"
    # One file has no splits: whoever trains on it is asked the questions of the training.
    where = f"{result['file']} (a file has no splits)" if result.get("file") else f"split {result['split']}"
    samples = "1 sample each" if result["k"] == 1 else f"{result['k']} samples each"
    lines = [f"model     {result['model']} ({result['backend']})"]
    lines += [f"weights   {result['weights']}"] if result.get("weights") else []
    lines += [f"problems  {result['num_problems']} of {where}, {samples}, {result['seconds']:.1f} s"]
    lines += [f"sampling  {sampled}{seeded}", ""]
    named = any("exact_match" in name for name in result["rewards"]["outcome"])
    label = "exact match" if named else "main outcome above 0"
    rows = [(f"{label} (pass@1)", result["exact_match"])]
    rows += [(f"{label} (pass@{result['k']})", result["pass_at_k"])] if result["k"] > 1 else []
    rows += [("tool executed", result["tool_executed"]), ("right result found", result["result_found"])]
    rows = [(label, value) for label, value in rows if value is not None]  # what this task has
    rows += [("failed, in no reward", result["failed"])] if result["failed"] else []
    rows.append(("mean turns", result["mean_turns"]))
    turn_rewards = without_unused(result["rewards"]["turn"])
    rows += [(f"turn reward: {name}", value) for name, value in turn_rewards.items()]
    rows += [(f"outcome reward: {name}", value) for name, value in result["rewards"]["outcome"].items()]
    rows += [(f"stop: {reason}", value) for reason, value in result["stop_reasons"].items()]
    width = max(len(label) for label, _ in rows)
    return "\n".join(lines + [f"{label:<{width}}  {number(value):>7}" for label, value in rows])


def transcript(conversation: dict[str, Any]) -> str:
    """A conversation for people: who says what, then why it ended and what it was given."""
    lines = []
    for message in conversation["messages"]:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        lines.append(f"{message['role']:>9}  " + text.strip().replace("\n", "\n" + " " * 11))
    rewards = ", ".join(f"{name} {value:g}" for name, value in conversation["rewards"].items())
    end = "; ".join(filter(None, (conversation["stop_reason"], rewards, conversation["error"])))
    return "\n".join([*lines, f"{'ended':>9}  {end}"])


def main(argv: list[str] | None = None) -> None:
    options, overrides = PARSER.parse_known_args(argv)
    disable_progress_bar()  # of loading weights
    if min(options.num_problems, options.k, options.batch_size) < 1 or options.show < 0:
        sys.exit("error: --num_problems, --k and --batch_size must be 1 or more, --show 0 or more.")
    if options.greedy and options.k > 1:
        sys.exit(f"error: --greedy gives the same answer each time, so that --k {options.k} has no effect.")
    try:
        recipe = load_recipe(options.config, overrides)
        model, tokenizer = options.model or recipe[2].model_name_or_path, None
        if options.server:
            how = {"trust_remote_code": recipe[1].trust_remote_code, "revision": revision_of(model, recipe[2])}
            tokenizer = AutoTokenizer.from_pretrained(model, **how)
            engine = recipe[1].rollout_engine
            model = mt.VLLMServerClient(base_url=options.server, tokenizer=tokenizer, timeout=30, engine=engine)
            model.wait_until_healthy()
            check_tokenizer(model, tokenizer, f"The server at {model.base_url}")
        further = "num_problems split seed k batch_size greedy show".split()
        given = {name: vars(options)[name] for name in further} | {"holds": options.server and options.model}
        result = evaluate(model, recipe, tokenizer=tokenizer, **given)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: of a server, a run or a reward
        sys.exit(f"error: {error}")
    print("\n\n".join([table(result), *map(transcript, result.get("conversations", []))]))


if __name__ == "__main__":
    main()

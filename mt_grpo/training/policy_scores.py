"""Logprobs of texts under the policy or the reference model, for reward functions."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.trainer.utils import use_adapter

from mt_grpo.base.errors import ServerError
from mt_grpo.base.ranks import RunError
from mt_grpo.base.rows import column_lists
from mt_grpo.generation.samples import tagged
from mt_grpo.images.pictures import inputs_of_rows, is_picture
from mt_grpo.rollout import Rollout, Turn
from mt_grpo.training.shared_prompts import Example, SharedRow, common_length, forward_inputs

# Passed if a reward function names them, unless the data has such a column; then also to others with **kwargs.
ASKED_COLUMNS = ("policy", "reference", "turn_contexts", "groups")
AT_ONCE = 32  # requests of a rank to its server
TRIES, PAUSE = 3, 2.0  # of one call to servers, and the seconds between two: a 503 may pass
LONGEST_REQUEST = 120.0  # seconds; `reward_timeout` has to see more than one server
LOGPS_PER_PASS = 256  # of a model of this process: each has a row as wide as the vocabulary
# Of all models: the policy and its reference may be the same modules, with and without an adapter, and an async reward
# function asks in another thread than the others.
ONE_AT_A_TIME = threading.Lock()


def asked_of(functions: list[Callable]) -> set[str]:
    """The names of `ASKED_COLUMNS` that reward functions have as parameters. `**kwargs` do not count.

    >>> def gain(rollout_turns, policy, **kwargs): ...
    >>> asked_of([gain, lambda turn_contexts: 0, lambda **kwargs: 0]) == {"policy", "turn_contexts"}
    True
    """
    parameters = [each for function in functions for each in inspect.signature(function).parameters.values()]
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return by_name & set(ASKED_COLUMNS)


class PolicyScores:
    """Computes logprobs under the policy (parameter `policy` of a reward) or the reference model (`reference`).

    Args:
        ask: From pairs (context, continuation), tuples of ids, to a dict with the logprobs of each continuation.
        written: The tool format of the conversations (`ToolFormat`), with its tokenizer.
        version: Returns the version of the weights that score.
        context: The most tokens of a context and its continuation together. None: no limit is known.
    """

    rounds: Rounds | None = None  # of a sharded model

    def __init__(self, ask: Callable, written: Any, version: Callable[[], str], context: int | None = None):
        self._ask, self._written, self._version, self._context = ask, written, version, context or float("inf")

    @property
    def version(self) -> str:
        """The version of the weights that score. With `max_staleness` a server's are newer than those that sampled."""
        return self._version()

    def logprobs(self, contexts: list[list[int]], continuations: list[list[int]]) -> list[list[float]]:
        """The logprob of each id of `continuations[i]` after `contexts[i]`, at temperature 1, on the full vocabulary.

        The run's temperature, `top_p` and the like have no effect. Equal pairs are computed once.

        Raises:
            ValueError: A pair does not fit (`fits`), or the lists differ in length.
        """
        pairs = list(zip(map(tuple, contexts), map(tuple, continuations), strict=True))
        for i, pair in enumerate(pairs):
            if not self.fits(*pair):
                raise ValueError(
                    f"policy.logprobs: pair {i} has {len(pair[0])} and {len(pair[1])} ids. Expected at least one id "
                    f"in each, and less than {self._context} together. Check pairs with policy.fits first."
                )
            if any(map(is_picture, pair[1])):
                raise ValueError(f"policy.logprobs: continuation {i} contains an image, which is never sampled.")
        found = self._ask(list(dict.fromkeys(pairs))) if pairs else {}
        return [list(found[pair]) for pair in pairs]

    def fits(self, context: Sequence[int], continuation: Sequence[int]) -> bool:
        """Whether a context and a continuation are not empty and fit into the model's context together."""
        return bool(context) and bool(continuation) and len(context) + len(continuation) < self._context

    def of_turns(self, rollout: Rollout) -> list[list[float]]:
        """The logprobs of each turn's sampled ids, given what the policy had read before them. One list per turn.

        The list is empty for a turn that does not fit into the context, and for one without ids.
        """
        sampled = [turn.token_ids for turn in rollout.turns]
        before = [ids[: len(ids) - len(own)] for ids, own in zip(turn_contexts(rollout), sampled)]
        asked = [k for k, (context, own) in enumerate(zip(before, sampled)) if self.fits(context, own)]
        found = dict(zip(asked, self.logprobs([before[k] for k in asked], [sampled[k] for k in asked])))
        return [found.get(k, []) for k in range(len(sampled))]

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return self._written.tokenizer(text, add_special_tokens=False)["input_ids"]

    def observation_ids(self, turn: Turn, texts: list[str]) -> list[int]:
        """The ids that would follow a turn if its calls had returned these texts, one per result.

        Other messages after the turn stay. Raises `ValueError` for a turn with a continuation.
        """
        if turn.continuation is not None:
            raise ValueError("policy.observation_ids: the turn has a continuation by the environment, and no results.")
        results = [dataclasses.replace(each, text=text) for each, text in zip(turn.results, texts, strict=True)]
        further = turn.messages[len(self._written.results(turn.calls, turn.results)) :]
        messages = self._written.results(turn.calls, results) + further
        return self._written.suffix_ids(turn.calls, messages, turn.token_ids)


def turn_contexts(rollout: Rollout) -> list[list[int]]:
    """The ids that the policy had read and sampled at the end of each turn, without the turn's observation.

    >>> first, second = Turn([10, 11], None, "", "stop", observation_ids=[20]), Turn([30], None, "", "stop")
    >>> turn_contexts(Rollout([], [1, 2], turns=[first, second]))
    [[1, 2, 10, 11], [1, 2, 10, 11, 20, 30]]
    """
    contexts: dict[int, list[int]] = {}
    for record in rollout.records:
        ids = record.prompt_ids
        for number, turn in zip(record.numbers, record.turns, strict=True):
            contexts[number] = ids + turn.token_ids
            ids = contexts[number] + turn.observation_ids
    return [contexts[k] for k in range(len(rollout.turns))]


def scores_of_servers(client: Any, written: Any, pushed: Callable[[], str | None] = lambda: None) -> PolicyScores:
    """Logprobs on one or several vLLM servers in turn, with `prompt_logprobs`.

    INVARIANT: all answers are of the weights that were pushed last. A server that restarted has others, and one that
    is away does not answer: the others are asked. If a request fails, or one of those that were asked does not hold
    these weights afterwards, everything is asked again, of servers that did not fail if there are any.

    Args:
        client: The client of the server, or of all servers.
        written: The tool format.
        pushed: Returns the version of the last push, without a server's lineage; None if nothing was pushed.
    """

    failed: list[Any] = []  # servers, in this call
    turn = itertools.count()

    def holds(server: Any) -> bool:
        version = pushed()
        try:
            return server.weight_version() == tagged(version, server.lineage) if version else server.healthy()
        except ServerError:
            return False

    def score(server: Any, pair: tuple) -> list[float]:
        timeout = min(server.request_timeout, LONGEST_REQUEST)
        try:
            return server.score([*pair[0], *pair[1]], timeout=timeout)[-len(pair[1]) :]
        except ServerError:
            failed.append(server)
            raise

    def ask(pairs: list[tuple]) -> dict[tuple, list[float]]:
        problem: Exception | str = "No server holds them."
        failed.clear()
        for number in range(TRIES):
            time.sleep(PAUSE * bool(number))
            servers = getattr(client, "servers", [client])
            asked = [servers[n] for n in getattr(client, "joined", range(len(servers))) if holds(servers[n])]
            asked = [server for server in asked if server not in failed] or asked
            try:
                with ThreadPoolExecutor(AT_ONCE, "mt-grpo-policy") as pool:
                    in_turn = [asked[next(turn) % len(asked)] for _ in pairs if asked]
                    found = list(pool.map(score, in_turn, pairs))
            except ServerError as error:
                problem = error
                continue
            if asked and all(map(holds, asked)):
                return dict(zip(pairs, found, strict=True))
        raise RunError(
            f"policy.logprobs: in {TRIES} tries no vLLM server answered that holds the weights of the last push. "
            f"{problem}"
        )

    return PolicyScores(ask, written, client.weight_version, client.max_model_len)


class Rounds:
    """Forward passes of sharded models, which are of all ranks together, though each rank asks when it likes.

    In a round every rank says which model it wants to ask, if any. Then all go through each wanted model, with a token
    that nobody asked for where they want none. A rank whose reward functions are over joins until all are.

    INVARIANT: all ranks make the same rounds: `scores_of_trainer` gives each its `Rounds`, and `join` ends them.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.idle: list[Callable[[], Any]] = []  # a pass with one token of each model, the same on all ranks

    def ask(self, own: int, forward: Callable[[], Any]) -> tuple[bool, Any]:
        """(whether any rank asked, what `forward` gave). `own`: the number of the model, -1 for none. Collective."""
        found, wanted = None, torch.tensor([own], device=self.accelerator.device)
        numbers = set(self.accelerator.gather(wanted).tolist()) - {-1}
        for number in sorted(numbers):
            if number == own:
                found = forward()
            else:
                self.idle[number]()
        return bool(numbers), found

    def join(self) -> None:
        """Take part in the passes of the other ranks until none asks any more. Collective."""
        while self.ask(-1, lambda: None)[0]:
            pass


def scores_of_model(
    model: Any,
    written: Any,
    autocast: Callable,
    version: Callable[[], str],
    budget: Callable[[], int | None] = lambda: None,
    rounds: Rounds | None = None,
) -> PolicyScores:
    """Logprobs of a model of this process, without gradient.

    Args:
        model: The model.
        written: The tool format.
        autocast: Makes a context in which it computes.
        version: Returns the version of its weights.
        budget: Gives the tokens of a forward pass over many pairs, in which what they begin with is computed once;
            None where the model takes no such rows (`SharedRow`): then each pair is a forward pass.
        rounds: Of a model of which each rank holds a part.
    """

    def alone(pair: tuple) -> list[tuple]:
        ids, shown = inputs_of_rows(torch.tensor([[*pair[0], *pair[1]]], device=model.device))
        shown.pop("num_images", None)
        count = len(pair[1])
        logits = model(input_ids=ids, logits_to_keep=count + 1, use_cache=False, **shown).logits
        logps = logits[0, -count - 1 : -1].float().log_softmax(-1)
        return [(pair, logps.gather(1, ids[0, -count:, None])[:, 0].tolist())]

    def together(pairs: list[tuple]) -> list[tuple]:
        examples = {i: Example(*map(list, pair), [1] * len(pair[1])) for i, pair in enumerate(pairs)}
        row = SharedRow(examples, (len(pairs), max(len(pair[1]) for pair in pairs)), model.device)
        inputs = forward_inputs(row)
        del inputs["fused_lm_head"], inputs["shift_labels"]  # TRL's head has the run's temperature
        logits = model(**inputs, use_cache=False).logits  # (1, S, V)
        logps = row.spread(logits.float().log_softmax(-1).gather(2, row.labels[:, :, None])[:, :, 0]).tolist()
        return [(pair, own[: len(pair[1])]) for pair, own in zip(pairs, logps, strict=True)]

    def idle() -> None:
        with torch.no_grad(), autocast():
            alone(((0,), (0,)))

    def ask(pairs: list[tuple]) -> dict[tuple, list[float]]:
        found, limit = [], budget()
        with ONE_AT_A_TIME, torch.no_grad(), autocast():
            training = model.training
            model.eval()
            try:
                forward = alone if limit is None else together
                for part in pairs if limit is None else pairs_by_pass(pairs, limit):
                    found += forward(part) if rounds is None else rounds.ask(number, lambda p=part: forward(p))[1]
            finally:
                model.train(training)
        return dict(found)

    config = getattr(getattr(model, "module", model), "config", None)  # that of a DeepSpeed engine is the engine's
    limit = config and getattr(config.get_text_config(), "max_position_embeddings", None)
    scores = PolicyScores(ask, written, version, limit and limit + 1)
    if rounds is not None:
        scores.rounds, number = rounds, len(rounds.idle)
        rounds.idle.append(idle)
    return scores


def pairs_by_pass(pairs: list[tuple], budget: int) -> Iterator[list[tuple]]:
    """The pairs of each forward pass. Those that begin alike stand together."""
    part: list[tuple] = []
    tokens, wanted, last = 0, 0, ()
    for pair in sorted(pairs):
        new = len(pair[0]) + len(pair[1]) - common_length(list(last), list(pair[0]), 0)
        if part and (tokens + new > budget or wanted + len(pair[1]) > LOGPS_PER_PASS):
            yield part
            part, tokens, wanted, new = [], 0, 0, len(pair[0]) + len(pair[1])
        part.append(pair)
        tokens, wanted, last = tokens + new, wanted + len(pair[1]), pair[0]
    yield part


def scores_of_trainer(trainer: Any) -> dict[str, PolicyScores]:
    """The columns `policy` and `reference` for a trainer's reward functions, those that a function names."""
    functions = trainer.reward_functions.functions
    asked = asked_of(functions) & {"policy", "reference"}
    if asked:
        asked -= column_lists(trainer.batch.rows, trainer.batch.data).keys()
    rounds = Rounds(trainer.accelerator) if asked and trainer._is_sharded else None
    for func in functions if rounds is not None else ():
        if inspect.iscoroutinefunction(func) and asked_of([func]) & asked:
            raise RunError(
                f"The async reward {func.__name__} asks a model that DeepSpeed or FSDP shards. Its forward passes are "
                "collective, and must run in one thread. Remove `async`."
            )
    return {name: {"policy": policy_of, "reference": reference_of}[name](trainer, rounds) for name in sorted(asked)}


def join_rounds(columns: dict[str, Any]) -> None:
    """Finish the rounds after this rank's reward functions, even if they failed (`Rounds`). Collective if sharded.

    Args:
        columns: Columns that include those of `scores_of_trainer`.
    """
    scores = [columns[name] for name in ("policy", "reference") if isinstance(columns.get(name), PolicyScores)]
    rounds = [each.rounds for each in scores if each.rounds is not None]  # of both, if there are two, the same
    if rounds:
        rounds[0].join()


def policy_of(trainer: Any, rounds: Rounds | None = None) -> PolicyScores:
    """The scores of a trainer's policy. Raises `RunError` if it is sharded and there are no `rounds`."""
    written = trainer.env.format_of(trainer.env.tokenizer)
    if trainer.backend == "server":
        if any(server.adapter is not None for server in getattr(trainer.client, "servers", [trainer.client])):
            raise RunError(
                "A reward function asks the policy, and the server samples with an adapter, with which it cannot "
                "score. Set weight_sync: disk (or nccl), which sends merged weights."
            )
        return scores_of_servers(trainer.client, written, lambda: trainer.weight_sync.pushed)
    counter = trainer._weight_counter
    return of_process(trainer, rounds, trainer.model, trainer.accelerator.autocast, lambda: str(counter.version))


def of_process(
    trainer: Any, rounds: Rounds | None, model: Any, autocast: Callable, version: Callable[[], str]
) -> PolicyScores:
    """The scores of a model of this process, or of one that is sharded over all processes."""
    if trainer._is_sharded and rounds is None:
        raise RunError(
            "DeepSpeed or FSDP shards the model, so its forward passes are collective. Only reward functions may ask "
            "for its logprobs. Ask in a reward function."
        )

    def budget() -> int | None:
        """Tokens of a pass with shared prompts, None before the first step has proven that the model takes them."""
        layout, args = trainer.layout, trainer.args
        if layout.kind != "shared" or layout.proof is None:
            return None
        longest = max(len(each.prompt_ids) + len(each.completion_ids) for each in trainer.batch.rollouts)
        return args.max_tokens_per_pass or args.per_device_train_batch_size * longest

    return scores_of_model(model, trainer.env.format_of(trainer.env.tokenizer), autocast, version, budget, rounds)


def reference_of(trainer: Any, rounds: Rounds | None = None) -> PolicyScores:
    """The scores of a trainer's reference model: TRL's own (`beta` above 0), or the base of a LoRA.

    It runs in this process, also if a server samples. Raises `RunError` without a reference, and as `policy_of`.
    """
    autocast = trainer.accelerator.autocast
    if trainer.ref_model is not None:
        return of_process(trainer, rounds, trainer.ref_model, autocast, lambda: "reference")
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        raise RunError(
            "A reward function asks `reference`, and the run has no reference model. Set beta above 0, so that TRL "
            "loads one, or train a LoRA, whose base model is the reference."
        )

    @contextmanager
    def without_adapter() -> Iterator[None]:
        with autocast(), use_adapter(model, "ref" if "ref" in model.peft_config else None):
            yield

    return of_process(trainer, rounds, model, without_adapter, lambda: "reference")

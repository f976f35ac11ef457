"""Logprobs of texts under the policy or the reference model, for reward functions."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.trainer.utils import use_adapter

from mt_grpo.base.errors import ServerError, ServerLost
from mt_grpo.base.ranks import RunError
from mt_grpo.base.rows import column_lists
from mt_grpo.generation.versions import tagged
from mt_grpo.images.pictures import inputs_of_rows, is_picture
from mt_grpo.rollout import Rollout, Turn
from mt_grpo.training.shared_prompts import Example, SharedRow, common_length, forward_inputs

logger = logging.getLogger(__name__)

# Passed if a reward function names them, unless the data has such a column; then also to others with **kwargs.
ASKED_COLUMNS = ("policy", "reference", "turn_contexts", "groups")
AT_ONCE = 32  # requests of a rank to its server


def asked_of(functions: list[Callable]) -> set[str]:
    """The names of `ASKED_COLUMNS` that reward functions have as parameters. `**kwargs` do not count.

    >>> def gain(rollout_turns, policy, **kwargs): ...
    >>> asked_of([gain, lambda turn_contexts: 0, lambda **kwargs: 0]) == {"policy", "turn_contexts"}
    True
    """
    parameters = [each for function in functions for each in inspect.signature(function).parameters.values()]
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return by_name & set(ASKED_COLUMNS)


def score_pairs(score: Callable[[list[int], list[int]], list[float]], pairs: list[tuple], at_once: int) -> dict:
    """Call `score` for each pair. Returns (context, continuation) -> logprobs. Raises the errors of `score`."""
    asked = ([list(part) for part in pair] for pair in pairs)
    if at_once == 1:
        return dict(zip(pairs, itertools.starmap(score, asked)))
    with concurrent.futures.ThreadPoolExecutor(at_once, "mt-grpo-policy") as pool:
        return dict(zip(pairs, pool.map(lambda pair: score(*pair), asked)))


class PolicyScores:
    """Computes logprobs under the policy (parameter `policy` of a reward) or the reference model (`reference`).

    Args:
        score: Returns the logprobs of a continuation after a context, ids in, one float per id of the continuation. It
            must be thread-safe if `at_once` is above 1. None: a subclass implements `_all`.
        written: The tool format of the conversations (`ToolFormat`), with its tokenizer.
        version: Returns the version of the weights that score.
        context: The most tokens of a context and its continuation together. None: no limit is known.
        at_once: The number of concurrent calls of `score`.
    """

    def __init__(
        self,
        score: Callable[[list[int], list[int]], list[float]] | None,
        written: Any,
        version: Callable[[], str],
        context: int | None = None,
        at_once: int = 1,
    ):
        self._score, self._written, self._version, self._at_once = score, written, version, at_once
        self._context = float("inf") if context is None else context

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
        found = self._all(list(dict.fromkeys(pairs)))
        return [list(found[pair]) for pair in pairs]

    def fits(self, context: Sequence[int], continuation: Sequence[int]) -> bool:
        """Whether a context and a continuation are not empty and fit into the model's context together."""
        return bool(context) and bool(continuation) and len(context) + len(continuation) < self._context

    def _all(self, pairs: list[tuple]) -> dict[tuple, list[float]]:
        return score_pairs(self._score, pairs, self._at_once)

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


class ServerScores(PolicyScores):
    """Computes logprobs on one or several vLLM servers in turn, with `prompt_logprobs`.

    INVARIANT: all answers are of the weights that were pushed last. A server that restarted has others, and one that
    is away does not answer: the others are asked. If one that was asked does not hold these weights afterwards,
    everything is asked again.

    Args:
        client: The client of the server, or of all servers.
        pushed: Returns the version of the last push, without a server's lineage; None if nothing was pushed.
    """

    TRIES = 3  # of one call of `logprobs`
    PAUSE = 2.0  # seconds before another try: a refused connection or a 503 may pass
    SECONDS = 120.0  # that one request may take; `reward_timeout` has to see more than one server

    def __init__(self, client: Any, written: Any, pushed: Callable[[], str | None] = lambda: None):
        super().__init__(None, written, client.weight_version, client.max_model_len)
        self.client, self.pushed = client, pushed
        self._next = itertools.count()

    def _holds(self, server: Any) -> bool:
        pushed = self.pushed()
        try:
            return server.weight_version() == tagged(pushed, server.lineage) if pushed else server.healthy()
        except ServerError as error:
            logger.warning(f"policy.logprobs: {error}")
            return False

    def _all(self, pairs: list[tuple]) -> dict[tuple, list[float]]:
        problem: Exception | None = None
        for number in range(self.TRIES if pairs else 0):
            if number:
                time.sleep(self.PAUSE)
            servers = getattr(self.client, "servers", [self.client])
            joined = getattr(self.client, "joined", range(len(servers)))
            asked = [servers[n] for n in joined if self._holds(servers[n])]
            try:
                found = self._by(asked, pairs)
            except ServerError as error:
                problem = error
                continue
            if all(map(self._holds, asked)):
                return found
        if not pairs:
            return {}
        raise RunError(
            f"policy.logprobs: in {self.TRIES} tries no vLLM server answered that holds the weights of the last push. "
            f"{problem or ''}"
        ) from problem

    def _by(self, servers: list[Any], pairs: list[tuple]) -> dict[tuple, list[float]]:
        """Asked of these servers, without those that are lost meanwhile. Raises `ServerError` where none is left."""
        usable = list(servers)

        def score(context: list[int], continuation: list[int]) -> list[float]:
            error: ServerError = ServerLost("none of them holds these weights")
            while left := list(usable):
                server = left[next(self._next) % len(left)]
                try:
                    return self._ask(server, context, continuation)
                except ServerError as raised:
                    error = raised
                    with suppress(ValueError):  # another thread's request to it failed, too
                        usable.remove(server)
            raise error

        return score_pairs(score, pairs, AT_ONCE)

    def _ask(self, server: Any, context: list[int], continuation: list[int]) -> list[float]:
        timeout = min(server.request_timeout, self.SECONDS)
        return server.score(context + continuation, timeout=timeout)[-len(continuation) :]


# Of all models: the policy and its reference may be the same modules, with and without an adapter, and an async reward
# function asks in another thread than the others.
ONE_AT_A_TIME = threading.Lock()


class ModelScores(PolicyScores):
    """Asks a model of this process, without gradient.

    Args:
        model: The model.
        autocast: Makes a context in which it computes.
        budget: Gives the tokens of a forward pass over many pairs, in which what they begin with is computed once;
            None where the model takes no such rows (`SharedRow`): then each pair is a forward pass.
    """

    AT_MOST = 256  # logprobs of a forward pass: each has a row as wide as the vocabulary

    def __init__(
        self,
        model: Any,
        written: Any,
        autocast: Callable,
        version: Callable[[], str],
        budget: Callable[[], int | None] = lambda: None,
    ):
        config = getattr(getattr(model, "module", model), "config", None)  # that of a DeepSpeed engine is the engine's
        limit = config and getattr(config.get_text_config(), "max_position_embeddings", None)
        super().__init__(None, written, version, limit and limit + 1)
        self.model, self.autocast, self.budget = model, autocast, budget

    def _all(self, pairs: list[tuple]) -> dict[tuple, list[float]]:
        with ONE_AT_A_TIME, torch.no_grad(), self.autocast():
            training, budget = self.model.training, self.budget()
            self.model.eval()
            try:
                if budget is None:
                    return {pair: self._pass(self._forward, *map(list, pair)) for pair in pairs}
                parts = [self._pass(self._together, part) for part in self._parts(pairs, budget)]
                return {pair: logps for part in parts for pair, logps in part}
            finally:
                self.model.train(training)

    def _pass(self, forward: Callable, *args: Any) -> Any:
        """One forward pass."""
        return forward(*args)

    def _forward(self, context: list[int], continuation: list[int]) -> list[float]:
        ids, shown = inputs_of_rows(torch.tensor([context + continuation], device=self.model.device))
        shown.pop("num_images", None)
        logits = self.model(input_ids=ids, logits_to_keep=len(continuation) + 1, use_cache=False, **shown).logits
        logps = logits[0, -len(continuation) - 1 : -1].float().log_softmax(-1)
        return logps.gather(1, ids[0, -len(continuation) :, None])[:, 0].tolist()

    def _parts(self, pairs: list[tuple], budget: int) -> Iterator[list[tuple]]:
        """The pairs of each forward pass. Those that begin alike stand together."""
        part: list[tuple] = []
        tokens, wanted, last = 0, 0, ()
        for pair in sorted(pairs):
            new = len(pair[0]) + len(pair[1]) - common_length(list(last), list(pair[0]), 0)
            if part and (tokens + new > budget or wanted + len(pair[1]) > self.AT_MOST):
                yield part
                part, tokens, wanted, new = [], 0, 0, len(pair[0]) + len(pair[1])
            part.append(pair)
            tokens, wanted, last = tokens + new, wanted + len(pair[1]), pair[0]
        if part:
            yield part

    def _together(self, pairs: list[tuple]) -> list[tuple[tuple, list[float]]]:
        """Each pair with its logprobs, of one forward pass."""
        examples = {i: Example(*map(list, pair), [1] * len(pair[1])) for i, pair in enumerate(pairs)}
        row = SharedRow(examples, (len(pairs), max(len(pair[1]) for pair in pairs)), self.model.device)
        inputs = forward_inputs(row)
        del inputs["fused_lm_head"], inputs["shift_labels"]  # TRL's head has the run's temperature
        logits = self.model(**inputs, use_cache=False).logits  # (1, S, V)
        logps = row.spread(logits.float().log_softmax(-1).gather(2, row.labels[:, :, None])[:, :, 0]).tolist()
        return [(pair, own[: len(pair[1])]) for pair, own in zip(pairs, logps, strict=True)]


class Rounds:
    """Forward passes of sharded models, which are of all ranks together, though each rank asks when it likes.

    In a round every rank says which model it wants to ask, if any. Then all go through each wanted model, with a token
    that nobody asked for where they want none. A rank whose reward functions are over joins until all are.

    INVARIANT: all ranks make the same rounds: `scores_of_trainer` gives each its `Rounds`, and `join` ends them.

    Args:
        accelerator: Of the trainer.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.models: list[ShardedScores] = []  # the same on all ranks, in the same order

    def ask(self, wanted: ShardedScores | None, forward: Callable[[], Any]) -> tuple[bool, Any]:
        """(whether any rank asked, what `forward` gave). Collective."""
        own = -1 if wanted is None else self.models.index(wanted)
        numbers = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device)).tolist()
        found = None
        for number in sorted(set(numbers) - {-1}):
            if number == own:
                found = forward()
            else:
                with torch.no_grad(), self.models[number].autocast():
                    self.models[number]._forward([0], [0])
        return max(numbers) >= 0, found

    def join(self) -> None:
        """Take part in the passes of the other ranks until none asks any more. Collective."""
        while self.ask(None, lambda: None)[0]:
            pass


class ShardedScores(ModelScores):
    """Asks a model of which each rank holds a part. Further argument: `rounds`, of the batch."""

    def __init__(self, *args: Any, rounds: Rounds, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rounds = rounds
        rounds.models.append(self)

    def _pass(self, forward: Callable, *args: Any) -> Any:
        return self.rounds.ask(self, lambda: forward(*args))[1]


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
    for each in (columns.get("policy"), columns.get("reference")):
        if isinstance(each, ShardedScores):
            each.rounds.join()
            return  # both have the same ones


def policy_of(trainer: Any, rounds: Rounds | None = None) -> PolicyScores:
    """The scores of a trainer's policy. Raises `RunError` if it is sharded and there are no `rounds`."""
    written = trainer.env.format_of(trainer.env.tokenizer)
    if trainer.backend == "server":
        if any(server.adapter is not None for server in getattr(trainer.client, "servers", [trainer.client])):
            raise RunError(
                "A reward function asks the policy, and the server samples with an adapter, with which it cannot "
                "score. Set weight_sync: disk (or nccl), which sends merged weights."
            )
        return ServerScores(trainer.client, written, lambda: trainer.weight_sync.pushed)
    autocast, counter = trainer.accelerator.autocast, trainer._weight_counter
    return of_model(trainer, rounds, trainer.model, written, autocast, lambda: str(counter.version))


def of_model(trainer: Any, rounds: Rounds | None, *args: Any) -> ModelScores:
    """The scores of a model of this process, or of one that is sharded over all processes."""
    if not trainer._is_sharded:
        return ModelScores(*args, lambda: budget_of(trainer))
    if rounds is None:
        raise RunError(
            "DeepSpeed or FSDP shards the model, so its forward passes are collective. Only reward functions may ask "
            "for its logprobs. Ask in a reward function."
        )
    return ShardedScores(*args, lambda: budget_of(trainer), rounds=rounds)


def budget_of(trainer: Any) -> int | None:
    """The most tokens of a scoring forward pass with shared prompts, None if prompts are not shared.

    Before the first step it is not proven that the model supports such rows (`prove_layout`): each pair is alone then.
    """
    layout, args = trainer.layout, trainer.args
    if layout.kind != "shared" or layout.proof is None:
        return None
    longest = max(len(each.prompt_ids) + len(each.completion_ids) for each in trainer.batch.rollouts)
    return args.max_tokens_per_pass or args.per_device_train_batch_size * longest


NO_REFERENCE = (
    "a reward function asks `reference`, and the run has no reference model. Set beta above 0, so that TRL loads "
    "one, or train a LoRA, whose base model is the reference."
)


def reference_of(trainer: Any, rounds: Rounds | None = None) -> PolicyScores:
    """The scores of a trainer's reference model: TRL's own (`beta` above 0), or the base of a LoRA.

    It runs in this process, also if a server samples. Raises `RunError` without a reference, and as `policy_of`.
    """
    written, autocast = trainer.env.format_of(trainer.env.tokenizer), trainer.accelerator.autocast
    if trainer.ref_model is not None:
        return of_model(trainer, rounds, trainer.ref_model, written, autocast, lambda: "reference")
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        raise RunError(f"{NO_REFERENCE[0].upper()}{NO_REFERENCE[1:]}")

    @contextmanager
    def without_adapter() -> Iterator[None]:
        with autocast(), use_adapter(model, "ref" if "ref" in model.peft_config else None):
            yield

    return of_model(trainer, rounds, model, written, without_adapter, lambda: "reference")

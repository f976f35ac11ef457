"""Logprobs of texts under the policy, for reward functions."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mt_grpo.base.errors import RunError, ServerError
from mt_grpo.generation.samples import tagged
from mt_grpo.images.pictures import has_pictures
from mt_grpo.images.reader import inputs_of_rows
from mt_grpo.rollout import Rollout, Turn

# Passed if a reward function names them, unless the data has such a column; then also to others with **kwargs.
ASKED_COLUMNS = ("policy", "turn_contexts", "groups")
AT_ONCE = 32  # requests of a rank to its server
TRIES, PAUSE = 3, 2.0  # of one call to servers, and the seconds between two: a 503 may pass
LONGEST_REQUEST = 120.0  # seconds: within `reward_timeout` more than one server can be asked
# An async reward function asks in another thread than the others, and the model is in evaluation mode meanwhile.
ONE_AT_A_TIME = threading.Lock()


def asked_of(functions: list[Callable]) -> set[str]:
    """The names of `ASKED_COLUMNS` that reward functions have as parameters. `**kwargs` do not count."""
    parameters = [each for function in functions for each in inspect.signature(function).parameters.values()]
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return by_name & set(ASKED_COLUMNS)


class PolicyScores:
    """Computes logprobs under the policy, for reward functions with the parameter `policy`.

    `ask` gives for pairs (context, continuation) a dict with the logprobs of each continuation, `written` is the tool
    format, and `context` the most tokens of a pair, plus one; None: no limit is known.
    """

    def __init__(self, ask: Callable, written: Any, context: int | None = None):
        self._ask, self._written, self._context = ask, written, context or float("inf")

    def logprobs(self, contexts: list[list[int]], continuations: list[list[int]]) -> list[list[float]]:
        """The logprob of each id of `continuations[i]` after `contexts[i]`, at temperature 1, on the full vocabulary.

        Equal pairs are computed once. Raises `ValueError` for a pair that does not fit, or that continues by an image.
        """
        pairs = list(zip(map(tuple, contexts), map(tuple, continuations), strict=True))
        for i, pair in enumerate(pairs):
            if not self.fits(*pair) or has_pictures(pair[1]):
                raise ValueError(
                    f"policy.logprobs: pair {i} has {len(pair[0])} and {len(pair[1])} ids. Expected at least one "
                    f"in each, less than {self._context} together (policy.fits), and no image in the continuation."
                )
        found = self._ask(list(dict.fromkeys(pairs))) if pairs else {}
        return [list(found[pair]) for pair in pairs]

    def fits(self, context: Sequence[int], continuation: Sequence[int]) -> bool:
        """Whether a context and a continuation are not empty and fit into the model's context together."""
        return bool(context) and bool(continuation) and len(context) + len(continuation) < self._context

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return self._written.tokenizer(text, add_special_tokens=False)["input_ids"]

    def observation_ids(self, turn: Turn, texts: list[str]) -> list[int]:
        """The ids that would follow a turn if its calls had returned these texts. Raises `ValueError` for others."""
        if turn.continuation is not None:
            raise ValueError("policy.observation_ids: the turn has a continuation by the environment, and no results.")
        results = [dataclasses.replace(each, text=text) for each, text in zip(turn.results, texts, strict=True)]
        further = turn.messages[len(self._written.results(turn.calls, turn.results)) :]
        messages = self._written.results(turn.calls, results) + further
        return self._written.suffix_ids(turn.calls, messages, turn.token_ids)


def turn_contexts(rollout: Rollout) -> list[list[int]]:
    """The ids that the policy had read and sampled at the end of each turn, without the turn's observation."""
    contexts: dict[int, list[int]] = {}
    for record in rollout.records:
        ids = record.prompt_ids
        for number, turn in zip(record.numbers, record.turns, strict=True):
            contexts[number] = ids + turn.token_ids
            ids = contexts[number] + turn.observation_ids
    return [contexts[k] for k in range(len(rollout.turns))]


def scores_of_servers(client: Any, written: Any, pushed: Callable[[], str | None] = lambda: None) -> PolicyScores:
    """Logprobs on one or several vLLM servers in turn, with `prompt_logprobs`. `client` is that of one or of all.

    INVARIANT: all answers are of the weights that were pushed last, of which `pushed` returns the version. Servers
    that hold others are not asked; if one fails or holds others afterwards, everything is asked again.
    """
    servers, turn = getattr(client, "servers", [client]), itertools.count()

    def holds(server: Any) -> bool:
        version = pushed()
        try:
            return server.weight_version() == tagged(version, server.lineage) if version else server.healthy()
        except ServerError:
            return False

    def score(server: Any, pair: tuple) -> list[float]:
        timeout = min(server.request_timeout, LONGEST_REQUEST)
        return server.score([*pair[0], *pair[1]], timeout=timeout)[-len(pair[1]) :]

    def ask(pairs: list[tuple]) -> dict[tuple, list[float]]:
        problem: Exception | str = "No server holds them."
        for number in range(TRIES):
            time.sleep(PAUSE * bool(number))
            asked = [servers[n] for n in getattr(client, "joined", range(len(servers))) if holds(servers[n])]
            in_turn = [asked[next(turn) % len(asked)] for _ in pairs if asked]
            try:
                with ThreadPoolExecutor(AT_ONCE, "mt-grpo-policy") as pool:
                    found = list(pool.map(score, in_turn, pairs))
            except ServerError as error:
                problem = error
                continue
            if asked and all(map(holds, asked)):
                return dict(zip(pairs, found, strict=True))
        raise RunError(f"policy.logprobs: in {TRIES} tries no server answered that holds the weights. {problem}")

    return PolicyScores(ask, written, client.max_model_len)


def scores_of_model(model: Any, written: Any, autocast: Callable) -> PolicyScores:
    """Logprobs of a model of this process: a forward pass per pair, in a context that `autocast` makes."""

    def score(pair: tuple) -> list[float]:
        ids, shown = inputs_of_rows(torch.tensor([[*pair[0], *pair[1]]], device=model.device))
        shown.pop("num_images", None)
        count = len(pair[1])
        logits = model(input_ids=ids, logits_to_keep=count + 1, use_cache=False, **shown).logits
        logps = logits[0, -count - 1 : -1].float().log_softmax(-1)
        return logps.gather(1, ids[0, -count:, None])[:, 0].tolist()

    def ask(pairs: list[tuple]) -> dict[tuple, list[float]]:
        with ONE_AT_A_TIME, torch.no_grad(), autocast():
            training = model.training
            model.eval()
            try:
                return {pair: score(pair) for pair in pairs}
            finally:
                model.train(training)

    config = getattr(getattr(model, "module", model), "config", None)  # that of a DeepSpeed engine is the engine's
    limit = config and getattr(config.get_text_config(), "max_position_embeddings", None)
    return PolicyScores(ask, written, limit and limit + 1)


def policy_of(trainer: Any) -> PolicyScores:
    """The scores of a trainer's policy. Raises `RunError` for a server with an adapter and a sharded model."""
    written = trainer.env.format_of(trainer.env.tokenizer)
    if trainer.backend == "server":
        if any(server.adapter is not None for server in getattr(trainer.client, "servers", [trainer.client])):
            raise RunError("policy: the server samples with an adapter. Set weight_sync: disk or nccl, to merge it.")
        return scores_of_servers(trainer.client, written, lambda: trainer.weight_sync.pushed)
    if trainer._is_sharded:
        raise RunError("policy: of a model that DeepSpeed or FSDP shards only a server scores the policy.")
    return scores_of_model(trainer.model, written, trainer.accelerator.autocast)

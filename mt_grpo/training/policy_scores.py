"""What a reward function may ask the policy: the logprobs of texts, by the weights that sampled."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from mt_grpo.base.ranks import RunError
from mt_grpo.rollout import Rollout, Turn

ASKED_COLUMNS = ("policy", "turn_contexts")  # given to a function that names them; a column of the data wins
AT_ONCE = 32  # requests of a rank to its server


def asked_of(functions: list[Callable]) -> set[str]:
    """Which of `ASKED_COLUMNS` reward functions name as parameters. `**kwargs` name none.

    >>> def gain(rollout_turns, policy, **kwargs): ...
    >>> asked_of([gain, lambda turn_contexts: 0, lambda **kwargs: 0]) == {"policy", "turn_contexts"}
    True
    """
    parameters = [each for function in functions for each in inspect.signature(function).parameters.values()]
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return by_name & set(ASKED_COLUMNS)


class PolicyScores:
    """The policy as a reward function sees it, in its parameter `policy`.

    Args:
        score: The logprobs of a continuation behind a context, ids in, one float per id of the continuation. It must
            bear calls from several threads where `at_once` is above 1.
        written: The tool format of the conversations (`ToolFormat`), with its tokenizer.
        version: Says which weights answer.
        at_once: Calls at the same time.
    """

    def __init__(
        self, score: Callable[[list[int], list[int]], list[float]], written: Any, version: Callable[[], str],
        at_once: int = 1,
    ):  # fmt: skip
        self._score, self._written, self._version, self._at_once = score, written, version, at_once

    @property
    def version(self) -> str:
        """Of the weights that answer. With `max_staleness` a server's are newer than those that sampled."""
        return self._version()

    def logprobs(self, contexts: list[list[int]], continuations: list[list[int]]) -> list[list[float]]:
        """The logprob of each id of `continuations[i]` behind `contexts[i]`, at temperature 1, of the full vocabulary.

        The run's temperature, `top_p` and the like do not count. Equal pairs are asked once.

        Raises:
            ValueError: An empty context or continuation, or lists of unequal length.
        """
        pairs = list(zip(map(tuple, contexts), map(tuple, continuations), strict=True))
        if empty := [i for i, pair in enumerate(pairs) if not all(pair)]:
            raise ValueError(f"policy.logprobs: pair {empty[0]} has no ids. Expected a context and a continuation.")
        found = self._all(list(dict.fromkeys(pairs)))
        return [list(found[pair]) for pair in pairs]

    def _all(self, pairs: list[tuple]) -> dict[tuple, list[float]]:
        asked = ([list(part) for part in pair] for pair in pairs)
        if self._at_once == 1:
            return dict(zip(pairs, itertools.starmap(self._score, asked)))
        with concurrent.futures.ThreadPoolExecutor(self._at_once, "mt-grpo-policy") as pool:
            return dict(zip(pairs, pool.map(lambda pair: self._score(*pair), asked)))

    def encode(self, text: str) -> list[int]:
        """The ids of a text by itself."""
        return self._written.tokenizer(text, add_special_tokens=False)["input_ids"]

    def observation_ids(self, turn: Turn, texts: list[str]) -> list[int]:
        """What would stand behind a turn if its calls had given these texts, one per result."""
        results = [dataclasses.replace(each, text=text) for each, text in zip(turn.results, texts, strict=True)]
        return self._written.suffix_ids(turn.calls, self._written.results(turn.calls, results), turn.token_ids)


def turn_contexts(rollout: Rollout) -> list[list[int]]:
    """For each turn the ids that the policy had read and sampled at its end; its observation stands behind them.

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


def scores_of_server(client: Any, written: Any) -> PolicyScores:
    """Asks a vLLM server, or several in turn, by `prompt_logprobs`."""
    servers = itertools.cycle(getattr(client, "servers", [client]))

    def score(context: list[int], continuation: list[int]) -> list[float]:
        server = next(servers)
        if getattr(server, "adapter", None) is not None:
            raise RunError(
                "A reward function asks the policy, and the server samples by an adapter, which it does not score by. "
                "Set weight_sync: disk (or nccl), which sends all weights."
            )
        return server.score(context + continuation)[-len(continuation) :]

    return PolicyScores(score, written, client.weight_version, AT_ONCE)


def scores_of_model(model: Any, written: Any, autocast: Callable, version: Callable[[], str]) -> PolicyScores:
    """Asks a model of this process, without gradient."""

    @torch.no_grad()
    def score(context: list[int], continuation: list[int]) -> list[float]:
        training = model.training
        model.eval()
        try:
            ids = torch.tensor([context + continuation], device=model.device)
            with autocast():
                logits = model(input_ids=ids, logits_to_keep=len(continuation) + 1, use_cache=False).logits
            logps = logits[0, -len(continuation) - 1 : -1].float().log_softmax(-1)
            return logps.gather(1, ids[0, -len(continuation) :, None])[:, 0].tolist()
        finally:
            model.train(training)

    return PolicyScores(score, written, version)


def scores_of_trainer(trainer: Any) -> dict[str, PolicyScores]:
    """`policy` for the reward functions of a trainer, nothing where none asks for it."""
    if "policy" not in asked_of(trainer.reward_functions.functions):
        return {}
    written = trainer.env.format_of(trainer.env.tokenizer)
    if trainer.backend == "server":
        return {"policy": scores_of_server(trainer.client, written)}
    if trainer._is_sharded:
        raise RunError(
            "A reward function asks the policy, whose weights are sharded over the ranks of this run. Expected a vLLM "
            "server that answers (vllm_mode: server), or weights that are whole on each rank."
        )
    version = lambda: str(trainer._weight_counter.version)  # noqa: E731
    return {"policy": scores_of_model(trainer.model, written, trainer.accelerator.autocast, version)}

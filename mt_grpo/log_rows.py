"""Rollouts as rows of their log: plain values, one row per conversation. docs/rollouts.md has the columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mt_grpo.json_types import json_text
from mt_grpo.rollout import Message, Record, Rollout, Turn
from mt_grpo.versions import versions_of

TOKEN_COLUMNS = ("loss_mask", "advantages", "trainer_logprobs")  # of a turn, from the batch of the loss


@dataclass(frozen=True)
class Scored:
    """What a batch of n rollouts was given, F reward functions and K turns."""

    names: list[str]  # (F,), of the reward functions
    weights: torch.Tensor  # (F,)
    rewards: torch.Tensor  # (n, F), one number per rollout
    turn_rewards: torch.Tensor  # (n, K), the weighted rewards of functions that give one per turn
    advantages: torch.Tensor  # (n, K), one number per turn
    group_size: int  # G

    def rows(self, first: int, count: int) -> Scored:
        """Those of `count` rollouts."""
        mine = slice(first, first + count)
        tables = self.rewards[mine], self.turn_rewards[mine], self.advantages[mine]
        return Scored(self.names, self.weights, *tables, self.group_size)


def finite(values: list[float | None] | None) -> list[float | None] | None:
    """The values with None for NaN and infinities, which JSON does not have.

    >>> finite([0.5, float("nan"), float("-inf"), None])
    [0.5, None, None, None]
    """
    return values and [None if value is None or not math.isfinite(value) else value for value in values]


def turn_columns(
    output: dict[str, Any], records: list[Record], owners: list[int], rollouts: list[Rollout]
) -> list[list[dict[str, list | None]]]:
    """For each rollout and turn the `TOKEN_COLUMNS`: a value per sampled token, as the loss reads them.

    A turn that is in no row of the loss has a mask of zeros. `trainer_logprobs` is None where the trainer computed
    none before its step.

    Args:
        output: TRL's batch of M rows: `tool_mask` and `advantages` (M, C), and maybe `old_per_token_logps`.
        records: The M records of those rows.
        owners: The rollout of each record.
        rollouts: Those that are asked for, the first ones of the batch.
    """
    names = ("tool_mask", "advantages", "old_per_token_logps")
    found: list[list[dict[str, list | None]]] = [
        [
            {"loss_mask": [0] * len(turn.token_ids), "advantages": [0.0] * len(turn.token_ids),
             "trainer_logprobs": None}
            for turn in rollout.turns
        ]
        for rollout in rollouts
    ]  # fmt: skip
    for i, (record, owner) in enumerate(zip(records, owners, strict=True)):
        if owner >= len(rollouts):
            continue
        rows = [output[name][i].tolist() if output.get(name) is not None else None for name in names]
        at = 0
        for k, turn in zip(numbers_of(record), record.turns):
            here = slice(at, at + len(turn.token_ids))
            found[owner][k] = {name: row and row[here] for name, row in zip(TOKEN_COLUMNS, rows)}
            at += len(turn.token_ids) + len(turn.observation_ids)
    return found


def numbers_of(record: Record) -> list[int] | range:
    """The numbers of a record's turns in their rollout."""
    return range(len(record.turns)) if record.numbers is None else record.numbers


def rollout_rows(
    rollouts: list[Rollout],
    inputs: list[dict[str, Any]],
    scored: Scored,
    columns: list[list[dict[str, list | None]]],
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    """Whole conversations as rows of the rollout log.

    Args:
        rollouts: The n rollouts to log.
        inputs: Their dataset rows.
        scored: What they were given.
        columns: Of `turn_columns`.
        tokenizer: Given where turns have their tokens.
    """
    total = finite(torch.nansum(scored.rewards * scored.weights.to(scored.rewards), dim=1).tolist())
    lists = scored.rewards.tolist(), scored.turn_rewards.tolist(), scored.advantages.tolist()
    return [
        {
            "index": rollout.index, "group": rollout.index // scored.group_size,
            "messages": rollout.prompt_messages + rollout.messages,
            "num_prompt_messages": len(rollout.prompt_messages),
            "stop_reason": rollout.stop_reason, "reward": reward,
            "rewards": dict(zip(scored.names, finite(per_function), strict=True)),
            "turn_rewards": finite(per_turn[: len(rollout.turns)]),
            "turn_advantages": finite(advantage[: len(rollout.turns)]), "answer": row.get("answer"),
            "turns": turn_rows(rollout, of_rollout, tokenizer),
            "num_prompt_tokens": len(rollout.prompt_ids), "num_tokens": rollout.new_tokens,
            "records": len(rollout.records), "policy_version": rollout.policy_version,
            "error": None if rollout.error is None else str(rollout.error),
            "info": [json_text(turn.info, ensure_ascii=False, default=str, skipkeys=True) for turn in rollout.turns],
        }
        for rollout, row, reward, per_function, per_turn, advantage, of_rollout in zip(
            rollouts, inputs, total, *lists, columns
        )
    ]  # fmt: skip


def turn_rows(rollout: Rollout, columns: list[dict[str, list | None]], tokenizer: Any = None) -> list[dict[str, Any]]:
    """The turns of a row: which record each is in, and where one begins what the model read before.

    What the first record begins with are the row's own messages.
    """
    rows = [turn_row(turn, of_turn, tokenizer) for turn, of_turn in zip(rollout.turns, columns)]
    for number, record in enumerate(rollout.records):
        numbers = numbers_of(record)
        for before, k in zip([None, *numbers], numbers):
            turn, begins = rollout.turns[k], before is None and number > 0
            rows[k] |= {
                "record": number, "after": before,
                "context": [message_row(each) for each in turn.context.messages] if begins else None,
                "tools": None if turn.tools is None else json_text(turn.tools, ensure_ascii=False, default=str),
            }  # fmt: skip
    return rows


def message_row(message: Message) -> dict[str, Any]:
    """A message with its text, and with all else that it has as JSON.

    >>> message_row({"role": "tool", "content": "2", "tool_call_id": "a"})
    {'role': 'tool', 'content': '2', 'more': '{"tool_call_id": "a"}'}
    """
    content = message.get("content")
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    text = {"ensure_ascii": False, "default": str}
    return {
        "role": message["role"], "content": content if isinstance(content, str) else json_text(content, **text),
        "more": json_text(more, **text) if more else None,
    }  # fmt: skip


def turn_row(turn: Turn, columns: dict[str, list | None], tokenizer: Any = None) -> dict[str, Any]:
    """A turn of a row. Arguments of calls are JSON as text, since each tool has others."""
    logprobs = [value for value in finite(turn.logprobs) or [] if value is not None]
    row = {
        "text": turn.text, "answer": turn.answer, "finish_reason": turn.finish_reason, "seconds": turn.seconds,
        "calls": [{"name": call.name, "arguments": json_text(call.arguments, ensure_ascii=False, default=str),
                   "error": call.error} for call in turn.calls],
        "results": [{"text": result.text, "error": result.error, "seconds": result.seconds, "reward": result.reward}
                    for result in turn.results],
        "observation": further_text(turn), "num_tokens": len(turn.token_ids), "num_read": len(turn.observation_ids),
        "num_trained": int(sum(columns["loss_mask"])), "reward": turn.reward, "policy_versions": versions_of(turn),
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "min_logprob": min(logprobs, default=None),
    }  # fmt: skip
    if tokenizer is not None:
        row |= {
            "token_ids": turn.token_ids, "token_texts": token_texts(tokenizer, turn.token_ids),
            "logprobs": finite(turn.logprobs), **columns,
            "trainer_logprobs": finite(columns["trainer_logprobs"]),
            "read_ids": turn.observation_ids, "read_texts": token_texts(tokenizer, turn.observation_ids),
        }  # fmt: skip
    return row


def further_text(turn: Turn) -> str | None:
    """What was read behind the results of a turn: messages of an environment, or of a user. None: nothing.

    >>> from mt_grpo.rollout import ToolResult
    >>> said = [{"role": "user", "content": "<result>4</result>"}, {"role": "user", "content": "Sure?"}]
    >>> further_text(Turn([], None, "", "stop", results=[ToolResult("4")], messages=said))
    'Sure?'
    """
    results = [result.text for result in turn.results if result.text]
    said = [str(message["content"]) for message in turn.messages]
    return "\n".join(text for text in said if not any(result in text for result in results)) or None


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token alone, with the space that some tokenizers drop at the start of a text.

    A token that is a part of a character is U+FFFD.
    """
    return [
        f" {text}" if piece.startswith("\u2581") and not text.startswith((" ", "\u2581")) else text
        for text, piece in zip(
            (tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False) for i in ids),
            (tokenizer.convert_ids_to_tokens(i) or "" for i in ids),
        )
    ]

"""What the model reads for a scheduler's request: the ids of the response that it goes on from, and what is new."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from mt_grpo.adapters.agent_prompts import tools_by_name
from mt_grpo.adapters.swift_loop import SchedulerFailure
from mt_grpo.adapters.swift_messages import read_messages, rendered, said_before
from mt_grpo.adapters.swift_protocol import listed_tools
from mt_grpo.adapters.swift_revise import without_turns
from mt_grpo.adapters.swift_samples import GoesOn, Sample, goes_on
from mt_grpo.rollout import Message


class Reading(NamedTuple):
    """A request as ids."""

    messages: list[Message]
    tools: str  # as JSON
    tools_by_name: dict[str, Any]
    going: GoesOn | None  # None: it begins a record, and all of it is rendered
    prompt_ids: list[int]  # all that the model reads
    behind: list[int]  # of them, what the scheduler put behind the response that it goes on from
    num_new: int  # of them, those behind that response
    in_record: bool  # whether its record goes on: what was read and sampled stands there as it was

    @property
    def fresh(self) -> list[int] | None:
        """The ids behind the response, None for the beginning of a record."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_new :] if self.in_record else None


def read_request(
    request: Any, samples: list[Sample], env: Any, written: Any, tokenizer: PreTrainedTokenizerBase,
    plain: Callable[[list[int]], str], prompt: list[Message],
) -> Reading:  # fmt: skip
    """What the model reads for a request.

    An end of turn that was sampled is read where messages follow. Where the message goes on instead, it is not: a
    record begins.

    Args:
        request: A `RolloutInferRequest`.
        samples: The responses so far.
        env: The conversations.
        written: Their tool format.
        tokenizer: Of the policy.
        plain: What ids say, where they are the content of a message.
        prompt: Of the data set's row.

    Raises:
        SchedulerFailure: for what a request may not have.
    """
    messages = read_messages(request, plain, env.keeps_thinking)
    kwargs = getattr(request, "chat_template_kwargs", None)
    if kwargs and kwargs != env.chat_template_kwargs:
        raise SchedulerFailure(
            f"A request has chat_template_kwargs={kwargs}, the recipe {env.chat_template_kwargs}. Set the recipe's "
            "key: all conversations have the same."
        )
    try:
        given = listed_tools(getattr(request, "tools", None)) or []
    except ValueError as error:
        raise SchedulerFailure(f"A request's {error}") from error
    tools, by_name = json.dumps(given, sort_keys=True), tools_by_name(given)
    going = goes_on(samples, messages, tools, written.text)

    def text_ids(text: str) -> list[int]:
        return written.text_ids(without_turns(text, tokenizer)) if text else []

    if going is None:
        begun = said_before(messages)
        whole = rendered(messages[:-1] if begun else messages, [], tokenizer, prompt)
        ids = env.prompt_ids(whole, tokenizer, by_name) + text_ids(begun)
        return Reading(messages, tools, by_name, None, ids, [], 0, False)
    parent, calls = going.parent, going.parent.turn.calls
    sampled = parent.turn.token_ids[: going.kept]
    behind = (parent.tail if going.with_tail else []) + text_ids(going.behind)
    drops_end = sampled[-1:] != [] and sampled[-1] in written.ends and bool(behind or not going.said)
    suffix = []
    if going.said:
        suffix = written.suffix_ids(calls, rendered(going.said, calls, tokenizer, prompt), [] if behind else sampled)
    ids = parent.prompt_ids + (sampled[:-1] if drops_end else sampled) + behind + suffix
    in_record = going.is_whole and not parent.is_read and not drops_end
    return Reading(messages, tools, by_name, going, ids, behind, len(behind + suffix), in_record)


def stops_of(config: Any) -> tuple[str, ...]:
    """The texts that end a response. Raises `SchedulerFailure` for what are none."""
    stops = getattr(config, "stop", None) or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise SchedulerFailure(f"A request's config has stop={stops!r:.100}, expected a list of texts.")
    return tuple(stops)


def most_of(config: Any) -> int | None:
    """How many tokens a response may have; None: no limit of its own. Raises `SchedulerFailure` for no such number."""
    most = getattr(config, "max_tokens", None)
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise SchedulerFailure(f"A request's config has max_tokens={most!r:.100}, expected a number from 1 on.")
    return most

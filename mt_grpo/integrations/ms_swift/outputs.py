"""What a scheduler returned, as turns and records: which responses are trained, and which of their tokens.

Every record is what the model read and sampled. `response_token_ids` and `response_loss_mask` choose among that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from mt_grpo.base.errors import error_line
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure, segment_of, weight_of
from mt_grpo.integrations.ms_swift.loss import LossMask
from mt_grpo.integrations.ms_swift.pictures import with_tags
from mt_grpo.integrations.ms_swift.protocol import RolloutOutput, is_ids, remove_response
from mt_grpo.integrations.ms_swift.samples import Sample, choose, messages_of
from mt_grpo.integrations.ms_swift.session import SchedulerSession
from mt_grpo.integrations.session import fill_turns
from mt_grpo.rollout import Message, Rollout, join

MASKS = ("response_token_ids", "response_loss_mask")


def read_outputs(returned: Any, name: str) -> list[RolloutOutput]:
    """Validate the return value of `run`, as a list of outputs. Raises `SchedulerFailure`."""
    outputs = []
    for given in returned if isinstance(returned, list) else [returned]:
        if not getattr(getattr(given, "response", None), "choices", None):
            raise SchedulerFailure(
                f"{name}.run returned {returned!r:.200}, expected a RolloutOutput with a response of "
                "infer_engine.infer_async, or a list of them."
            )
        fields = {key: getattr(given, key, None) for key in RolloutOutput.model_fields}
        try:
            output = RolloutOutput(**{key: value for key, value in fields.items() if value is not None})
        except ValidationError as error:
            raise SchedulerFailure(f"{name}.run returned an output that is none: {error_line(error)}") from error
        if not all(isinstance(message, (dict, str)) for message in output.messages or []):
            raise SchedulerFailure(f"{name}.run returned messages={output.messages!r:.200}, expected dicts.")
        outputs.append(output)
    if not outputs:
        raise SchedulerFailure(f"{name}.run returned [], expected a RolloutOutput, or a list of them.")
    return outputs


def train_outputs(session: SchedulerSession, outputs: list[RolloutOutput], are_split: bool, loss: LossMask) -> None:
    """Mark what is trained of a conversation's responses. Raises `SchedulerFailure`.

    A response is where an output ends with it, or goes through it: a scheduler may ask the policy for more than it
    returns. Of a conversation by `drive` all are, also those before an edit of the history.

    Args:
        session: The conversation.
        outputs: What the scheduler returned.
        are_split: Whether that was a list: each output is a record of its own.
        loss: The recipe's `loss_scale`.
    """
    for sample in session.samples:
        sample.turn.trained = False
    for output in outputs:
        choice = output.response.choices[0]
        last = session.sample_of(choice)
        if session.is_empty(choice):
            leave_out_empty(output)
        if last is None:
            continue  # there was no room for any response
        driven = session.drives.get(last.key, [])
        groups = messages_of(last)
        if are_split:
            groups = groups if driven else groups[-max(1, len(output.response_token_ids)) :]
            groups[0][0].fresh = None
        given = session.given.get(last.key)
        if given is None or any(getattr(output, key) != given[key] for key in MASKS):
            take_masks(session, groups, output)
        messages = [m for m in output.messages or [] if isinstance(m, str) or m.get("role") == "assistant"]
        for group, message in zip(reversed(groups), reversed(messages)):
            for sample in group:
                sample.weight = sample.weight if weight_of(message) is None else weight_of(message)
        for sample in groups[-1]:
            sample.is_last = True
        for sample in {id(each): each for each in [*join(groups), *driven]}.values():
            by_rule = sample.is_last or loss.base != "last_round"
            by_rule = by_rule if sample.weight is None else sample.weight
            sample.turn.trained = not sample.taken_back and (sample.masked or by_rule)
    for sample in session.samples:
        if loss.scales and sample.turn.trained and not sample.masked and sample.weight is None:
            query = next((m["content"] for m in reversed(sample.messages) if m["role"] != "assistant"), None)
            mask = loss.mask(sample.turn, query and with_tags(query), sample.is_last, session.format)
            chosen = [a & b for a, b in zip(mask, sample.turn.per_token(1, 0))]
            sample.turn.mask = chosen if 0 in chosen else None


def leave_out_empty(output: RolloutOutput) -> None:
    """Take an empty response behind the end out of its output."""
    for lists in (output.response_token_ids, output.response_loss_mask):
        if lists and not lists[-1]:
            lists.pop()
    if output.messages and output.messages[-1] == {"role": "assistant", "content": ""}:
        output.messages = output.messages[:-1]
        while output.messages and output.messages[-1].get("role") != "assistant":
            output.messages = output.messages[:-1]


def take_masks(session: SchedulerSession, groups: list[list[Sample]], output: Any) -> None:
    """Take over the ids and masks of an output, aligned from its end, for each message of the assistant.

    Raises `SchedulerFailure` where ids are neither those that were sampled, nor those that the scheduler put behind.
    """
    ids, masks = output.response_token_ids, output.response_loss_mask
    if masks and len(masks) != len(ids):
        raise SchedulerFailure(
            f"response_loss_mask has {len(masks)} lists, expected {len(ids)}: one for each list of response_token_ids."
        )
    for given in reversed(ids[: max(0, len(ids) - len(groups))]):  # of records before this one
        groups.insert(0, [earlier_one(session, groups, given)])
    for k in range(1, len(ids) + 1):
        group, given = groups[-k], {"response_token_ids": ids[-k], "response_loss_mask": masks[-k] if masks else None}
        found = segment_of(given, ids[-k])
        if found is not None:
            choose(group, found[0], found[1] if masks else None, session.format.ends)
            for sample in group:
                sample.masked = bool(masks)


def earlier_one(session: SchedulerSession, groups: list[list[Sample]], ids: list[int]) -> Sample:
    """The last response before a conversation that was sampled as these ids. Raises `SchedulerFailure`."""
    first, ends = groups[0][0], session.format.ends
    for sample in reversed(session.samples):
        sampled = sample.turn.token_ids
        if sample.number < first.number and ids in (
            sampled,
            sampled[:-1] if sampled[-1:] and sampled[-1] in ends else [],
        ):
            return sample
    raise SchedulerFailure(
        f"response_token_ids has a list {ids[:8]} for which there is no response. Expected at most one list for each "
        "message that the policy wrote, as it was sampled."
    )


def fill(rollout: Rollout, session: SchedulerSession) -> None:
    """Write the responses into a rollout as its turns, in the order of their requests."""
    fill_turns(rollout, session.samples)
    for sample in session.samples:
        if sample.fresh is not None:
            parent = sample.parent
            parent.turn.continuation = None if sample.said else parent.text[len(parent.bare) :]
    for drive in session.drives.values():
        for earlier, later in zip(drive, drive[1:]):  # behind an edit, too, a turn got what the next one reads last
            if later.fresh is None and not later.start:
                earlier.turn.messages = earlier.turn.messages or later.messages[-1:]


def conversation_of(output: Any, request: Any, plain: Callable[[list[int]], str]) -> list[Message]:
    """All messages of an output as text: its own, or the request's with the response."""
    if output.messages is not None:
        said = [{"role": "assistant", "content": m} if isinstance(m, str) else m for m in output.messages]
        return [{**m, "content": plain(m["content"])} if is_ids(m.get("content")) else m for m in said]
    messages = list(request.messages)
    remove_response(messages)
    return [*messages, {"role": "assistant", "content": output.response.choices[0].message.content}]

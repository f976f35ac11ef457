"""What a scheduler returned, as turns and records: which responses are trained, and which of their tokens.

Every record is what the model read and sampled. `response_token_ids` and `response_loss_mask` choose among that.
"""

from __future__ import annotations

from typing import Any

from mt_grpo.adapters.swift_loop import SchedulerFailure, segment_of
from mt_grpo.adapters.swift_loss import LossMask
from mt_grpo.adapters.swift_protocol import remove_response
from mt_grpo.adapters.swift_samples import Sample, messages_of
from mt_grpo.adapters.swift_session import SchedulerSession
from mt_grpo.rollout import Context, Message, Rollout


def read_outputs(returned: Any, name: str) -> list[Any]:
    """What `run` returned, as a list of outputs. Raises `SchedulerFailure`."""
    outputs = returned if isinstance(returned, list) else [returned]
    for output in outputs or [None]:
        if not hasattr(output, "response") or not getattr(output.response, "choices", None):
            raise SchedulerFailure(
                f"{name}.run returned {returned!r:.200}, expected a RolloutOutput with a response of "
                "infer_engine.infer_async, or a list of them."
            )
    return outputs


def train_outputs(session: SchedulerSession, outputs: list[Any], loss: LossMask) -> None:
    """Mark what is trained of a conversation's responses. Raises `SchedulerFailure`.

    Those of `drive` are, also before an edit of the history. One of a scheduler's own `run` is where an output ends
    with it, or goes through it: a scheduler may ask the policy for more than it returns.
    """
    for sample in session.samples:
        sample.turn.trained = sample.driven and (sample.masked or loss.base != "last_round")
    for output in outputs:
        last = session.sample_of(output.response.choices[0])
        if last is None:
            continue  # an empty response, for which there was no room
        groups = messages_of(last)
        if len(outputs) > 1:
            groups = groups[-1:]
            groups[0][0].fresh = None  # one record each
        if not last.driven:
            keep_ids(session, groups, output)
        messages = [m for m in output.messages or [] if isinstance(m, str) or m.get("role") == "assistant"]
        for k, group in enumerate(reversed(groups)):
            message = messages[-1 - k] if k < len(messages) else {}
            by_message = weight_of(message)
            trained = by_message if by_message is not None else loss.base != "last_round" or k == 0
            for sample in group:
                sample.masked |= not last.driven and k < len(output.response_loss_mask)
                sample.turn.trained, sample.weighed = sample.masked or trained, by_message is not None
                sample.is_last |= k == 0
    for sample in session.samples:
        if loss.scales and sample.turn.trained and not sample.masked and not sample.weighed:
            query = next((m["content"] for m in reversed(sample.messages) if m["role"] != "assistant"), None)
            sample.turn.mask = loss.mask(sample.turn, query, sample.is_last, session.format.text)


def weight_of(message: Message | str) -> bool | None:
    """Whether a message's own keys `loss` and `loss_scale` have it trained; None without them.

    >>> weight_of({"loss": False}), weight_of({"loss_scale": 0.5}), weight_of({"content": ""})
    (False, True, None)
    """
    if isinstance(message, str):
        return None
    if message.get("loss_scale") is not None:
        return bool(message["loss_scale"])
    return None if message.get("loss") is None else bool(message["loss"])


def keep_ids(session: SchedulerSession, groups: list[list[Sample]], output: Any) -> None:
    """Take over the ids and masks of an output, aligned from its end, for each message of the assistant.

    Raises `SchedulerFailure` where ids are neither those that were sampled, nor those that the scheduler put behind.
    """
    ids, masks = output.response_token_ids, output.response_loss_mask
    if masks and len(masks) != len(ids):
        raise SchedulerFailure(
            f"response_loss_mask has {len(masks)} lists, expected {len(ids)}: one for each list of response_token_ids."
        )
    if len(ids) > len(groups):
        raise SchedulerFailure(
            f"response_token_ids has {len(ids)} lists, expected at most {len(groups)}: one for each message that the "
            "policy wrote."
        )
    for k in range(1, len(ids) + 1):
        group, given = groups[-k], {"response_token_ids": ids[-k], "response_loss_mask": masks[-k] if masks else None}
        known = [token for sample in group for token in sample.ids]
        found = segment_of(given, known)
        if found is None:
            continue
        own, mask, _ = found
        *earlier, last = group
        place = sum(len(sample.ids) for sample in earlier)
        if own[:place] != known[:place]:
            raise SchedulerFailure(
                f"response_token_ids begins with {own[:8]}, expected {known[:8]}: the ids that were sampled, and "
                "those that the scheduler put behind them."
            )
        if masks:
            start = 0
            for sample in earlier:
                part = mask[start : start + len(sample.turn.token_ids)]
                sample.turn.mask = part if 0 in part else None
                start += len(sample.ids)
            session.keep(last, last.text, own[place:], mask[place:], None)


def fill(rollout: Rollout, samples: list[Sample], trains_all: bool = False) -> None:
    """Write the responses into a rollout as its turns, in the order of their requests.

    With `trains_all` what a record reads behind its prompt is trained, too, with the turn that it stands before. Its
    logprobs are not known, so that the batch has no importance sampling correction.

    INVARIANT: a turn goes on in the record of its parent where `fresh` are the ids between them. Else it begins one,
    with all that the model read.
    """
    number = {id(sample): k for k, sample in enumerate(samples)}
    for k, sample in enumerate(samples):
        turn, parent = sample.turn, sample.parent
        turn.context, turn.after = None, None
        if parent is not None and sample.fresh is not None:
            turn.after = number[id(parent)]
            parent.turn.observation_ids, parent.turn.messages = sample.fresh, sample.said
            parent.turn.continuation = None if sample.said else parent.text[len(parent.start + parent.turn.text) :]
        elif k > 0:
            turn.context = Context(sample.messages, sample.prompt_ids)
        else:
            rollout.prompt_ids, rollout.prompt_messages = sample.prompt_ids, list(sample.messages)
            rollout.first_messages = list(sample.messages)
    for sample in samples if trains_all else []:
        if sample.turn.after is not None and sample.turn.trained:
            ids, mask = sample.turn.token_ids, sample.turn.per_token(1, 0)
            sample.turn.token_ids, sample.turn.logprobs = sample.fresh + ids, None
            sample.turn.mask = [1] * len(sample.fresh) + mask
            sample.parent.turn.observation_ids = []
    rollout.turns = [sample.turn for sample in samples]


def conversation_of(output: Any, request: Any) -> list[Message]:
    """All messages of an output: its own, or the request's with the response."""
    if output.messages is not None:
        return [{"role": "assistant", "content": m} if isinstance(m, str) else m for m in output.messages]
    messages = list(request.messages)
    remove_response(messages)
    return [*messages, {"role": "assistant", "content": output.response.choices[0].message.content}]

"""What a scheduler returned, as turns and records: which responses are trained, and which of their tokens.

Every record is what the model read and sampled. `response_token_ids` and `response_loss_mask` choose among that.
"""

from __future__ import annotations

from typing import Any

from mt_grpo.adapters.swift_loop import SchedulerFailure, segment_of, weight_of
from mt_grpo.adapters.swift_loss import LossMask
from mt_grpo.adapters.swift_protocol import remove_response
from mt_grpo.adapters.swift_revise import choose
from mt_grpo.adapters.swift_samples import Sample, messages_of
from mt_grpo.adapters.swift_session import SchedulerSession
from mt_grpo.rollout import Context, Message, Rollout, join


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


def train_outputs(session: SchedulerSession, outputs: list[Any], are_split: bool, loss: LossMask) -> None:
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
        last = session.sample_of(output.response.choices[0])
        if last is None:
            continue  # there was no room for any response
        groups = messages_of(last)
        if are_split:
            groups = groups[-1:]
            groups[0][0].fresh = None
        if last.key not in session.drives:
            take_masks(groups, output, session.format.ends)
            messages = [m for m in output.messages or [] if isinstance(m, str) or m.get("role") == "assistant"]
            for group, message in zip(reversed(groups), reversed(messages)):
                for sample in group:
                    sample.weight = weight_of(message)
        for sample in groups[-1]:
            sample.is_last = True
        driven = [] if are_split else session.drives.get(last.key, [])
        for sample in {id(each): each for each in [*join(groups), *driven]}.values():
            by_rule = sample.is_last or loss.base != "last_round"
            by_rule = by_rule if sample.weight is None else sample.weight
            sample.turn.trained = not sample.taken_back and (sample.masked or by_rule)
    for sample in session.samples:
        if loss.scales and sample.turn.trained and not sample.masked and sample.weight is None:
            query = next((m["content"] for m in reversed(sample.messages) if m["role"] != "assistant"), None)
            sample.turn.mask = loss.mask(sample.turn, query, sample.is_last, session.format.text)


def take_masks(groups: list[list[Sample]], output: Any, ends: frozenset[int]) -> None:
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
        found = segment_of(given, ids[-k])
        if found is not None:
            choose(group, found[0], found[1] if masks else None, ends)
            for sample in group:
                sample.masked = bool(masks)


def fill(rollout: Rollout, session: SchedulerSession, trains_all: bool = False) -> None:
    """Write the responses into a rollout as its turns, in the order of their requests.

    With `trains_all` what a record reads behind its prompt is trained, too, with the turn that it stands before. Its
    logprobs are not known, so that the batch has no importance sampling correction.

    INVARIANT: a turn goes on in the record of its parent where `fresh` are the ids between them. Else it begins one,
    with all that the model read.
    """
    samples = session.samples
    number = {id(sample): k for k, sample in enumerate(samples)}
    for k, sample in enumerate(samples):
        turn, parent = sample.turn, sample.parent
        turn.context, turn.after = None, None
        if parent is not None and sample.fresh is not None:
            turn.after = number[id(parent)]
            parent.turn.observation_ids, parent.turn.messages = sample.fresh, sample.said
            parent.turn.continuation = None if sample.said else parent.text[len(parent.bare) :]
        elif k > 0:
            turn.context = Context(sample.messages, sample.prompt_ids)
        else:
            rollout.prompt_ids, rollout.prompt_messages = sample.prompt_ids, list(sample.messages)
            rollout.first_messages = list(sample.messages)
    for drive in session.drives.values():
        for earlier, later in zip(drive, drive[1:]):  # behind an edit, too, a turn got what the next one reads last
            if later.fresh is None and not later.start:
                earlier.turn.messages = earlier.turn.messages or later.messages[-1:]
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

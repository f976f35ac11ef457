"""What a scheduler returned, as turns and records: which responses are trained, and which of their tokens.

Every record is what the model read and sampled. `response_token_ids` and `response_loss_mask` choose among that.
"""

from __future__ import annotations

from typing import Any

from mt_grpo.images.messages import pictures_of
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure, failing
from mt_grpo.integrations.ms_swift.loss import LossMask
from mt_grpo.integrations.ms_swift.messages import answer, with_tags
from mt_grpo.integrations.ms_swift.protocol import RolloutOutput
from mt_grpo.integrations.ms_swift.samples import Sample, choose, messages_of
from mt_grpo.integrations.ms_swift.session import SchedulerSession
from mt_grpo.integrations.session import fill_turns
from mt_grpo.rollout import Message, Rollout, ToolResult, join


def read_outputs(returned: Any, name: str) -> list[RolloutOutput]:
    """Validate the return value of `run`, as a list of outputs. Raises `SchedulerFailure`."""
    outputs = []
    for each in (returned if isinstance(returned, list) else [returned]) or [None]:
        if not getattr(getattr(each, "response", None), "choices", None):
            raise SchedulerFailure(
                f"{name}.run returned {returned!r:.200}, expected a RolloutOutput with a response of "
                "infer_engine.infer_async, or a list of them."
            )
        fields = {key: getattr(each, key, None) for key in RolloutOutput.model_fields}
        with failing(f"{name}.run returned an output that is none"):
            output = RolloutOutput(**{key: value for key, value in fields.items() if value is not None})
        if output.messages is not None:  # schedulers of 3.8 to 4.6 write texts in place of the assistant's messages
            output.messages = [answer(m) if isinstance(m, str) else m for m in output.messages]
        if any(m["role"] == "assistant" and {"loss", "loss_scale"} & set(m) for m in output.messages or []):
            raise SchedulerFailure(
                f"{name} set loss or loss_scale on a message, which is not supported. Return response_token_ids and "
                "response_loss_mask, or set the key loss_scale."
            )
        outputs.append(output)
    return outputs


def train_outputs(session: SchedulerSession, outputs: list[RolloutOutput], are_split: bool, loss: LossMask) -> None:
    """Mark what is trained of a conversation's responses. Raises `SchedulerFailure`.

    A response is trained if an output ends with it, or goes through it: a scheduler may ask the policy for more than
    it returns. Of a conversation by `drive` all are, also those before an edit of the history. If outputs
    `are_split`, each is a record of its own.
    """
    for sample in session.samples:
        sample.turn.trained = False
    for output in outputs:
        choice = output.response.choices[0]
        last = session.sample_of(choice)
        if choice.is_over:
            leave_out_empty(output)
        if last is None:
            continue  # there was no room for any response
        ids, masks, groups = output.response_token_ids, output.response_loss_mask, messages_of(last)
        if are_split:
            groups = groups if last.drive else groups[-max(1, len(ids)) :]
            groups[0][0].fresh = None
        if (ids, masks) != last.given:
            take_masks(session, groups, ids, masks)
        for sample in groups[-1]:
            sample.is_last = True
        for sample in [*join(groups), *last.drive]:
            by_rule = sample.masked or sample.is_last or loss.base != "last_round"
            sample.turn.trained = by_rule and not sample.dropped
    for sample in session.samples:
        if loss.scales and sample.turn.trained and not sample.masked:
            queries = [with_tags(m["content"]) for m in sample.messages if m["role"] != "assistant"]
            mask = loss.mask(sample.turn, queries[-1] if queries else None, sample.is_last, session.format)
            mask = [a & b for a, b in zip(mask, sample.turn.per_token(1, 0))]
            sample.turn.mask = mask if 0 in mask else None


def leave_out_empty(output: RolloutOutput) -> None:
    """Remove an empty response after the end from its output, unless it is the only one."""
    for lists in (output.response_token_ids, output.response_loss_mask):
        if lists and not lists[-1]:
            lists.pop()
    messages = output.messages or []
    earlier = [k for k, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
    if earlier and messages[-1] == answer(""):
        output.messages = messages[: earlier[-1] + 1]


def take_masks(
    session: SchedulerSession, groups: list[list[Sample]], ids: list[list[int]], masks: list[list[int]]
) -> None:
    """Take over the ids and masks of an output, aligned from its end, for each message of the assistant."""
    if masks and len(masks) != len(ids):
        raise SchedulerFailure(
            f"response_loss_mask has {len(masks)} lists, expected {len(ids)}: one for each list of response_token_ids."
        )
    ends = session.format.ends
    for given in reversed(ids[: max(0, len(ids) - len(groups))]):  # of records before this one
        groups.insert(0, [earlier_one(session.samples, groups[0][0], given, ends)])
    for k in range(1, len(ids) + 1):
        if ids[-k]:
            choose(groups[-k], ids[-k], masks[-k] if masks else None, ends)


def earlier_one(samples: list[Sample], first: Sample, ids: list[int], ends: frozenset[int]) -> Sample:
    """The last response before one that was sampled as these ids. Raises `SchedulerFailure`."""
    for sample in reversed(samples):
        sampled = sample.turn.token_ids
        if sample.number < first.number and (ids == sampled or (ids == sampled[:-1] and sampled[-1] in ends)):
            return sample
    raise SchedulerFailure(
        f"response_token_ids has a list {ids[:8]} for which there is no response. Expected at most one list for each "
        "message that the policy wrote, as it was sampled."
    )


def fill(rollout: Rollout, session: SchedulerSession) -> None:
    """Write the responses into a rollout as its turns, in the order of their requests.

    The results of a turn are the messages of role `tool` that the scheduler appended behind it, as texts and
    their images. Rewards of turns read them, and metrics count them; what the model read are the messages. A scheduler
    that writes results as a user's message, or into the response, gives none.
    """
    fill_turns(rollout, session.samples)
    for sample in session.samples:
        if sample.fresh is not None:
            parent = sample.parent
            parent.turn.continuation = None if sample.said else sample.start[len(parent.bare) :]
        for earlier, later in zip(sample.drive, sample.drive[1:]):
            if later.fresh is None and not later.start:  # after an edit, too, a turn got what the next one reads last
                earlier.turn.messages = earlier.turn.messages or later.messages[-1:]
    for turn in rollout.turns:
        results = [message["content"] for message in turn.messages if message["role"] == "tool"]
        turn.results = [ToolResult(text, pictures=tuple(pictures_of(text))) for text in results]


def conversation_of(output: Any, session: SchedulerSession) -> list[Message]:
    """All messages of an output: its own, or those that its last response read, with it."""
    if output.messages:
        return output.messages
    sample = session.sample_of(output.response.choices[0])
    if sample is None:
        return [answer("")]
    messages = sample.messages[:-1] if sample.start else sample.messages
    return [*({**message, "content": with_tags(message["content"])} for message in messages), answer(sample.bare)]

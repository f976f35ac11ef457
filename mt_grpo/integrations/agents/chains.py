"""The tree of what an agent asked: a request goes on from the answer whose whole conversation it repeats.

Programs send the whole conversation each time, and rarely as they got it: they write JSON anew, rename ids, drop the
thinking, strip text. So messages are compared by what they say, and the tokens are those that were sampled.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from mt_grpo.images.messages import pictures_of
from mt_grpo.integrations.agents.messages import Answer, ModelRequest, same_json
from mt_grpo.integrations.session import Sampled, fill_turns
from mt_grpo.rollout import Message, Rollout, ToolResult, Turn

Key = tuple  # what a message says; equal where two messages say the same


def plain_text(text: str, thinking: tuple[str, str]) -> str:
    """A model's text without its thinking, white space collapsed.

    >>> plain_text("<think>so</think> It  is 4.\\n", ("<think>", "</think>"))
    'It is 4.'
    """
    opening, closing = map(str.strip, thinking)
    text = re.sub(rf"\A\s*{re.escape(opening)}.*?(?:{re.escape(closing)}|$)", "", text, flags=re.DOTALL)
    return collapsed(text.rpartition(closing)[2])


def keys_of(messages: Iterable[Message], thinking: tuple[str, str]) -> list[Key]:
    """A key for what each message says. A call's id is its number in the conversation, so that ids may be renamed.

    >>> from mt_grpo.integrations.agents.messages import tool_call
    >>> keys_of([{"role": "assistant", "content": "", "tool_calls": [tool_call("a", "add", "{ }")]},
    ...          {"role": "tool", "content": "2", "tool_call_id": "a"}], ("<think>", "</think>"))
    [('assistant', '', (('add', '{}'),)), ('tool', '2', 0)]
    """
    numbers: dict[str, int] = {}
    count, keys = 0, []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            keys.append((role, content, numbers.get(message["tool_call_id"], message["tool_call_id"])))
        elif role == "assistant":
            calls = message.get("tool_calls") or []
            for call in calls:
                numbers[call["id"]] = count
                count += 1
            functions = [call["function"] for call in calls]
            said = tuple((function["name"], same_json(function["arguments"])) for function in functions)
            keys.append((role, plain_text(content, thinking), said))
        else:  # a developer is the system of another name
            role = "system" if role == "developer" else role
            keys.append((role, content, message.get("name")))
    return keys


@functools.lru_cache(maxsize=128)  # a program sends its texts again and again
def collapsed(text: str) -> str:
    """A text with one blank for each white space."""
    return " ".join(text.split())


@dataclass(eq=False)
class Asked:
    """A request that is sampled, which a retry joins."""

    same: str  # a hash of the request as text: a retry's is equal
    numbers: range  # of its answers in the rollout
    trained: bool
    paid: tuple[int, float] | None = None  # the number of an answer, and the reward that its turn got with the request
    task: asyncio.Task[list[Answer]] | None = None
    waiting: int = 0  # clients that wait for the answers
    reached: int = 0  # clients that have got them
    retries: int = 0  # requests that have joined it
    began: int = 0  # by the session's count of what happens
    ended: int | None = None  # when a client got the answers

    def overlaps(self, other: Asked) -> bool:
        """Whether another request that is answered, or waits, was open at the same time as this one."""
        ends_first = other.ended is not None and other.ended < self.began
        return bool(other.waiting or other.reached) and not ends_first and other.began < self.ended


@dataclass
class Completion(Sampled):
    """A request and its answer. Its parent is the one whose conversation the request repeats."""

    asked: Asked  # with n, of several answers
    request: ModelRequest
    keys: list[Key]  # of all messages of the request, and of the answer
    answer: Answer
    tools: str = ""  # of the request, in one way of writing them
    children: list[Completion] = field(default_factory=list)
    continued: int = 0  # requests that go on from this one, answered or not

    @property
    def received(self) -> bool:
        """Whether a client has read the answer, and did not disconnect before it came."""
        return bool(self.asked.reached or self.children)

    @functools.cached_property
    def call_ids(self) -> set[str]:
        """The ids of all calls up to the answer, as they were given."""
        own = {call["id"] for call in self.answer.tool_calls}
        return own | self.parent.call_ids if self.parent else own

    @property
    def ids(self) -> list[int]:
        """All that was read and sampled."""
        return self.prompt_ids + self.turn.token_ids

    def told_apart(self, messages: list[Message]) -> tuple[int, int, int]:
        """Of the answers up to this one, how many a conversation has by signature, by thinking, letter for letter."""
        signed, thought, exact, each = 0, 0, 0, self
        while each is not None:
            sent = messages[len(each.keys) - 1]
            signed += sent.get("signature") == each.answer.signature
            thought += (sent.get("reasoning_content") or "").strip() == each.answer.reasoning.strip()
            exact += sent["content"].strip() == each.answer.content.strip()
            each = each.parent
        return signed, thought, exact

    @functools.cached_property
    def _pattern(self) -> re.Pattern:
        """A pattern that matches the answer's text as whole words.

        It begins with the text itself, which is searched for fast, and then looks at what stands before.
        """
        literal = re.escape(collapsed(self.answer.content))
        return re.compile(rf"{literal}(?<!\w{literal})(?!\w)")

    def _stands_in(self, messages: list[Message]) -> bool:
        """Whether the answer's text stands in one of these messages."""
        text = collapsed(self.answer.content)
        contents = (collapsed(message["content"]) for message in messages)
        return bool(text) and any(text in each and self._pattern.search(each) for each in contents)

    def is_told_in(self, messages: list[Message], keys: list[Key]) -> bool:
        """Whether messages of a request that does not continue this answer tell of it.

        They do by results of its calls, by its own message with something after it, or by its text within a text.
        """
        calls = {call["id"] for call in self.answer.tool_calls}
        if any(message.get("tool_call_id") in calls for message in messages):
            return True
        if any(key[0] == "assistant" and key[1:] == self.keys[-1][1:] for key in keys[:-1]):
            return True
        # A text of the request itself was not said by the answer.
        return self._stands_in(messages) and not self._stands_in(self.request.messages)

    def is_begun_by(self, keys: list[Key]) -> bool:
        """Whether a conversation begins with this one, including the answer."""
        count = len(self.keys)
        if len(keys) < count or keys[: count - 1] != self.keys[:-1]:
            return False
        (*given, calls), sent = self.keys[-1], keys[count - 1]
        if sent[0] != "assistant" or sent[2] != calls:
            return False
        # Some programs put the stop text, which is not in the answer, behind it again.
        texts = {sent[1], *(sent[1].removesuffix(collapsed(stop)).strip() for stop in self.request.stops)}
        return given[1] in texts


same_tools = functools.lru_cache(maxsize=64)(same_json)  # a program sends its tools with each request


class Chains:
    """All completions of one rollout, in the order of their requests, once they are answered."""

    def __init__(self, thinking: tuple[str, str], completions: list[Completion]):
        self.thinking, self.completions = thinking, completions
        self.sends_thinking = False  # whether the program has sent any back
        self.requests: list[tuple[int, ModelRequest]] = []  # (number of the first answer), also those that got none
        self._keys: dict[Key, Key] = {}

    def keys_of(self, messages: Iterable[Message]) -> list[Key]:
        """A comparison key per message. Equal keys are one object, so that long conversations compare fast."""
        return [self._keys.setdefault(key, key) for key in keys_of(messages, self.thinking)]

    def longest(self, request: ModelRequest, keys: list[Key]) -> Completion | None:
        """The completion that a request goes on from; None where it begins a record.

        An assistant's message that was not sampled here is one that the policy never wrote: it has to be rendered.
        """
        tools = same_tools(json.dumps(request.tools))
        # Where a program never sends thinking back, its lack says nothing.
        self.sends_thinking = self.sends_thinking or any(each.get("reasoning_content") for each in request.messages)
        ids = {call["id"] for message in request.messages for call in message.get("tool_calls") or []}

        def rank(found: Completion) -> tuple:  # two conversations may say the same
            signed, thought, exact = found.told_apart(request.messages)
            thought, same_model = thought * self.sends_thinking, found.request.trained == request.trained
            called = len(found.call_ids & ids)
            return signed, called, thought, exact, same_model, found.received, not found.continued, -found.number

        found = [each for each in self.completions if each.tools == tools and each.is_begun_by(keys)]
        longest = max((len(each.keys) for each in found), default=0)
        best = max((each for each in found if len(each.keys) == longest), key=rank, default=None)
        if best is None or any(message["role"] == "assistant" for message in request.messages[len(best.keys) :]):
            return None
        return best

    def add(self, completion: Completion) -> None:
        """Add an answered request. Its answer is compared as the agent will send it."""
        completion.keys = self.keys_of([*completion.messages, completion.answer.message])
        completion.tools = same_tools(json.dumps(completion.request.tools))
        bisect.insort(self.completions, completion, key=lambda each: each.number)
        if completion.parent is not None:
            completion.parent.children.append(completion)

    def tells_of_trained(self, request: ModelRequest) -> bool:
        """Whether a request continues a trained answer, or contains one."""
        keys = self.keys_of(request.messages)
        each = self.longest(request, keys)
        while each is not None and not each.request.trained:
            each = each.parent
        trained = (other for other in self.completions if other.request.trained and other.received)
        return each is not None or any(other.is_told_in(request.messages, keys) for other in trained)

    def fill(self, rollout: Rollout) -> None:
        """Write the completions into a rollout as its turns, in the order of their requests.

        INVARIANT: of the completions that go on from the same one, the first that is trained is in its record; where
        none is, the first is. The others begin records.
        """
        for each in self.completions:
            turn, parent = each.turn, each.parent
            # What nobody has read had no effect, and so no reward that is its own.
            turn.trained = each.request.trained and each.received
            if not each.received:
                turn.info["received"] = False
            if parent is not None and each is min(parent.children, key=lambda c: (not c.request.trained, c.number)):
                ids = [call["id"] for call in each.request.messages[len(parent.keys) - 1].get("tool_calls") or []]
                take_results(parent.turn, ids, each.said)
            else:
                each.fresh, turn.tools = None, each.request.tools or None
        fill_turns(rollout, self.completions)
        self.find_what_went_on()

    def find_what_went_on(self) -> None:
        """Mark the turns of which a later request tells, in whatever record, and whether or not it was answered.

        A program that edits its history, such as its system prompt or the text beside a call, begins a record with
        each request. The results of the calls before it are in no record of theirs: here the turns get them.
        """
        answered = {each.asked.numbers[0]: each for each in self.completions}
        for number, request in self.requests:
            found, keys = answered.get(number), self.keys_of(request.messages)
            parent = found.parent if found else self.longest(request, keys)
            if parent is not None:
                parent.turn.went_on = True
            start = len(parent.keys) if parent else 0
            further = request.messages[start:]
            for each in self.completions:
                turn, ids = each.turn, [call["id"] for call in each.answer.tool_calls]
                lacks = not turn.went_on or bool(ids) and not turn.results
                if each.number < number and each.received and lacks and each.is_told_in(further, keys[start:]):
                    turn.went_on = True
                    if not turn.results:
                        take_results(turn, ids, [said for said in further if said.get("tool_call_id") in ids])


def take_results(turn: Turn, ids: list[str], messages: list[Message]) -> None:
    """Give a turn the results among messages, in the order of its calls. Calls without one stand behind the others.

    A program sends results in any order, and none for a call that it could not read. Rewards and metrics pair calls
    and results by their places.

    Args:
        ids: Of the calls that the program could read, in their order, as it names them in `messages`.
        messages: What it sent after the turn; those of other roles say no result.
    """
    valid = [call for call in turn.calls if call.error is None]
    said = {}
    for message in messages:
        if message["role"] == "tool":
            place = ids.index(message["tool_call_id"]) if message["tool_call_id"] in ids else len(ids) + len(said)
            error = "tool" if message.get("failed") else None
            said[place] = ToolResult(message["content"], error, pictures=tuple(pictures_of(message["content"])))
    turn.results = [said[place] for place in sorted(said)]
    answered = [valid[place] for place in sorted(said) if place < min(len(ids), len(valid))]
    turn.calls = answered + [call for call in turn.calls if not any(call is each for each in answered)]

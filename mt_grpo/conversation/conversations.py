"""The base class of conversations: formats by tokenizer, prompts, requests and their budget, interactive use."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import difflib
import itertools
import json
import logging
import marshal
import re
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, JsonValue, TypeAdapter
from transformers import PreTrainedTokenizerBase

from mt_grpo.base.errors import NoServerLeft, ServerError, error_line, sentence
from mt_grpo.base.event_loop import gather_all, run_async
from mt_grpo.base.fields import key
from mt_grpo.base.files import RecipeLoader
from mt_grpo.base.rows import row_text
from mt_grpo.conversation.environments import keep_whole, num_ids
from mt_grpo.conversation.formats.base import ASK, ChatFormat
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.formats.control_tokens import cut_messages
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.images.pictures import has_too_many
from mt_grpo.rollout import Message, Origin, Rollout, StopReason, ToolCall, ToolResult

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Limits:
    """The limits of a conversation, set by a recipe. TRL's `max_completion_length` bounds it as well."""

    max_env_steps: int = key(8, "Observations per conversation, errors too; then one last turn", within="[0, inf)")
    max_turn_tokens: int | None = key(None, "Tokens of one turn. None: what remains", within="[1, inf)")
    max_tool_response_tokens: int | None = key(
        None, "Tokens of one result. None: a quarter of the budget; at most half", within="[10, inf)", of_tools=True
    )
    max_concurrent_tools: int = key(
        256, "Tool calls at the same time, per rank", within="[1, inf)", of_tools=True, trained=False
    )
    tool_timeout: float = key(30.0, "Seconds that one tool call may take", within="(0, inf)", of_tools=True)
    environment_timeout: float = key(
        120.0, "Seconds that one call of an environment's reset, respond, ... may take", within="(0, inf)"
    )

    @property
    def longest_turn(self) -> int:
        """The maximum number of tokens of one turn."""
        return self.max_turn_tokens or self.max_completion_length


def limits_of(settings: Limits) -> dict[str, Any]:
    """The limits among some settings, name -> value."""
    return {each.name: getattr(settings, each.name) for each in dataclasses.fields(Limits)}


class Conversations(Limits):
    """Base class of `MultiTurnToolEnv`. A subclass implements `start`, `take_turn` and `converse`."""

    max_completion_length = 4096  # of an environment that is given none, like the next one
    max_env_steps = 2

    def __init__(
        self, max_steps: int, max_completion_length: int, prompt_examples: str | list | None = None, **limits: Any
    ):
        super().__init__(max_steps, **limits)
        self.max_completion_length = max_completion_length
        self.prompt_examples = read_prompt_examples(prompt_examples)
        self._examples: dict[int, list[Message]] = {}  # as messages of the template, by id of the tokenizer

    max_steps = property(  # the name of the constructor's argument
        lambda self: self.max_env_steps, lambda self, value: setattr(self, "max_env_steps", value)
    )

    @property
    def result_limit(self) -> int:
        """Tokens of one tool result: `max_tool_response_tokens`, at most half of the budget; unset, a quarter."""
        share = self.max_completion_length // (4 if self.max_tool_response_tokens is None else 2)
        return max(10, min(self.max_tool_response_tokens or share, share))

    async def converse_whole(self, rollout: Rollout, llm: Any, sampling_params: dict | None = None) -> Rollout:
        """Run `converse`, then validate the rollout's lists for the loss. An invalid rollout is marked as failed."""
        async with self._in_its_place(rollout, llm):
            try:
                rollout = await self.converse(rollout, llm, sampling_params)
            except NoServerLeft:
                raise
            except ServerError as error:  # perhaps for this prompt alone
                asked = f"It was asked for the row {row_text(rollout.row)}."
                raise type(error)(f"{sentence(error)} {asked}") from error
        tokenizer = self._tokenizer(llm)
        keep_whole(rollout, num_ids(tokenizer, len(tokenizer)))
        return rollout

    @asynccontextmanager
    async def _in_its_place(self, rollout: Rollout, llm: Any) -> AsyncIterator[None]:
        """Wait, without a limit, until the rollout's environment takes another conversation; notify it at the end."""
        if self.environments is None:
            yield
            return
        room = self.environments.room(rollout) or asyncio.Semaphore()
        await (self.aside(llm, room.acquire()) if room.locked() else room.acquire())
        try:
            yield
        finally:
            try:
                await self.environments.over(rollout)
            finally:
                room.release()

    async def aside(self, llm: Any, awaitable: Awaitable) -> Any:
        """Await what another conversation does. If this process generates, a batch starts when all others wait."""
        return await (llm.aside(awaitable) if hasattr(llm, "aside") else awaitable)

    # -- what the conversation reads: its limits, its format, its state --

    def _room(self, rollout: Rollout, llm: Any) -> Room:
        ids = rollout.history_ids
        context = 0 if rollout.pictures and has_too_many(ids) else self._context(llm) - len(ids)
        return Room(self.max_completion_length - rollout.new_tokens, context)

    def readable(self, messages: list[Message], llm: Any) -> list[Message]:
        """The messages, shortened as far as no context holds them anyway: to tokenise megabytes takes seconds."""
        return cut_messages(messages, self._context(llm), self._tokenizer(llm))

    def _context(self, llm: Any) -> float:
        """The length of the model's context in tokens."""
        return self.max_model_len or getattr(llm, "max_model_len", None) or float("inf")

    def format_of(self, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """The tool format of a model with this tokenizer, which reads its calls and writes results."""
        if id(tokenizer) not in self._formats:
            made = TOOL_FORMATS[self.tool_format](tokenizer, self.chat_template_kwargs, self._ends)
            self._formats[id(tokenizer)] = made
        return self._formats[id(tokenizer)]

    def with_examples(self, messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> list[Message]:
        """Insert the examples, as a model with this tokenizer reads them, after the system messages."""
        if id(tokenizer) not in self._examples:
            tool_format, all_known = self.format_of(tokenizer), self.environments is None
            self._examples[id(tokenizer)] = written_examples(self.prompt_examples, tool_format, self.tools, all_known)
        systems = list(itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages))
        return [*systems, *copy.deepcopy(self._examples[id(tokenizer)]), *messages[len(systems) :]]

    def add_ends(self, ids: Iterable[int]) -> None:
        """Add ids that end a turn, such as those of the model's generation config."""
        self._ends, self._formats, self._examples = {*self._ends, *ids}, {}, {}

    async def _state_key(self, rollout: Rollout) -> Any:
        if hasattr(rollout.environment, "state_key"):
            key = await self.environments.call(rollout, "state_key")
            return copy.deepcopy(key) if isinstance(key, (list, tuple)) else key  # a board may be changed in place
        try:
            return self.state_key and self.state_key(rollout.turns)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"The function state_key raised {error_line(error)}") from error

    def _tokenizer(self, llm: Any) -> PreTrainedTokenizerBase:
        tokenizer = self.tokenizer or getattr(llm, "tokenizer", None)
        if tokenizer is None:
            raise ValueError("No tokenizer. Pass MultiTurnToolEnv(..., tokenizer=...) or a backend with a tokenizer.")
        return tokenizer

    def end_of_turn_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The token ids that end a turn, at which sampling must stop."""
        return sorted(self.format_of(tokenizer).ends)

    # -- for people: runs in a background loop, so a notebook's own running loop is no obstacle --

    def generate(
        self,
        prompts: list[list[dict[str, str]]],
        llm: Any,
        sampling_params: dict[str, Any] | None = None,
        rows: list[dict[str, Any]] | None = None,
    ) -> dict[str, list]:
        """Run all conversations to their end.

        Args:
            prompts: Messages, or strings (one user message).
            llm: A backend with `async generate(prompt_ids, max_tokens, sampling_params, index)`.
            sampling_params: temperature, top_p, ...; unset ones have no effect on the distribution.
            rows: One dataset row per prompt, for environments.

        Returns lists with one entry per conversation. `mask` is 1 for tokens that the model sampled.
        """
        sampling_params = self._with_stops(sampling_params, llm)
        states = self.start(prompts, llm, rows)
        try:
            run_async(gather_all([self.converse_whole(state, llm, sampling_params) for state in states]))
        finally:
            self.close(states)
        return {
            "ids": [s.completion_ids for s in states], "messages": [s.prompt_messages + s.messages for s in states],
            "mask": [s.loss_mask for s in states], "prompt_ids": [s.prompt_ids for s in states],
            "logprobs": [s.logprobs for s in states], "turn_ids": [s.turn_ids for s in states],
            "stop_reasons": [s.stop_reason for s in states], "rollouts": states,
        }  # fmt: skip

    def step(self, states: list[Rollout], llm: Any, sampling_params: dict[str, Any] | None = None) -> list[Rollout]:
        """Take one model turn, with its observation, in every open conversation. Returns the same states."""
        sampling_params = self._with_stops(sampling_params, llm)
        still_open = [state for state in states if state.stop_reason is None]
        run_async(gather_all([self.take_turn(state, llm, sampling_params) for state in still_open]))
        return states

    def close(self, states: list[Rollout] | None = None) -> None:
        """Close the environments of these conversations, or of all open ones if `states` is None."""
        if self.environments is not None:
            try:
                errors = run_async(self.environments.close(states), 2 * self.environment_timeout + 30.0)
            except TimeoutError as error:  # a tool may block the loop for ever
                errors = [error_line(error)]
            for error in errors:
                logger.warning(f"Closing an environment failed: {error}")

    def _with_stops(self, sampling_params: dict[str, Any] | None, llm: Any) -> dict[str, Any]:
        """Add the tokens that end a turn in the chat template. A base model's own end token may differ."""
        check_sampling_params(sampling_params, SAMPLING_KEYS - {"stop"})
        return {"stop_token_ids": self.end_of_turn_ids(self._tokenizer(llm)), **(sampling_params or {})}


# Examples before the question (`prompt_examples`): conversations that the model reads and is not trained on.


class ExampleCall(BaseModel, extra="forbid"):
    """A call in an example."""

    name: str
    arguments: dict[str, JsonValue] = {}


class ExampleMessage(BaseModel, extra="forbid", str_strip_whitespace=True):
    """A message of an example. Blanks around its text are left out: YAML's blocks end with a line break."""

    role: Literal["user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(lambda content: content or "")] = ""  # null beside calls
    tool_calls: list[ExampleCall] = []


def read_prompt_examples(examples: str | list | None) -> list[list[ExampleMessage]]:
    """Validate conversations, a list of them or a YAML, JSON or JSON lines file. Raises `ValueError`."""
    try:
        if isinstance(examples, str):
            text = Path(examples).read_text(encoding="utf-8-sig")
            if examples.endswith(".jsonl"):
                examples = [json.loads(line) for line in text.split("\n") if line.strip()]
            else:
                examples = json.loads(text) if examples.endswith(".json") else yaml.load(text, RecipeLoader)
            examples = examples or [[]]  # which is no conversation
        shown = [each.get("messages") if isinstance(each, dict) else each for each in examples or []]
        checked = TypeAdapter(list[list[ExampleMessage]]).validate_python(shown)
        for number, messages in enumerate(checked, 1):
            roles = "".join(m.role[0] if m.content or m.tool_calls or m.role == "tool" else "_" for m in messages)
            calling = {message.role for message in messages if message.tool_calls}
            if not calling <= {"assistant"} or not re.fullmatch("ua(t+a|ua)*", roles):
                raise ValueError(f"example {number} has an empty message (_), or roles out of order: {roles}")
        return checked
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"prompt_examples: {error_line(error)}. Expected a list of lists of messages") from error


def written_examples(
    examples: list[list[ExampleMessage]], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[Message]:
    """Convert examples to messages for the chat template, with calls and results as in a conversation of this format.

    `all_known`: whether conversations have only `tools`. Raises `ValueError` for what no conversation has.
    """
    messages, texts = [], []
    for number, example in enumerate(examples, 1):
        try:
            for k, message in [(k, m) for k, m in enumerate(example) if m.role != "tool"]:
                turn = {"role": "user", "content": message.content}
                calls = [ToolCall(call.name, call.arguments) for call in message.tool_calls]
                if message.role == "assistant":
                    turn = tool_format.turn_message(calls, message.content)
                if message.role == "assistant" and "tool_calls" not in turn:
                    ids = tool_format.text_ids(turn["content"])
                    found = tool_format.parse(ids, [], tools).calls
                    if tool_format.cut(ids, [])[0] < len(ids) or (calls and found != calls):
                        text = turn["content"]
                        raise ValueError(f"{text!r:.300} goes on after the end of the turn, or has other calls")
                    calls = found
                if tool_format.clean([turn], Origin.DATA) != [turn]:
                    raise ValueError(f"{message.content!r:.100} has a token that begins or ends a message")
                following = itertools.takewhile(lambda each: each.role == "tool", example[k + 1 :])
                results = [ToolResult(tool_format.clean_text(each.content)) for each in following]
                checks = (check_call(c, tools) if all_known or c.name in tools else c.error for c in calls)
                mistakes = " ".join(filter(None, checks))
                if mistakes or len(results) != len(calls):
                    counts = f"{len(calls)} calls, {len(results)} results"
                    raise ValueError(f"{turn['content']!r:.200}: {counts}. {mistakes}")
                read = tool_format.results(calls, results)
                messages += [turn, *read]
                texts += [*turn["content"].splitlines(), *(call.name for call in calls if "tool_calls" in turn)]
                # As after a sampled turn, of which the generation prompt may open the thinking.
                texts += [tool_format.suffix(calls, read).partition(tool_format.thinking[0])[0]] if read else []
            shown = {**tool_format.prompt([*messages, ASK], {}), "tokenize": False}
            rendered = tool_format.tokenizer.apply_chat_template(**shown)
            for text in filter(None, map(str.strip, texts)):
                _, found, rendered = rendered.partition(text)
                if not found:
                    raise ValueError(f"the chat template leaves out {text!r:.300}, or writes it differently later")
        except Exception as error:  # whatever a template raises
            raise ValueError(f"prompt_examples, example {number}: {error}") from error
    return messages


# The prompts of a batch: rollouts with the same prompt have it rendered and tokenised once.


def digest_of(value: Any) -> bytes | None:
    """A key of plain values, in which 1, True and 1.0 differ, as do orders of a dict's keys; None for other values.

    >>> len({digest_of([v]) for v in (1, True, 1.0, "1", b"1")}), digest_of([object()])
    (5, None)
    """
    try:
        return marshal.dumps(value, 2)  # later formats tell a text from a copy of it
    except ValueError:  # a class of someone's own, or too deep
        return None


class PromptCache:
    """The ids of prompts that were rendered for a batch. Its rollouts hold the cache, which goes with them."""

    def __init__(self):
        self._ids: dict[tuple, list[int]] = {}

    def ids(self, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> list[int]:
        """The ids of `tokenizer.apply_chat_template(**arguments)`, (P,), rendered once per batch if possible."""
        digest = digest_of(arguments)
        key = id(tokenizer), len(tokenizer), str(tokenizer.chat_template), digest
        if digest is None or key not in self._ids:
            self._ids[key] = tokenizer.apply_chat_template(**arguments)
        return list(self._ids[key])  # INVARIANT: each rollout gets a list of its own


# What a request may hold: contents of messages, sampling parameters, and the remaining budget.


def sampling_defaults() -> dict[str, Any]:
    """Neutral values of the sampling fields. A server reads fields that are not sent from generation_config.json."""
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(args: Any) -> dict[str, Any]:
    """The sampling parameters of a recipe: TRL's settings, overridden by `generation_kwargs`."""
    given = {name: getattr(args, name) for name in sampling_defaults()} | (args.generation_kwargs or {})
    return sampling_defaults() | {key: value for key, value in given.items() if value is not None}


SAMPLING_KEYS = {  # keys that a request may contain besides the prompt; a server silently ignores unknown keys
    *sampling_defaults(), "presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "logit_bias",
    "allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "priority",
    "structured_outputs", "response_format", "thinking_token_budget", "spaces_between_special_tokens", "vllm_xargs",
    "cache_salt", "user",
}  # fmt: skip
CHAT_KEYS = {*SAMPLING_KEYS, "max_tokens", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort"}


def check_sampling_params(sampling_params: dict[str, Any] | None, known: set[str] = SAMPLING_KEYS) -> None:
    """Raise `ValueError` for a key that the server would ignore, or that the conversation sets itself."""
    for name in (sampling_params or {}).keys() - known:
        if name in ("stop", "max_tokens", "max_completion_tokens"):
            raise ValueError(f"sampling_params: {name!r} is set per turn, by the tool format or max_turn_tokens.")
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
        raise ValueError(f"sampling_params: unknown key {name!r}.{hint}")


def check_conversations(prompts: Any, name: str, texts: bool = True, images: bool = False) -> list:
    """Return conversations as a list. Raises `ValueError` unless each is a list of messages, or a string if `texts`.

    With `texts`, contents become text (`message_text`).
    """
    expected = f"a list of conversations, each one a list of messages{' or a string' if texts else ''}"
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, Iterable):
        raise ValueError(f"{name} is {prompts!r:.80}, expected {expected}. Put a single one into a list.")
    prompts = list(prompts)
    for k, prompt in enumerate(prompts):
        messages = [] if texts and isinstance(prompt, str) else prompt
        if not isinstance(messages, (list, tuple)) or not all(
            isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages
        ):
            raise ValueError(f"{name} contains {prompt!r:.80}, expected {expected}, with role and content.")
        if texts and not all(isinstance(message["content"], str) for message in messages):
            prompts[k] = [{**message, "content": message_text(message, name, images)} for message in messages]
    return prompts


def message_text(message: dict[str, Any], name: str, images: bool = False) -> Any:
    """The content of a message as text, with text parts joined. With `images`, a list with an image may stay."""
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type", "text") for part in content}
        if kinds <= {"text"} and all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        if images and kinds <= {"text", "image", "image_url"}:
            return content
    raise ValueError(f"{name} has a message with the content {content!r:.100}, expected text or parts of text.")


class Room(typing.NamedTuple):
    """The remaining token budget of a conversation."""

    completion: float  # remaining tokens of max_completion_length
    context: float  # remaining tokens of the model's context

    @property
    def tokens(self) -> float:
        """The smaller of the two remaining budgets, in tokens."""
        return min(self)

    @property
    def reason(self) -> StopReason:
        """The stop reason of a conversation that runs out of this budget."""
        return StopReason.CONTEXT_LENGTH if self.context < self.completion else StopReason.MAX_TOKENS

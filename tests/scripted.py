"""A tokenizer whose ids can be written by hand, a scripted model, and conversations between the two."""

import asyncio
import json
import re
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mt_grpo.base.event_loop import LOOPS
from mt_grpo.rollout import Generation, Rollout, StopReason, hash_of_ids
from mt_grpo_trainer import MultiTurnToolEnv

# --- a tokenizer whose ids can be written by hand: byte b is id b ----------------------------------------------------


SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<think>": 259, "</think>": 260}
CLOSES_AND_MORE = 261  # one token, only ever sampled: "l>" and a newline
CLOSES_BOTH = 262  # one token, only ever sampled: "</answer></tool>"
START, END = 257, 258

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")


def byte_symbols() -> list[str]:
    """The character by which a byte-level BPE writes byte b, for b from 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def byte_level(template: str, vocab: dict[str, int], pairs: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = template
    return tokenizer


def make_tokenizer(template: str, merges: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer; `merges` are two bytes each, which become one token."""
    symbols = byte_symbols()
    vocab = {symbol: b for b, symbol in enumerate(symbols)} | SPECIAL
    for text in ("l>\n", "</answer></tool>", *merges):
        vocab["".join(symbols[b] for b in text.encode())] = len(vocab)
    tokenizer = byte_level(template, vocab, [tuple(symbols[b] for b in text.encode()) for text in merges])
    # As in Qwen3: tokens of their own, but not special.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


CHATML_TOKENIZER = make_tokenizer(CHATML)
QWEN3_TOKENIZER = make_tokenizer(QWEN3)


def ids(text: str) -> list[int]:
    """What a text is in tokens, without the tokenizer: control tokens by the table above, every other byte itself."""
    pieces = re.split("(" + "|".join(re.escape(t) for t in SPECIAL) + ")", text)
    return [i for piece in pieces for i in ([SPECIAL[piece]] if piece in SPECIAL else piece.encode())]


# --- a scripted model ------------------------------------------------------------------------------------------------


@dataclass
class Request:
    index: int
    prompt: list[int]
    max_tokens: int
    params: dict | None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None


OF_ENVIRONMENTS = {StopReason.ENVIRONMENT_STOP, StopReason.ENVIRONMENT_ERROR}  # test_environments.py
OF_AGENTS = {StopReason.AGENT_DONE, StopReason.AGENT_ERROR, StopReason.AGENT_TIMEOUT}  # test_agents.py


class Scripted:
    """A backend that says what it is told, cut to the budget it is asked for, and remembers every request.

    `scripts[i]` are the turns of conversation i: texts, or lists of ids. The j-th token of a turn has logprob
    -(j + 1) / 8, exact in binary.
    """

    def __init__(self, scripts: list[list], logprobs: bool = True, tokenizer=None):
        self.scripts = [[ids(turn) if isinstance(turn, str) else turn for turn in script] for script in scripts]
        self.with_logprobs = logprobs
        self.tokenizer = tokenizer
        self.requests: list[Request] = []

    def of(self, index: int) -> list[Request]:
        return [r for r in self.requests if r.index == index]

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        assert isinstance(max_tokens, int) and max_tokens > 0
        request = Request(index, list(prompt_ids), max_tokens, sampling_params)
        script = self.scripts[index]
        assert len(self.of(index)) < len(script), "the model was asked for a turn more than is written"
        whole = script[len(self.of(index))]
        self.requests.append(request)
        await asyncio.sleep(0)
        request.sampled = whole[:max_tokens]
        if self.with_logprobs:
            request.logprobs = [-(j + 1) / 8 for j in range(len(request.sampled))]
        ended = "stop" if len(whole) <= max_tokens else "length"
        return Generation(list(request.sampled), request.logprobs, ended, hash_of_ids(request.prompt))


class ScriptedTexts:
    """Writes these texts in each conversation, with an end of turn, and the last one again and again.

    A text in a tuple ends without an end of turn; an error is raised. The j-th token of a turn has logprob -j / 64.
    `asked` has what each request read and what was sampled.
    """

    def __init__(self, *turns, tokenizer, max_model_len=1024, seconds=0.0):
        self.turns, self.tokenizer, self.max_model_len, self.seconds = turns, tokenizer, max_model_len, seconds
        self.asked, self.params, self.began, self.places = [], [], 0, {}

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        self.began += 1
        place = self.places[index] = self.places.get(index, -1) + 1
        turn = self.turns[min(place, len(self.turns) - 1)]
        await asyncio.sleep(self.seconds)
        if isinstance(turn, Exception):
            raise turn
        text, end = (turn, [self.tokenizer.eos_token_id]) if isinstance(turn, str) else (turn[0], [])
        whole = self.tokenizer(text, add_special_tokens=False)["input_ids"] + end
        sampled = whole[:max_tokens]
        self.asked.append((list(prompt_ids), sampled))
        self.params.append(sampling_params)
        logprobs = [-j / 64 for j in range(len(sampled))]
        return Generation(sampled, logprobs, "stop" if sampled == whole and end else "length")

    def verify(self, rollout: Rollout) -> None:
        """Each turn was read and sampled as its record says, and each completion of the policy is one turn at most."""
        for record in rollout.records if rollout.turns else []:
            read = list(record.prompt_ids)
            for turn in record.turns:
                size = len(turn.token_ids)
                assert (read, turn.token_ids) in [(asked, sampled[:size]) for asked, sampled in self.asked]
                assert turn.logprobs is None or len(turn.logprobs) == size
                read = read + turn.token_ids + turn.observation_ids
        assert sum(len(record.turns) for record in rollout.records) == len(rollout.turns) <= len(self.asked)
        assert sorted(k for r in rollout.records for k in r.numbers) == list(range(len(rollout.turns)))


def of_turns(requests: list[Request]) -> list[Request]:
    """One request per turn: one that stopped inside the model's thinking was followed by another for the same turn."""
    merged = []
    for request in requests:
        last = merged[-1] if merged else None
        if last is None or request.prompt != last.prompt + last.sampled:
            merged.append(replace(request))
            continue
        last.sampled = last.sampled + request.sampled
        last.logprobs = None if request.logprobs is None else last.logprobs + request.logprobs
    return merged


def verify(env: MultiTurnToolEnv, rollouts: list[Rollout], backend: Scripted) -> None:
    """What holds for every rollout: it is what the backend saw and sampled, in order, and within its budgets."""
    special = set(CHATML_TOKENIZER.all_special_ids)
    for rollout in rollouts:
        requests = of_turns(backend.of(rollout.index))
        assert rollout.stop_reason is not None
        assert len(requests) == len(rollout.turns)
        seen = list(rollout.prompt_ids)
        mask, owners, logprobs = [], [], []
        for k, (turn, request) in enumerate(zip(rollout.turns, requests, strict=True)):
            kept = len(turn.token_ids)
            assert request.prompt == seen
            assert turn.token_ids == request.sampled[:kept]
            assert turn.logprobs == (request.logprobs and request.logprobs[:kept])
            assert (turn.observation is None) == (turn.observation_ids == [])
            seen += turn.token_ids + turn.observation_ids
            mask += [1] * kept + [0] * len(turn.observation_ids)
            owners += [k] * kept + [-1] * len(turn.observation_ids)
            logprobs += (turn.logprobs or []) + [0.0] * len(turn.observation_ids)
            assert 0 < request.max_tokens <= env.max_completion_length
            assert len(request.prompt) + request.max_tokens <= (env.max_model_len or 10**9)
            assert request.max_tokens <= (env.max_turn_tokens or 10**9)
            if turn.observation is not None:
                # A tool brings no control token: one end of turn (sampled or added), the message, the next turn.
                end = [] if turn.token_ids and turn.token_ids[-1] == END else [END]
                assert [i for i in turn.observation_ids if i in special] == [*end, START, END, START]
        assert seen == rollout.prompt_ids + rollout.completion_ids
        assert rollout.loss_mask == mask
        assert rollout.turn_ids == owners
        assert rollout.logprobs == (logprobs if backend.with_logprobs or not rollout.turns else None)
        assert len(rollout.completion_ids) <= env.max_completion_length
        assert len(seen) <= max(env.max_model_len or 10**9, len(rollout.prompt_ids))
        assert sum(t.observation is not None for t in rollout.turns) <= env.max_steps


# --- tools -----------------------------------------------------------------------------------------------------------


def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


def echo(text: str) -> str:
    """Says it again."""
    return text


async def slow_echo(text: str, seconds: float = 0.0) -> str:
    """Says it again, later."""
    await asyncio.sleep(seconds)
    return text


def call(name: str, **arguments) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


def hermes_call(name: str, /, **arguments) -> str:
    """The same as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD = '<tool>{"name": "add", "args": {"a": 2, "b": 3}}</tool>'
ANSWER = "<answer>5</answer>"


def result(text: str, end: str = "<|im_end|>") -> str:
    """What stands between two turns in ChatML; `end` is empty if the model sampled its end of turn."""
    return f"{end}\n<|im_start|>user\n<result>\n{text}\n</result><|im_end|>\n<|im_start|>assistant\n"


def make_env(tools=(add, echo, slow_echo), system_prompt=None, max_steps=2, tokenizer=CHATML_TOKENIZER, **limits):
    return MultiTurnToolEnv(list(tools), system_prompt, max_steps, tokenizer=tokenizer, **limits)


def within(function, seconds: float = 60.0):
    """The result of `function()`, or a failure if it hangs; a hanging or dead background loop is replaced."""
    outcome = {}

    def work():
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        LOOPS.clear()
        pytest.fail(f"hangs (waited {seconds:g} s)")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def converse(*turns, prompt="2+3?", seconds=60.0, **settings) -> tuple[Rollout, Scripted]:
    """One conversation to its end."""
    env, backend = make_env(**settings), Scripted([list(turns)])
    (rollout,) = within(lambda: env.generate([prompt], backend), seconds)["rollouts"]
    verify(env, [rollout], backend)
    return rollout, backend


def observe(tool, text: str | None = None, seconds: float = 60.0, **settings):
    """The first turn of a conversation that calls `tool`; the model must get its answer turn afterwards."""
    text = text or call(tool.__name__)
    rollout, _ = converse(text, ANSWER, tools=[tool], seconds=seconds, **settings)
    assert rollout.stop_reason == StopReason.ANSWERED
    return rollout.turns[0]


THINKING = "<think>\nadd them\n</think>\n\n"
PROMPT_LENGTH = 23  # of "2+3?" in ChatML
TALK = "x" * 2000


def run_many(tools: list, scripts: list[list], **settings) -> list[Rollout]:
    env, backend = make_env(tools, **settings), Scripted(scripts)
    rollouts = within(lambda: env.generate(["go"] * len(scripts), backend))["rollouts"]
    verify(env, rollouts, backend)
    return rollouts

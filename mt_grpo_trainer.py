"""MT-GRPO: train a language model to use tools over several turns, and give every turn its own credit.

GRPO samples G answers to a prompt and gives every token of an answer the same advantage. A conversation with tools
has several turns. A good search and the bad answer after it should not share one. MT-GRPO (arXiv 2505.11821) adds:

1. Rollouts are conversations: the model writes a turn, a tool answers, the model writes again.
2. The model attends to the tool's tokens and is never trained on them.
3. A turn with a reward of its own gets the outcome's advantage plus `turn_advantage_coef` times its own.

                     turn 0: tool call        tool result         turn 1: answer
    tokens           <tool>{...}</tool>       <result>..</result>  <answer>1889</answer>
    attended         1 1 1 1 1 1 1            1 1 1 1              1 1 1 1
    trained          1 1 1 1 1 1 1            0 0 0 0              1 1 1 1
    advantage        outcome + coef * turn    -                    outcome

TRL's `GRPOTrainer` optimises, and vLLM (or the model itself) generates. This file holds what lies between them: the
conversation, its tokens and its credit. The history is never rendered again, since that would train on tokens that the
policy never sampled. If an environment edits it, or continues a turn that had ended, a new record begins.

    python mt_grpo_trainer.py --config hf_recipes/tiny/calculator.yaml      # on a CPU, 2 to 3 minutes
    NUM_SERVERS=4 bash scripts/train.sh hf_recipes/Qwen/Qwen3-1.7B--gsm8k.yaml    # on 8 GPUs, of which 4 run vLLM

A step starts in section 3 (`_generate_and_score_completions`). It runs conversations by 1, and gives credit by 2:
    1. the conversation    `MultiTurnToolEnv`: sample a turn, run its calls, ask the environment, append
    2. credit              pure functions from rewards to one advantage per turn, then per token
    3. the step            `MTGRPOEnvTrainer`: roll out, score, credit; TRL's loss of rows that share prompts
    4. the server          `VLLMServerClient`: generate, chat, update_weights
    5. configuration       the two dataclasses, and how a recipe becomes a trainer
Everything else is in the package `mt_grpo/`, which never imports this file. To try another method, copy this file,
`cp mt_grpo_trainer.py my_idea.py`, and edit the copy: it imports the same package (docs/forking.md).

Notation: `B` rollouts on this rank, `N` in the whole batch, `G` per prompt, `P` prompt tokens, `C` completion tokens
(everything after the prompt, tool results included), `K` model turns. `completion_mask` = real token (attention),
`loss_mask` = sampled by the policy (loss), `turn_ids` = which turn owns a token (credit, -1 for the environment's).
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mt_grpo.rollout import Context, Generation, Message, Origin, Reply, Rollout

# The package comes first: it sets what torch and TRL read when they are imported.
# isort: split
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, ScriptArguments, get_peft_config

from mt_grpo.base.errors import RunError, ServerError
from mt_grpo.base.event_loop import gather_all, run_to_exit
from mt_grpo.base.files import output_lock
from mt_grpo.base.rows import data_of, for_trl, rows_for_trl
from mt_grpo.conversation.conversations import (
    Conversations,
    Limits,
    PromptCache,
    check_conversations,
    check_sampling_params,
    digest_of,
    limits_of,
    sampling_defaults,
    sampling_params,
)
from mt_grpo.conversation.environments import Environments, PromptTooLong, failures_end, shares_state, tools_of
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.tools.running import (
    GIVEN_UP,
    ToolsUnavailable,
    ToolTimeout,
    error_text,
    results_of,
    run_tool,
)
from mt_grpo.conversation.tools.signature import fill_in_tools, named_tools, read_call, unreadable
from mt_grpo.generation.connection import ServerConnection, hide_password
from mt_grpo.images.reader import inputs_of_rows, own_results, read_pictures, readable_messages
from mt_grpo.recipe.checks import backend_of, check_config, check_server, check_tied_lora, prepare_env, prompt_ids_of
from mt_grpo.recipe.parse import ModelKeys, ServerAndLogKeys, check_values, key, make_absolute, parse_recipe
from mt_grpo.recipe.plugins import (
    add_integrations,
    load_conversation,
    load_recipe_tools,
    load_rewards,
    load_splits,
    load_state_key,
)
from mt_grpo.reports.metrics import (
    EvaluationMetrics,
    conversation_columns,
    conversation_metrics,
    credit_metrics,
    log_rewards,
    mean_per_rollout,
    staleness_metrics,
)
from mt_grpo.reports.preflight import preflight_settings, run_preflight, run_reports
from mt_grpo.reports.rollout_log import RolloutLog
from mt_grpo.rollout import StopReason, ToolCall, ToolResult, Turn
from mt_grpo.run.trainer import ResumableTrainer, checkpoint_of_all_ranks, connect_backend, pool_of, train_or_save
from mt_grpo.training.batch import FURTHER_RECORDS, NAN, Batch, nanstd, pad_turn_ids
from mt_grpo.training.further_credit import CREDIT_ASSIGNMENTS, check_advantages, credit_estimator, log_unused, refill
from mt_grpo.training.layouts import Layout, logps_of_rows, memory_errors
from mt_grpo.training.passes import PASSES, Pass, into_passes, loss_in_passes, skips_first_pass, whole_pass
from mt_grpo.training.rewards import RewardFunctions, own_copy
from mt_grpo.training.token_checks import check_rollouts

logger = logging.getLogger(__name__)

if __name__ == "__main__":  # a plug-in that imports `mt_grpo_trainer` gets these classes, of a copy of this file too
    sys.modules["mt_grpo_trainer"] = sys.modules[__name__]

# =====================================================================================================================
# 1. The conversation: one coroutine each
# =====================================================================================================================

DEFAULT_SYSTEM_PROMPT = """\
Answer the question. You may use tools, one call per message, and you see each result before you go on.

To call a tool, think first and then write the call as JSON:
<reasoning>why this call helps</reasoning>
<tool>{{"name": "tool name", "args": {{"argument": "value"}}}}</tool>

The result comes back in <result>...</result>. When you know the answer, write:
<reasoning>how the answer follows</reasoning>
<answer>the answer, as short as possible</answer>

Tools:
{tool_descriptions}"""


class MultiTurnToolEnv(Conversations):
    """Runs conversations between a model, its tools and, optionally, an environment.

    `generate(prompts, llm, sampling_params)` returns ids, messages and masks; a trainer runs the same conversations.

    Args:
        tools: Typed functions with docstrings, synchronous or async; or objects (`tools.signature.as_tool`).
        system_prompt: The system message, in which `{tool_descriptions}` is filled in. None: no system message.
        max_steps: Observations per conversation, error messages included; the model then gets one last turn.
        tokenizer: The tokenizer whose chat template renders the prompt. None: the backend's `tokenizer`.
        max_completion_length: Tokens of the whole completion, tool results included.
        max_model_len: The model's context in tokens. None: the backend's `max_model_len`, if it has one.
        chat_template_kwargs: Arguments of the chat template, such as `{"enable_thinking": False}`.
        state_key: For `credit_assignment: gigpo`, a function of the turns so far. It names the state in which the next
            turn begins, by a string, a number or a tuple of them. It runs between a conversation's requests, so it
            must be quick. None: each history of turns is a state of its own.
        tool_format: How the model writes calls: `xml` (the paper's), `hermes` or `native`.
        environment: A class of which each conversation gets an instance (`mt_grpo.Environment`), or a dict of classes
            that the dataset's column `environment` selects from.
        prompt_examples: Conversations, or a file of them, that are inserted before the messages of each prompt.
        limits: The other fields of `Limits` by name, such as `tool_timeout`.

    Raises:
        ValueError: a tool lacks a name, type hints or a docstring, or a class is not an environment.
    """

    MAX_PARALLEL_CALLS = 8  # of one turn; calls beyond them are answered with an error
    MIN_ANSWER_TOKENS = 16  # what is appended leaves at least this much room to answer, and an eighth if it can

    def __init__(
        self,
        tools: list[Callable] = (),
        system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
        max_steps: int = 2,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_completion_length: int = 4096,
        max_model_len: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        state_key: Callable[[list[Turn]], Any] | None = None,
        tool_format: str = "xml",
        environment: type | dict[str, type] | None = None,
        prompt_examples: str | list[list[Message]] | None = None,
        **limits: Any,
    ):
        super().__init__(max_steps, max_completion_length, prompt_examples, **limits)
        self.tools = named_tools(tools)
        if tool_format != "xml" and system_prompt == DEFAULT_SYSTEM_PROMPT:
            system_prompt = None  # it teaches the xml format; in others the chat template shows the tools
        self._prompt_template = system_prompt
        self.system_prompt = system_prompt and fill_in_tools(system_prompt, self.tools)
        self.tokenizer = tokenizer
        self.max_model_len, self.context_limit = max_model_len, "max_model_len"  # what to raise, in words
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.state_key = state_key
        self.tool_format = tool_format
        self.environments = None
        if environment is not None:
            self.environments = Environments(environment, self.environment_timeout, self.tools)
        self._ends: set[int] = set()
        self._formats: dict[int, Any] = {}  # tool formats by id of the tokenizer
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    # -- the conversation, from its prompt to its end --

    def start(self, prompts: list, llm: Any = None, rows: list[dict[str, Any]] | None = None) -> list[Rollout]:
        """Open conversations, for `step` and `converse`.

        Args:
            prompts: Messages, or strings (one user message).
            llm: The backend, for its tokenizer.
            rows: Dataset rows, for environments, which get copies. Their prompts are rendered later, after `reset`.
        """
        tokenizer, rendered = self._tokenizer(llm), PromptCache()
        prompts = check_conversations(prompts, "prompts", images=True)
        prompts, shown = read_pictures(prompts, rows, tokenizer, self)
        states, previous, ids = [], None, []
        for index, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if self.environments is not None:
                messages = own_copy(messages)
            elif (digest := digest_of(messages)) is None or digest != previous:
                previous = digest
                clean = self.format_of(tokenizer).clean(messages, Origin.DATA)
                messages = self.with_system_prompt(clean, tokenizer=tokenizer)
                ids = self.prompt_ids(messages, tokenizer)
            else:  # the rollouts of a group have the same prompt
                messages = own_copy(states[-1].prompt_messages)
            row, pictures = own_copy(rows[index]) if rows else {}, list(shown[index])
            rollout = Rollout(messages, list(ids), index, row=row, rendered=rendered, pictures=pictures)
            states.append(rollout)
        return states

    def with_system_prompt(self, messages: list, tools: dict | None = None, tokenizer: Any = None) -> list[Message]:
        """Return the messages after the system prompt, unless they have their own, and after the examples."""
        if self.prompt_examples:
            messages = self.with_examples(messages, tokenizer or self.tokenizer)
        if messages and messages[0]["role"] == "system":
            return messages
        text, tools = self._prompt_template, self.tools if tools is None else tools
        text = text and fill_in_tools(text, tools, tokenizer or self.tokenizer)
        return [{"role": "system", "content": text}, *messages] if text else messages

    def prompt_ids(
        self,
        messages: list[Message],
        tokenizer: PreTrainedTokenizerBase,
        tools: dict[str, Callable] | None = None,
        rendered: PromptCache | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt, generation prompt included. Only here are messages rendered as a whole.

        Prompts that the cache `rendered` holds are not rendered again.
        """
        arguments = self.format_of(tokenizer).prompt(messages, self.tools if tools is None else tools)
        return tokenizer.apply_chat_template(**arguments) if rendered is None else rendered.ids(tokenizer, arguments)

    async def converse(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None = None) -> Rollout:
        """Run a conversation, turn after turn, until it has a stop reason."""
        while rollout.stop_reason is None:
            await self.take_turn(rollout, llm, sampling_params)
        if self.environments is not None and rollout.error is None:
            with failures_end(rollout):
                rollout.reward = await self.environments.reward(rollout)
        return rollout

    async def take_turn(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None = None) -> None:
        """Sample a turn, run its calls, ask the environment, append. An id that was sampled stays as it is."""
        with failures_end(rollout):
            if self.environments is not None and rollout.environment is None:
                await self.open(rollout, llm)
            if (turn := await self.sample_turn(rollout, llm, sampling_params)) is None:
                return
            tokenizer = self._tokenizer(llm)
            if len(rollout.turns) <= self.max_env_steps:  # behind each turn but the last there was an observation
                turn.results = await self.run_calls(rollout, turn.calls, self.format_of(tokenizer).call_format)
            if turn.results and hasattr(rollout.environment, "respond"):  # `rollout.history` ends with the results
                turn.messages = self.result_messages(turn, tokenizer)[1]
            reply = await self.ask(rollout, turn)
            turn.went_on = bool(reply.messages or reply.continuation or reply.history)
            rollout.stop_reason = self.end(rollout, turn, reply, llm)
            if rollout.stop_reason is not None:
                turn.messages = []  # nobody reads them
            elif reply.history:
                self.edit(rollout, turn, reply.history, llm)
            elif reply.continuation:
                self.continue_turn(rollout, turn, self.format_of(tokenizer).clean_text(reply.continuation), llm)
            else:
                further = self.format_of(tokenizer).clean(reply.messages or [], Origin.OUTSIDE)
                self.append(rollout, turn, further, llm)
            if turn.results and (rollout.stop_reason or turn.continuation):  # rewards see what would have been read
                turn.results, _ = self.result_messages(turn, tokenizer)

    async def open(self, rollout: Rollout, llm: Any) -> None:
        """Give a conversation its environment, and render the prompt that the model reads first."""
        tokenizer = self._tokenizer(llm)
        rollout.first_messages = await self.environments.open(rollout, self.format_of(tokenizer).clean, tokenizer)
        rollout.tools = tools_of(rollout.environment, self.tools)
        rollout.prompt_messages = self.with_system_prompt(rollout.first_messages, rollout.tools, tokenizer)
        readable = self.readable(rollout.prompt_messages, llm)
        rollout.prompt_ids = self.prompt_ids(readable, tokenizer, rollout.tools, rollout.rendered)

    async def sample_turn(self, rollout: Rollout, llm: Any, sampling_params: dict | None = None) -> Turn | None:
        """Sample the model's next turn and add it to the rollout. None, with a stop reason, if no token is left."""
        room, started = self._room(rollout, llm), time.perf_counter()
        if room.tokens <= 0:
            rollout.stop_reason = StopReason.MAX_TOKENS if room.completion <= 0 else StopReason.CONTEXT_LENGTH
            if not rollout.turns:  # no doing of the policy's: it has no reward
                rollout.error = PromptTooLong(len(rollout.prompt_ids), -room.context, self.context_limit)
            return None
        budget = min(room.tokens, self.longest_turn)
        written, history, ids, logprobs = self.format_of(self._tokenizer(llm)), rollout.history_ids, [], []
        key, generations = await self._state_key(rollout), []
        while True:
            stops = {**(sampling_params or {}), "stop": list(written.next_stops(ids, history))}
            generation = await llm.generate(history + ids, budget - len(ids), stops, rollout.index)
            ids += generation.token_ids
            generations.append(generation)
            logprobs = None if generation.logprobs is None else logprobs + generation.logprobs
            # A stop text inside the model's thinking ends the request and not the turn.
            early = written.stopped_early(ids, history)
            if generation.finish_reason == "length" or not early or len(ids) >= budget:
                break
        length, ended = written.cut(ids, history)
        reason = "stop" if ended else "length" if early else generation.finish_reason
        turn = Turn(ids[:length], logprobs and logprobs[:length], "", reason)
        tools = self.tools if rollout.tools is None else rollout.tools
        parsed = written.parse(turn.token_ids, history, tools, rollout.prefill or "")
        turn.text, turn.calls, turn.answer, turn.open_thinking = parsed
        turn.answer = None if reason == "length" else turn.answer  # what the budget cut off is no answer
        turn.context, rollout.edited = rollout.edited, None
        turn.state_key, turn.seconds, turn.generations = key, time.perf_counter() - started, generations
        rollout.turns.append(turn)
        return turn

    async def run_calls(self, rollout: Rollout, calls: list[ToolCall], call_format: str) -> list[ToolResult]:
        """Run the calls of a turn at the same time, and return their results in the order of the calls."""
        own = asyncio.Lock()  # the methods of one environment share its state, so they run one after another

        async def run(call: ToolCall) -> ToolResult:
            if call.error:
                return ToolResult(f"Error: {unreadable(call, call_format)}", "call")
            if not shares_state(call, rollout, self.tools):
                return await self.call_tool(call, rollout.tools)
            async with own:
                await self.environments.idle(rollout)
                GIVEN_UP.set(rollout.given_up)
                return await self.call_tool(call, rollout.tools)

        results = own_results(rollout, await gather_all(map(run, calls[: self.MAX_PARALLEL_CALLS])))
        rollout.abandoned |= any(result.error == "timeout" for result in results)
        text = f"Error: not run, since a turn may have at most {self.MAX_PARALLEL_CALLS} calls. Call it again."
        return results + [ToolResult(text, "call") for _ in calls[self.MAX_PARALLEL_CALLS :]]

    async def call_tool(self, call: ToolCall, tools: dict[str, Callable] | None = None) -> ToolResult:
        """Run one call. A mistake of the policy or a failure of the tool becomes text that the model reads.

        Raises:
            ToolsUnavailable: the machine cannot run tools.
        """
        tools = self.tools if tools is None else tools
        arguments, mistake = read_call(call, tools)
        if mistake:
            return ToolResult(f"Error: {mistake}", "call")
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrent_tools))
        async with slots:
            started = time.perf_counter()  # a call's time limit starts when it runs, not when it queues
            try:
                result = await run_tool(tools[call.name], arguments, self.tool_timeout, results_of(self))
            except ToolsUnavailable:  # the trainer's fault, and not for the policy to read
                raise
            except ToolTimeout as raised:
                result = ToolResult(f"Error: {raised}", "timeout")
            except Exception as raised:  # any failure of a tool is an observation, never the end of a run
                result = ToolResult(f"Error: {error_text(raised)}", "tool")
            return dataclasses.replace(result, seconds=time.perf_counter() - started)

    async def ask(self, rollout: Rollout, turn: Turn) -> Reply:
        """Ask the environment for its reply to a turn. The reply is empty if there is nothing to add."""
        if self.environments is None:
            return Reply()
        reply = await self.environments.respond(rollout, turn)
        turn.reward, turn.info = reply.reward, own_copy(dict(reply.info or {}))  # as it is now
        return reply

    def end(self, rollout: Rollout, turn: Turn, reply: Reply, llm: Any) -> StopReason | None:
        """Return why the conversation ends with this turn, None if it goes on. FORK: change here when it ends.

        What a turn is followed by, the first line that fits:

            an answer, and nothing replied       ANSWERED
            the environment says stop            ENVIRONMENT_STOP
            no call, nothing replied, cut off    CONTEXT_LENGTH if that is spent, else MAX_TOKENS
            no call, nothing replied             NO_TOOL_CALL
            its observations are spent           MAX_TURNS
            else results, and what was replied   the conversation goes on
        """
        replied = bool(reply.messages or reply.continuation or reply.history)
        if turn.answer is not None and not replied:
            return StopReason.ANSWERED
        if reply.stop:
            return StopReason.ENVIRONMENT_STOP
        if not turn.calls and not replied and turn.finish_reason == "length":
            full = self._room(rollout, llm).context <= 0
            return StopReason.CONTEXT_LENGTH if full else StopReason.MAX_TOKENS
        if not turn.calls and not replied:
            return StopReason.NO_TOOL_CALL
        return StopReason.MAX_TURNS if len(rollout.turns) > self.max_env_steps else None

    def append(self, rollout: Rollout, turn: Turn, further: list[Message], llm: Any) -> None:
        """Append results and further messages. Results are truncated so that an answer fits; if none fits, stop.

        INVARIANT: what was sampled is never rendered or tokenized again. Ids are only appended to it.
        """
        room, written = self._room(rollout, llm), self.format_of(self._tokenizer(llm))
        eighth = min(self.max_completion_length, self._context(llm) - len(rollout.prompt_ids)) // 8
        for reserve in (eighth, room.tokens // 2, 0):  # for the answer: an eighth, half of the rest, or the minimum
            most = room.tokens - max(reserve, self.MIN_ANSWER_TOKENS)
            if fitted := written.fit(turn, further, most, self.result_limit):
                turn.results, turn.messages, turn.observation_ids = fitted
                return
        turn.messages, rollout.stop_reason = [], room.reason

    def continue_turn(self, rollout: Rollout, turn: Turn, text: str, llm: Any) -> None:
        """Append a text to a turn, from which the model continues. A sampled end of turn is left out of the context.

        If no answer fits after the text, the conversation ends.
        """
        written, room = self.format_of(self._tokenizer(llm)), self._room(rollout, llm)
        ids = written.text_ids(text, room.tokens)
        if len(ids) > room.tokens - self.MIN_ANSWER_TOKENS:
            turn.messages, rollout.stop_reason = [], room.reason
            return
        turn.continuation, turn.messages = text, []
        if turn.token_ids and turn.token_ids[-1] in written.ends:
            rollout.edited = Context(rollout.history, rollout.history_ids[:-1] + ids, len(ids))
        else:
            turn.observation_ids = ids

    def edit(self, rollout: Rollout, turn: Turn, history: list[Message], llm: Any) -> None:
        """Let the model read another history from its next turn on, with which a new record begins."""
        tokenizer, read = self._tokenizer(llm), rollout.history  # the messages in it stay, others are cleaned
        clean = self.format_of(tokenizer).clean
        history = [m if m in read else clean([m], Origin.OUTSIDE)[0] for m in history]
        turn.results, turn.messages = self.result_messages(turn, tokenizer)  # for rewards and the log
        rollout.edited = Context(history, self.prompt_ids(self.readable(history, llm), tokenizer, rollout.tools))

    def result_messages(self, turn: Turn, tokenizer: PreTrainedTokenizerBase) -> tuple[list[ToolResult], list]:
        """Return a turn's results, each truncated to `result_limit`, and the messages with them."""
        return self.format_of(tokenizer).fit(turn, [], float("inf"), self.result_limit)[:2]


# =====================================================================================================================
# 2. Credit assignment
#
# Pure functions on the whole batch, groups of G consecutive rollouts. NaN means "has no value" and is left out of
# every statistic. R^O is a rollout's weighted outcome reward, r_k that of turn k, R^T the sum of its turn rewards,
# c the turn_advantage_coef, gamma the turn_discount, and G_k = sum_{l >= k} gamma^(l-k) r_l the return to go:
#
#   outcome      norm(R^O)                           GRPO, outcome rewards only (GRPO-OR in arXiv 2505.11821)
#   merged       norm(R^O + R^T)                     one advantage from the sum of everything (GRPO-MR)
#   mt_grpo      norm(R^O) + c * norm(r_k)           turns that were given a number (eq. 5 of the paper)
#                norm(R^O)                           the other turns of such a rollout
#                norm(R^O + c * R^T)                 rollouts without any observation
#   turn_return  norm(R^O) + c * norm(G_k)           over the rollouts of the group that sampled turn k
#   gigpo        norm(R^O) + c * norm(G_k)           over the turns of the group in the same state (arXiv 2505.10978)
#   zero_sum     norm(R^O) + c * (r_k - mean_l r_l)  shaping inside a rollout; turns without a reward: norm(R^O)
#   progress_credit  norm(R^O) + c * (turn k's share of the progress of scores, less its mean over tokens)
#
# With outcome_in_return R^O counts in G_k as well, as the reward of the rollout's last turn (turn_return, gigpo).
#
# A turn reward that is one number per rollout (the paper's form) is compared over the whole group, and its term goes
# to the turns up to and including the first that got an observation; a rollout without any has it on all its turns.
#
# INVARIANT: a baseline of turn k may depend on what happened before turn k's own decision, never on how the rollout
# ended. So G_k comes first, then its mean over all rollouts that reached turn k. Normalising r_k per turn index and
# then adding up subtracts more from a longer rollout: it teaches when to stop, whatever the rewards say. mt_grpo
# compares callers with callers, as in the paper: it keeps this rule only where turn rewards do not depend on calling.
# Scaling sets the exchange rate between the two terms: with `group` or `batch` an outcome that varies much and a turn
# reward that varies little weigh the same. Only `none` maximises the sum of the rewards.
# INVARIANT: rewards are gathered over all ranks before any of this, because a group may straddle ranks.
# FORK: change credit here. A new estimator is one function and one call that registers it; nothing else names it.
# =====================================================================================================================


def norm(x: torch.Tensor, group_size: int, scale_rewards: str = "group") -> torch.Tensor:
    """The group-relative value `(x - mean_G x) / (std_G x + 1e-4)` of GRPO (arXiv 2402.03300, TRL's constant).

    Args:
        x: (N,) or (N, K), NaN where a rollout has no value; with K columns, each column of a group is one set.
        group_size: G; rows [iG, (i+1)G) are one prompt's.
        scale_rewards: divide by the standard deviation of the `group`, of all centred values in the `batch`, by the
            set's mean (`mean`: MaxRL, arXiv 2602.02710), or by 1 (`none`). The group's own standard deviation biases
            choices between rewards of equal mean and unequal variance.

    Returns:
        Same shape; 0 where x is NaN, where a set has fewer than two values, and where its values are all equal, to
        a millionth of the largest. Raises `RunError` for a negative value with `mean`.

    >>> norm(torch.tensor([1., 0., 1., 0.]), 4, "none")
    tensor([ 0.5000, -0.5000,  0.5000, -0.5000])
    >>> norm(torch.tensor([1., 0., NAN, 5., 5., NAN]), 3)  # the second group has no spread
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    groups = x.view(-1, group_size, *x.shape[1:])  # (N/G, G, ...)
    centred = groups - groups.nanmean(1, keepdim=True)
    low = groups.nan_to_num(float("inf")).amin(1, keepdim=True)
    high = groups.nan_to_num(float("-inf")).amax(1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (nanstd(groups, 1) + 1e-4)
    elif scale_rewards == "batch":
        compared = centred.where((~groups.isnan()).sum(1, keepdim=True) > 1, NAN)  # a single value has no spread
        centred = centred / (nanstd(compared, tuple(range(centred.dim()))) + 1e-4)
    elif scale_rewards == "mean":
        if (x < 0).any():
            raise RunError(f"scale_rewards: mean, got a reward of {x[x < 0].min():g}. Expected none below 0.")
        centred = centred / groups.nanmean(1, keepdim=True)
    # Equal values must give exactly 0, not a rounding error divided by 1e-4, such as of sums in another order.
    differ = high - low > 1e-6 * torch.maximum(high.abs(), low.abs())
    return torch.where(differ, centred, 0.0).nan_to_num(0.0).view(x.shape)


@dataclass
class RewardTable:
    """The weighted rewards of a whole batch of rollouts, with NaN where a function gave None."""

    outcome: torch.Tensor  # (N,) R^O
    rollout_turn: torch.Tensor  # (N,) turn rewards given as one number per rollout
    turn: torch.Tensor  # (N, K) turn rewards given per turn
    has_observation: torch.Tensor  # (N, K) bool: `Turn.has_observation`
    sampled: torch.Tensor  # (N, K) bool: the rollout has this turn
    state: torch.Tensor  # (N, K) int64: equal where two turns of a group began in the same state
    num_tokens: torch.Tensor | None = None  # (N, K) int64: the turn's trained tokens; None: 1 per turn
    group_size: int = 0  # G; `turn_advantages` sets it, and the recipe's settings below
    scale_rewards: str = "group"
    outcome_in_return: bool = False
    state_baseline: str = "mean"

    def __post_init__(self):
        if self.num_tokens is None:
            self.num_tokens = self.sampled.long()

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """The group-relative value of x, (N,) or (N, K), with this table's groups and scaling (see `norm`)."""
        return norm(x, self.group_size, self.scale_rewards)

    @property
    def turn_total(self) -> torch.Tensor:
        """R^T, (N,): 0 where a rollout has no turn reward."""
        return self.rollout_turn.nan_to_num(0.0) + self.turn.double().nansum(1).to(self.turn.dtype)

    def returns_to_go(self, discount: float) -> torch.Tensor:
        """G_k = r_k + discount * G_{k+1}, (N, K): None counts as 0; NaN where there is no turn k.

        With `outcome_in_return` the rollout's last turn has R^O as a reward, too.
        """
        rewards = self.turn.double().nan_to_num(0.0)  # so that equal returns in another order are equal
        to_go = torch.zeros_like(rewards)
        if self.outcome_in_return:
            last = self.sampled & (self.sampled.int().cumsum(1) == self.sampled.sum(1, keepdim=True))
            rewards = rewards + torch.where(last, self.outcome[:, None], 0.0)
        for k in reversed(range(to_go.shape[1])):
            to_go[:, k] = rewards[:, k] + (discount * to_go[:, k + 1] if k + 1 < to_go.shape[1] else 0.0)
        return to_go.to(self.turn.dtype).where(self.sampled, NAN)

    def rollout_turn_advantages(self) -> torch.Tensor:
        """(N, K): `norm` of the per-rollout turn rewards, on the turns with no observation before them."""
        up_to_first = self.has_observation.int().cumsum(1) - self.has_observation.int() == 0
        return self.norm(self.rollout_turn)[:, None] * up_to_first


def doctest_batch() -> RewardTable:
    """The batch of the doctests: rollout A calls twice (0.2, 0.6) and answers right; B calls once (0.4) and is wrong.

    Both begin in state 0; after their first calls they stand in the same state 1, A after its second in state 2.
    """
    return RewardTable(
        outcome=torch.tensor([1.0, 0.0]),
        rollout_turn=torch.full((2,), NAN),
        turn=torch.tensor([[0.2, 0.6, NAN], [0.4, NAN, NAN]]),
        has_observation=torch.tensor([[True, True, False], [True, False, False]]),
        sampled=torch.tensor([[True, True, True], [True, True, False]]),
        state=torch.tensor([[0, 1, 2], [0, 1, -1]]),
        num_tokens=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        group_size=2,
        scale_rewards="none",
    )


def mt_grpo_advantages(rewards: RewardTable, coef: float, discount: float) -> torch.Tensor:
    """MT-GRPO (arXiv 2505.11821): the outcome's advantage, plus a turn's own where it was given a number.

    A turn's number is compared with those of the same turn in the group, and with nothing later: it says which call is
    better, not whether to call again. None is no number. A number that is alone at its turn moves nothing. A rollout
    without any observation, that never called a tool, gets `norm(R^O + c R^T)`, as in the paper's code at c = 1. So
    where only calls are paid, a call's own worth is credited in part, by the share of the group that calls. In the
    example turn 0 is 0.2 against 0.4; in turn 1 A's call is alone.

    >>> mt_grpo_advantages(doctest_batch(), 1.0, 1.0)
    tensor([[ 0.4000,  0.5000,  0.5000],
            [-0.4000, -0.5000, -0.5000]])
    """
    outcome = rewards.norm(rewards.outcome)[:, None]  # (N, 1)
    per_turn = rewards.norm(rewards.turn)  # (N, K), of the rollouts with a number at turn k
    per_rollout = rewards.rollout_turn_advantages()
    no_call = rewards.norm(rewards.outcome + coef * rewards.turn_total)[:, None]
    any_observation = rewards.has_observation.any(1, keepdim=True)
    return torch.where(any_observation, outcome + coef * (per_turn + per_rollout), no_call)


credit_estimator("mt_grpo", mt_grpo_advantages, reads=("turn_advantage_coef",))
# All others are in mt_grpo/training/further_credit.py.


def turn_advantages(
    rewards: RewardTable,
    credit_assignment: str,
    group_size: int,
    coef: float,
    scale_rewards: str,
    discount: float = 1.0,
    **settings: Any,
) -> torch.Tensor:
    """Advantage of every turn, (N, K). A rollout without an outcome (R^O is NaN) gets 0 on every turn.

    `settings`: `outcome_in_return` and `state_baseline` of the table.
    """
    missing = rewards.outcome.isnan()[:, None]  # (N, 1): not trained on, so in nobody's baseline
    rewards = dataclasses.replace(
        rewards,
        rollout_turn=rewards.rollout_turn.where(~missing[:, 0], NAN),
        turn=rewards.turn.where(~missing, NAN),
        sampled=rewards.sampled & ~missing,
        group_size=group_size,
        scale_rewards=scale_rewards,
        **settings,
    )
    advantages = CREDIT_ASSIGNMENTS[credit_assignment](rewards, coef, discount)
    return torch.where(missing, 0.0, advantages[:, :])  # of shape (N,) it would become (N, N)


def token_advantages(advantages: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """Spread turn advantages (B, K) over tokens: (B, C), 0 where `turn_ids` (B, C) is -1 (environment, padding).

    >>> token_advantages(torch.tensor([[5., 7.]]), torch.tensor([[0, 0, -1, 1, -1]]))
    tensor([[5., 5., 0., 7., 0.]])
    """
    return torch.where(turn_ids >= 0, advantages.gather(1, turn_ids.clamp(min=0)), 0.0)


def clipped_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    importance_ratio: torch.Tensor | float = 1.0,
    epsilon: float = 0.2,
) -> torch.Tensor:
    """The loss, written out to be read. TRL's loss runs, which by default (`loss_type: dapo`) is this one, as below.

    tests/method/test_loss.py shows that both have the same gradient, too.

    Args:
        logps, old_logps: (M, C) of the policy now, and of the policy before the step (or as sampled).
        advantages: (M, C), one per token.
        loss_mask: (M, C), 1 where the policy sampled the token. The mean is over these tokens of the whole batch.
        importance_ratio: (M, C), the policy before the step over the one that sampled (with `old_logps: sampled` 1, or
            0 where it is masked).
        epsilon: How far the ratio may move before a token stops teaching (PPO, arXiv 1707.06347, equation 7).

    >>> from unittest.mock import MagicMock
    >>> from trl import GRPOTrainer
    >>> old, new = torch.log(torch.tensor([[0.5, 0.5, 0.5]])), torch.log(torch.tensor([[0.5, 0.75, 0.25]]))
    >>> clipped_loss(new, old, torch.tensor([[1.0, 1.0, -1.0]]), torch.tensor([[1, 1, 1]]))  # -(1 + 1.2 - 0.8) / 3
    tensor(-0.4667)
    >>> trl = MagicMock(loss_type="dapo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, beta=0,
    ...     top_entropy_quantile=1, off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
    ...     aux_loss_enabled=False, current_gradient_accumulation_steps=1, **{"accelerator.num_processes": 1,
    ...     "_get_per_token_logps_and_entropies.return_value": (new, new, None), "args.steps_per_generation": 1,
    ...     "args.delta": None, "accelerator.gather": lambda values: values})
    >>> batch = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), torch.ones(1, 3))
    >>> batch |= {"old_per_token_logps": old, "num_items_in_batch": torch.tensor(3)}
    >>> GRPOTrainer._compute_loss(trl, None, batch | {"advantages": torch.tensor([[1.0, 1.0, -1.0]])})
    tensor(-0.4667)
    """
    ratio = torch.exp(logps - old_logps)  # 1 before the first optimizer step, with `old_logps: policy`
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages) * importance_ratio
    return (per_token * loss_mask).sum() / loss_mask.sum()


# =====================================================================================================================
# 3. The step
#
# TRL's training step calls, in this order:
#   _generate_and_score_completions   rows in, a batch for the loss out: `_roll_out` (conversations), `_score` (reward
#                                     functions -> `RewardTable`), `_before_credit`; then TRL's, which asks for
#     _generate                       ids, masks, logprobs of the conversations
#     _calculate_rewards              rewards for its logs; behind it `turn_advantages`, `token_advantages`
#   compute_loss                      TRL's loss of these tokens, `clipped_loss` above, as a sum over passes, in which
#                                     each prompt stands once, its completions behind it (`_prepare_inputs`)
# =====================================================================================================================


class MTGRPOEnvTrainer(ResumableTrainer):
    """`GRPOTrainer` whose completions are conversations and whose advantages are per turn.

    Args:
        model: Name or path of a model, or the model itself.
        env: Runs the conversations. A limit that only `env` or only `args` was given holds for both; one that is equal
            to its default counts as not given.
        turn_reward_funcs, outcome_reward_funcs: TRL reward functions. They get `prompts`, `completions` (messages),
            `completion_ids`, `rollout_turns` (list of `Turn` per rollout), `environments` (instances or None), the
            data's columns, `trainer_state`, `log_extra`, `log_metric`. A turn function returns per rollout a number,
            None, or a list of these per turn; an outcome function a number or None. They may be async.
        turn_reward_weights, outcome_reward_weights: One weight per function. None: those of `args`, else 1 each.
        turn_advantage_coef: Weight of a turn's own advantage. None: that of `args`.
        vllm_server_host, vllm_server_port: The server's address. None: that of `args`.
        train_dataset, eval_dataset: Rows with `prompt` (messages), or with `question` and `answer`; a `Dataset` or a
            list of dicts. None: an environment brings the prompts.

    All other arguments are those of `GRPOTrainer`. Raises `ValueError` or `ServerError` before weights are loaded.
    """

    _tag_names, _name = ["trl", "grpo", "mt-grpo"], "MT-GRPO"  # of the model card
    _paper = {
        "title": "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment",
        "id": "2505.11821",
        "citation": "@article{zeng2025, author={Siliang Zeng and others}, journal={arXiv:2505.11821}, year={2025}, "
        "title={Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment}}",
    }

    # -- 3.1 what TRL calls: rollouts in, a batch for its loss out --

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Conversations and their rewards, then TRL's step on them, with its advantages replaced by one per token.

        Args:
            inputs: B dataset rows, each prompt G times in a row over all ranks.
        """
        inputs = self.in_flight.rows_of_step(inputs)
        first = self.accelerator.process_index * len(inputs)
        self.batch = batch = Batch(inputs, self._group_size, first, self._mode, data_of(self))
        correction, skips = self.vllm_importance_sampling_correction, skips_first_pass(self)
        try:
            batch.rollouts = self._roll_out(batch.rows)
            self._score(batch)
            self._before_credit(batch)
            # This makes TRL compute the old logprobs. If they are skipped, the loss computes them in its own pass.
            self.vllm_importance_sampling_correction = correction and not skips
            output = super()._generate_and_score_completions(rows_for_trl(batch.rows))
        finally:
            self.env.close(batch.rollouts)
            batch.loss_masks, self.vllm_importance_sampling_correction = None, correction
        advantages = self._advantages(batch.rewards, self.args.scale_rewards)  # (N, K)
        check_advantages(batch.rewards, advantages, self.state.global_step, self.turn_advantage_coef)
        turn_ids = pad_turn_ids(batch.records, output["completion_ids"].shape[1])  # (M, C), C as TRL padded it
        token_level = token_advantages(batch.own(advantages)[batch.owners], turn_ids)
        output["advantages"] = token_level.to(output["completion_ids"].device)  # (M, C)
        output["turn_ids"] = turn_ids.to(output["completion_ids"].device)  # for metrics by turn
        output |= batch.pass_inputs(self.loss_type == "sapo", self.accelerator)
        self._log_step(output, advantages)
        if "importance_sampling_ratio" in output:
            self.layout.metrics.set_ratio(output, output["old_per_token_logps"], self)
        return batch.per_rollout(output)

    def _advantages(self, rewards: RewardTable, scale_rewards: str) -> torch.Tensor:
        """Advantages of a table by the run's estimator, (N, K)."""
        args, groups = self.args, (self._group_size, self.turn_advantage_coef, scale_rewards, self.args.turn_discount)
        settings = {"outcome_in_return": args.outcome_in_return, "state_baseline": args.state_baseline}
        return turn_advantages(rewards, args.credit_assignment, *groups, **settings)

    def _generate(self, prompts: list) -> tuple:
        """TRL's generation step: the batch's conversations in place of single completions.

        Ids, masks and logprobs are of M rows: the first record of each of B rollouts, then the further ones. TRL sums
        the tokens of all rows, and takes the number of rollouts from the prompts.
        """
        batch = self.batch
        batch.facts = conversation_columns(batch.rollouts)  # (N, 14)
        sampled = batch.dropped + batch.rollouts  # the metrics are of all of them
        facts = conversation_columns(sampled) if batch.num_rounds else batch.facts
        metrics, num_tokens = conversation_metrics(facts)
        metrics |= check_rollouts(sampled, self.env, self.args)
        self._log_metrics(metrics)
        own = self._metrics[self._mode], self._stale[self._mode]
        staleness_metrics(batch.rollouts, self._weight_counter.version, *own)
        if self.model.training:
            self.state.num_input_tokens_seen += num_tokens
        self._metrics[self._mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        prompt_ids, completion_ids, loss_masks, logprobs = batch.loss_lists(self._tokenizer.pad_token_id)
        batch.loss_masks = loss_masks = batch.zeros_where_untrained(loss_masks, self.args)
        return (
            prompt_ids,
            completion_ids,
            loss_masks,  # TRL's `tool_mask`: ids of observations have 0, are attended to, and are not in its loss
            [[{k: m[k] for k in ("role", "content")} for m in readable_messages(r.messages)] for r in batch.rollouts],
            logprobs,
            {}, None, [],  # columns for rewards, images, images of tools
        )  # fmt: skip

    # -- 3.2 the loss: TRL's, in passes of our own --

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's, which rolls out where it is time to. Then the rows of an optimizer step are put into passes.

        Where prompts are shared, the rows of a pass are laid out as one: a prompt, and behind it its completions,
        which read it and themselves (`SharedRow`). So a prompt is computed once for its group. A pass has at most
        `max_tokens_per_pass` tokens, or a single longer row. The gradient is the sum over passes.
        """
        if isinstance(generation_batch, Pass):
            return generation_batch
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return self.layout.in_passes([inputs])[0]
        if self._buffered_inputs is not buffered:
            self._buffered_inputs = self.layout.in_passes(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's. Where a pass does not fit into memory, the error says what makes it smaller."""
        with memory_errors(self):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch=None):
        """TRL's loss of a pass; of a micro-batch the sum over its passes. FORK: another loss (docs/forking.md)."""
        if FURTHER_RECORDS in inputs:  # in TRL's layout
            inputs = into_passes(self, [inputs])[0]
        if PASSES in inputs:
            return loss_in_passes(self, model, inputs, num_items_in_batch)
        inputs = inputs if isinstance(inputs, Pass) else whole_pass(self, inputs)
        with self.layout.of(inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's, from rows that share prompts: logprobs and entropies (M, C), there 0 where nobody trains.

        Args:
            input_ids, attention_mask: (M, P + C), as TRL pads them.
            logits_to_keep: C.
        """
        if self._dist.is_fsdp and isinstance(head := model.get_output_embeddings(), FSDPModule):
            head.unshard()  # TRL reads its weight and does not call it: each rank would keep its own gradient
        if rows := self.layout.shared_rows(input_ids, attention_mask, logits_to_keep, batch_size, kwargs):
            found = logps_of_rows(model, rows, compute_entropy, self.accelerator)
        else:
            of_part, parts = super()._get_per_token_logps_and_entropies, []
            for each in zip(*(of.split(batch_size or len(of)) for of in (input_ids, attention_mask))):
                ids, own = inputs_of_rows(each[0])  # a part of the rows has its own images, or none
                parts.append(of_part(model, ids, each[1], logits_to_keep, None, compute_entropy, **{**kwargs, **own}))
            found = [of[0] if len(of) == 1 or of[0] is None else torch.cat(of) for of in zip(*parts)]
        self.layout.note_logps(found)  # sets the old logprobs and the ratio, which TRL reads after this call
        return found

    # -- 3.3 roll out --

    def _roll_out(self, rows: list[dict[str, Any]]) -> list[Rollout]:
        """All conversations of this rank, each one from weights that are proven: those of its start, or later ones.

        Collective: what failed on one rank raises the same message on all. A server that restarted holds its first
        weights: what is missing is rolled out again by the other servers. If there is none, all ranks push again.
        """
        rollouts, metrics = self.in_flight.complete(rows)
        self._log_metrics(metrics)
        self.in_flight.start_next()
        return rollouts

    # -- 3.4 rewards --

    def _score(self, batch: Batch, fresh: torch.Tensor | None = None) -> None:
        """Choose the records that are trained, run each reward function, and fill in the batch's rewards. Collective.

        Args:
            batch: With its rollouts.
            fresh: (N,) bool, the rollouts to score; others keep their values. None: all.
        """
        batch.choose_records(self.args, self.state.global_step)
        batch.scores = self.reward_functions.score_all_ranks(self, batch, fresh)
        batch.rewards = RewardTable(**batch.scores.weighted(self.reward_weights.cpu()))
        batch.rewards.outcome = batch.rewards.outcome.masked_fill(torch.tensor(batch.failed), NAN)
        batch.logged = batch.scores.logged().to(self.accelerator.device)

    def _before_credit(self, batch: Batch) -> None:
        """Between rewards and credit: may change the table `batch.rewards`, or the rollouts. Collective.

        Here groups without signal give way to others (`refill_groups`). FORK: a penalty per turn, other groups to
        sample again, what a turn is worth to another model. All ranks have the same table.
        """
        if self.args.refill_groups and self.model.training:
            refill(self, batch, self._without_signal)

    def _without_signal(self, batch: Batch) -> torch.Tensor:
        """Whether a group would train no token, (N/G,) bool."""
        advantages = self._advantages(batch.rewards, self.args.scale_rewards)
        moves = (advantages.abs() > 1e-8) & batch.trained_turns(self.args)
        return ~moves.view(-1, batch.group_size * moves.shape[1]).any(1)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """Return the rewards that `_score` computed, (N, F), for TRL's logs."""
        batch = self.batch
        for column, values in batch.extra.items():
            self._log_completion_extra(column, values)
        if self.model.training:
            log_unused(self, batch)
        return batch.logged.masked_fill(batch.reward.isnan()[:, None].to(batch.logged.device), NAN)

    # -- 3.5 logging --

    def _log_step(self, output: dict[str, Any], advantages: torch.Tensor) -> None:
        """Metrics of the credit, the rollout log, and TRL's table of completions."""
        batch, metrics = self.batch, self._metrics[self._mode]
        self._log_metrics(credit_metrics(output, batch, self.accelerator))
        log_rewards(metrics, batch, self.reward_func_names)
        if not self.model.training:
            loader = self.accelerator.gradient_state.active_dataloader  # None where this is called by itself
            total = len(loader.dataset) * batch.group_size if loader is not None else None
            self._evaluation.add(metrics, batch, total)
        outcome = norm(batch.rewards.outcome, batch.group_size, self.args.scale_rewards)  # (N,), of the outcome alone
        self._rollout_log.add(batch, output, advantages, outcome, self.state.global_step)
        mean_advantages = mean_per_rollout(output, batch)  # (B,)
        logged = self._logs["advantages"]  # TRL's table of completions: what is trained on, not TRL's own advantage
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(self.accelerator.gather(mean_advantages).tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log`. The metrics of an evaluation are means over its rollouts, and not of the means of batches."""
        if not self.model.training:
            self._evaluation.finish(self._metrics["eval"], self.reward_func_names)
        elif "loss" in logs:  # of a step: all ranks log it, and what a callback logs may be of one
            logs |= self.layout.metrics.depth.metrics(self.accelerator)
            self.layout.metrics.depth.clear()
        super().log(logs, start_time)

    # -- 3.6 set-up --

    def __init__(
        self,
        model: Any,
        env: MultiTurnToolEnv,
        turn_reward_funcs: list[Callable] | None = None,
        outcome_reward_funcs: list[Callable] | None = None,
        turn_reward_weights: list[float] | None = None,
        outcome_reward_weights: list[float] | None = None,
        turn_advantage_coef: float | None = None,
        vllm_server_host: str | None = None,
        vllm_server_port: int | None = None,
        args: MTGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
        peft_config: Any = None,
    ):
        args = args or MTGRPOConfig("mt-grpo-output")
        if not isinstance(args, MTGRPOConfig) or not isinstance(env, MultiTurnToolEnv):
            got = f"{type(env).__name__} and {type(args).__name__}"
            raise TypeError(f"env and args are {got}, expected a MultiTurnToolEnv and an MTGRPOConfig.")
        given = turn_reward_weights or args.turn_reward_weights, outcome_reward_weights or args.outcome_reward_weights
        self.reward_functions = RewardFunctions.of(turn_reward_funcs, outcome_reward_funcs, env, *given)
        train_dataset, eval_dataset, tokenizer, model_config = prepare_env(
            env, args, self.reward_functions, model, train_dataset, eval_dataset, processing_class, peft_config
        )
        self.env, self.backend = env, backend_of(args)
        self.turn_advantage_coef = args.turn_advantage_coef if turn_advantage_coef is None else turn_advantage_coef
        self._reads_state = "state" in CREDIT_ASSIGNMENTS[args.credit_assignment].reads
        self.batch: Batch | None = None  # the one that the step is at, or was at last
        self._evaluation = EvaluationMetrics()
        self._stale: dict[str, Counter[int]] = {"train": Counter(), "eval": Counter()}  # for `staleness_metrics`
        if self.backend == "server":
            self.client = pool_of(args, VLLMServerClient, tokenizer, vllm_server_host, vllm_server_port)
            check_server(self.client, env, model_config, args)

        # TRL would connect its own client and its own NCCL group; the server is ours (see `_sync_weights`).
        args.use_vllm = self.backend == "colocate"
        super().__init__(
            model=model,
            reward_funcs=self.reward_functions.functions,
            args=args,
            train_dataset=for_trl(train_dataset),
            eval_dataset=for_trl(eval_dataset),
            processing_class=tokenizer,
            optimizers=optimizers,
            peft_config=peft_config,
            callbacks=[*run_reports(self), *(callbacks or [])],
        )
        check_tied_lora(self.model)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        # Where vLLM samples, this turns on TRL's importance ratio: the policy before the step over what vLLM had.
        args.use_vllm = self.use_vllm = self.backend != "transformers"
        self.reward_weights = torch.tensor(self.reward_functions.weights, dtype=torch.float32)
        self.layout = Layout(self, MTGRPOEnvTrainer)
        self._rollout_log = RolloutLog(self)
        self.scale_rewards = "none" if args.scale_rewards == "mean" else args.scale_rewards  # TRL knows no `mean`
        # TRL's own check would mask rollouts that end with </answer>: their last id is no end of turn.
        self.mask_truncated_completions = False
        # A base model's own end token need not be the one that ends a turn in its chat template.
        env.add_ends(self.eos_token_ids)
        self.eos_token_ids = env.end_of_turn_ids(tokenizer)
        self._sampling_params = {"stop_token_ids": list(self.eos_token_ids), **sampling_params(args)}
        self.llm = connect_backend(self, lambda: prompt_ids_of(env, train_dataset[0]))


# =====================================================================================================================
# 4. The server
# =====================================================================================================================


class VLLMServerClient(ServerConnection):
    """Client of a vLLM or SGLang server: sends token ids, gets sampled ids with logprobs, and pushes weights.

    Args:
        host, port: Where the server listens. 0.0.0.0, TRL's default, is reached as 127.0.0.1.
        tokenizer: Needed by `chat` and by `MultiTurnToolEnv`, not by `generate`.
        base_url: URL instead of host and port, for example with TLS. A user and password in it are never logged.
        api_key: The server's `--api-key`, if it has one; default: the environment's VLLM_API_KEY.
        timeout: Seconds to wait for the server to come up, or to come back, before `ServerError`.
        request_timeout: Seconds that one request may take; then it is sent again, if `timeout` leaves room.
        transport: `disk`, `nccl`, `adapter` (for a LoRA) or `auto` (nccl if this process and the server have CUDA).
        sync_dir: Shared directory of the disk transport. None: /dev/shm, else the temporary directory.
        group_port: Port of the NCCL weight group.
        engine: `vllm` or `sglang`.

    Raises `ServerError` for an address that can never work.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 240.0,
        request_timeout: float = 600.0,
        transport: str = "auto",
        sync_dir: str | None = None,
        group_port: int = 51216,
        engine: str = "vllm",
    ):
        host = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if host.count(":") > 1 and "[" not in host else host
        if not base_url and "/" in host:  # a URL, whose scheme would be taken for the name
            raise ServerError(f"vllm_server_host={hide_password(host)!r}: expected a name. Use vllm_server_base_url.")
        url = base_url or f"http://{host}:{port}"
        super().__init__(url, api_key, timeout, request_timeout, engine, transport, sync_dir, group_port)
        self.tokenizer = tokenizer
        atexit.register(self.close)

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        """Sample one continuation of `prompt_ids`, with logprobs of the distribution that was sampled from.

        Raises:
            ServerError: no answer within the time limits, or an answer whose ids and logprobs do not match.
            ValueError: an unknown sampling parameter.
        """
        check_sampling_params(sampling_params)
        payload = {
            **sampling_defaults(), "stop": list(TOOL_FORMATS["xml"].stops), "include_stop_str_in_output": True,
            **self.salt(), "presence_penalty": 0.0, "frequency_penalty": 0.0,  # else the server's own defaults hold
            **(sampling_params or {}), "model": self.adapter or self.model_card["id"], "prompt": prompt_ids,
            "max_tokens": max_tokens, "n": 1, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False
        }  # fmt: skip
        return await self.sample(payload, self.vocab_size)

    def update_weights(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> dict[str, float]:
        """Push all weights, drop the prefix cache and record `version`. The server is paused meanwhile.

        Args:
            named_weights: (name, tensor) under the names of a checkpoint, tied copies included. Always exhausted, so
                that what the iterator changed in the model (a merged adapter) is undone.
            version: Comes back from `weight_version()`; proves later that the server did not restart.
            expected: Name -> bytes of those that must come. Missing ones are an error before the server is touched.
            device: This process's accelerator, for NCCL.

        Returns:
            Seconds by phase: `gather` (to the CPU), with disk `write` (the file), `load` (pause to resume).

        Raises:
            ServerError: if raised before the load, the server still has its old weights; if raised in the load,
                its version is `loading-<version>`, which nobody expects.
            ServerLost: the server went away meanwhile; it can be pushed to again once it is back.
        """
        transfers = [self.transfer]
        seconds, (error,) = self.transfer.push(named_weights, version, expected, torch.device(device), transfers)
        if error is not None:
            raise error
        return seconds

    def close(self) -> None:
        """Close the connections and remove the folder of the weights. A later call opens new ones."""
        atexit.unregister(self.close)
        super().close()
        self.transfer.close()


# =====================================================================================================================
# 5. Configuration: from a recipe to a trainer
# =====================================================================================================================


@dataclass
class MTGRPOScriptArguments(ScriptArguments):
    """Data, tools and rewards of a run, in addition to the fields of TRL's `ScriptArguments`."""

    tools_script: str | None = key(None, "Python file with TOOL_FUNCTIONS, ENVIRONMENT or both", path=True, opens=True)
    reward_fn: str | None = key(None, "Python file with TURN_REWARD_FUNCS and OUTCOME_REWARD_FUNCS", path=True)
    environment: str | None = key(None, "path.py:Class, or openai_agent, gym or openenv", path=":", opens=True)
    system_prompt: str | None = key(None, "System message; {tool_descriptions} is filled in. None: built in")
    dataset_size: int | None = key(None, "Use the first n training rows. None: all", within="[1, inf)")
    prompt_examples: str | None = key(None, "File of example conversations, before each row's messages", path=True)
    preflight: bool = key(False, "Print what the run will do, sample a batch, and end without training")


@dataclass
class MTGRPOConfig(ServerAndLogKeys, Limits, GRPOConfig):
    """TRL's `GRPOConfig` plus what a conversation needs. Raises `ValueError` for combinations that cannot train."""

    credit_assignment: str = key("mt_grpo", "How turns get their advantages", one_of=CREDIT_ASSIGNMENTS)
    turn_advantage_coef: float = key(1.0, "Weight of a turn's own advantage. 0: the outcome alone", within="[0, inf)")
    turn_discount: float = key(1.0, "Discount per turn, for turn_return, gigpo and progress_credit", within="[0, 1]")
    outcome_in_return: bool = key(False, "turn_return and gigpo: the outcome is also a reward of the last turn")
    state_baseline: str = key(
        "mean", "gigpo: compare a turn with its state's mean, or that of the others", one_of=("mean", "leave_one_out")
    )
    turn_reward_weights: list[float] | None = key(None, "Weights of turn rewards. None: all 1", within="(-inf, inf)")
    outcome_reward_weights: list[float] | None = key(None, "Weights of outcomes. None: all 1", within="(-inf, inf)")
    tool_format: str = key("xml", "How the model writes calls: xml, hermes, native", one_of=TOOL_FORMATS)
    reward_timeout: float = key(600.0, "Seconds of a reward function for one batch", within="(0, inf)", trained=False)
    max_staleness: int = key(0, "Batches of rollouts sampled ahead of training", within="[0, inf)")
    late_groups: str = key(
        "wait", "With max_staleness: wait for the oldest group, or admit complete ones first", one_of=("wait", "admit")
    )
    refill_groups: int = key(0, "Batches of further groups that may replace those without signal", within="[0, inf)")
    freeze_vision_tower: bool | None = key(None, "Do not train the vision tower. None: true with a LoRA")
    share_prompts: bool = key(True, "Compute each prompt once per pass. false: TRL's rows and passes", trained=False)
    max_tokens_per_pass: int | None = key(
        None, "Tokens of a forward pass. None: per_device_train_batch_size times the longest record",
        within="[1, inf)", trained=False,
    )  # fmt: skip
    old_logps: str | None = key(
        None, "Clip around policy (before the step) or sampled. None: by max_staleness", one_of=("policy", "sampled")
    )
    # TRL's default multiplies the ratios of a whole rollout, which leaves long ones out of the loss.
    vllm_importance_sampling_mode: str = key("token_truncate", "How vLLM's samples are corrected")

    def __post_init__(self):
        check_values(self)
        if self.output_dir == "":
            raise ValueError("output_dir is empty. Expected the path of a folder, which may be new.")
        super().__post_init__()
        check_config(self)
        make_absolute(self)
        self.resume_from_checkpoint = checkpoint_of_all_ranks(self.resume_from_checkpoint, self.output_dir)


def recipe_classes() -> tuple:
    """The dataclasses of the settings: every recipe key, those of integrations too, is a field of one of them."""
    return add_integrations(MTGRPOScriptArguments), MTGRPOConfig, ModelKeys


def parse_arguments(argv: list[str] | None = None) -> tuple[MTGRPOScriptArguments, MTGRPOConfig, ModelKeys]:
    """Recipe (`--config x.yaml`) and command line (which wins) to checked dataclasses. Raises `ValueError`."""
    return parse_recipe(argv, recipe_classes())


def build_trainer(script_args: MTGRPOScriptArguments, args: MTGRPOConfig, model_args: ModelKeys) -> MTGRPOEnvTrainer:
    """Build what a recipe describes. Raises before weights are loaded if something is wrong."""
    tools = load_recipe_tools(script_args)
    name, revision = model_args.model_name_or_path, model_args.model_revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    except OSError as error:
        raise ValueError(f"model_name_or_path: {name!r} is no model's folder, nor found on the Hub: {error}") from None
    env = build_env(script_args, args, tools, tokenizer)
    train_dataset, eval_dataset = load_splits(script_args, args.eval_strategy, env.environments)
    turn_funcs, outcome_funcs = load_rewards(script_args.reward_fn)
    how = {"revision": revision, "dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    args.model_init_kwargs = how | (args.model_init_kwargs or {})
    return MTGRPOEnvTrainer(
        model=name,
        env=env,
        turn_reward_funcs=turn_funcs,
        args=args,
        outcome_reward_funcs=outcome_funcs,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )


def build_env(
    script_args: MTGRPOScriptArguments, args: MTGRPOConfig, tools: list[Callable], tokenizer: PreTrainedTokenizerBase
) -> MultiTurnToolEnv:
    """The environment that a recipe describes."""
    conversation, environment = load_conversation(script_args, args, MultiTurnToolEnv)
    reads_state = "state" in CREDIT_ASSIGNMENTS[args.credit_assignment].reads
    limits = limits_of(args)
    return conversation(
        tools,
        DEFAULT_SYSTEM_PROMPT if script_args.system_prompt is None else script_args.system_prompt,
        limits.pop("max_env_steps"),
        tokenizer=tokenizer,
        chat_template_kwargs=args.chat_template_kwargs,
        tool_format=args.tool_format,
        environment=environment,
        max_completion_length=args.max_completion_length,
        state_key=load_state_key(script_args.tools_script) if reads_state else None,
        prompt_examples=script_args.prompt_examples,
        **limits,
    )


def main(argv: list[str] | None = None) -> None:
    """Train as the recipe says; write the model, `trainer_state.json` and the rollouts into `output_dir`.

    With `--preflight` nothing is trained or written: the exit code says whether training would be pointless.
    """
    with ExitStack() as stack:
        try:
            script_args, args, model_args = parse_arguments(argv)
            stack.enter_context(preflight_settings(args) if script_args.preflight else output_lock(args.output_dir))
            trainer = build_trainer(script_args, args, model_args)
        except (ValueError, OSError, ServerError) as error:
            sys.exit(f"error: {error}")
        if script_args.preflight:
            stack.callback(trainer.close_client)
            sys.exit(run_preflight(trainer))
        train_or_save(trainer)
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
        trainer.accelerator.end_training()  # threads of a process group that is left open may abort the process


if __name__ == "__main__":
    run_to_exit(main)

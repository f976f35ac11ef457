"""The conversation that a scheduler of ms-swift runs.

A scheduler's methods and its `run` are awaited on a loop of their own, synchronous ones in threads. What they ask of
`infer_engine.infer_async` is sampled by the trainer's backend.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import uuid
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import background_loop
from mt_grpo.base.rows import with_own_keys
from mt_grpo.conversation.environments import failures_end
from mt_grpo.conversation.tools.running import ToolsUnavailable
from mt_grpo.images.pictures import images_of
from mt_grpo.integrations.ms_swift.loop import RolloutOver, SchedulerFailure, drive, failing
from mt_grpo.integrations.ms_swift.loss import LossMask
from mt_grpo.integrations.ms_swift.messages import mark_tags, place_tags, tagged
from mt_grpo.integrations.ms_swift.outputs import conversation_of, fill, read_outputs, train_outputs
from mt_grpo.integrations.ms_swift.paths import protocol_module
from mt_grpo.integrations.ms_swift.protocol import as_base64, listed_tools, remove_response
from mt_grpo.integrations.ms_swift.session import SchedulerSession
from mt_grpo.rollout import Message, Rollout, StopReason

SCHEDULER_THREAD = "mt-grpo-schedulers"  # their loop: one that blocks must not stop the trainer's
CURRENT: contextvars.ContextVar[SchedulerSession | None] = contextvars.ContextVar("scheduler_session", default=None)
MEDIA = ("audios", "videos", "objects", "chat_template_kwargs")
STANDARD_COLUMNS = ("prompt", "messages", "tools", "image", "images", "data_dict", *MEDIA)  # not of `data_dict`


class SchedulerEngine:
    """`infer_engine` of a scheduler: all its conversations, each with a session."""

    def __init__(self, tokenizer: Any, max_model_len: int | None):
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.sessions: dict[str, SchedulerSession] = {}  # by uuid of the first request

    async def infer_async(self, infer_request: Any, request_config: Any = None, **kwargs: Any) -> Any:
        """The policy's response to a request, of the conversation in which this is called."""
        session = self.sessions.get(getattr(infer_request, "uuid", None)) or CURRENT.get()
        if session is None:
            raise SchedulerFailure("infer_async was called outside of a conversation, with the uuid of none.")
        return await self._on_its_loop(session, session.infer(infer_request, request_config))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of this conversation's session."""
        session = CURRENT.get()
        return await self._on_its_loop(session, getattr(session, method)(*args))

    async def _on_its_loop(self, session: SchedulerSession, coroutine: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, session.loop))


class ScheduledConversation:
    """A scheduler's conversation, as reward functions get it in `environments`."""

    def __init__(self):
        self.row: dict[str, Any] = {}
        self.request_id = ""
        self.outputs: list[dict[str, Any]] = []  # of each output of the scheduler, the arguments of rewards by name

    def reset(self, **row: Any) -> list[Message] | None:
        """Reset the state for a new conversation."""
        self.row, self.request_id, self.outputs = row, f"chatcmpl-{uuid.uuid4()}", []
        if row.get("prompt"):
            return None
        return [{"role": "user", "content": "The scheduler writes the prompt."}]

    @property
    def infos(self) -> dict[str, Any]:
        """The `rollout_infos` of the last output."""
        return self.outputs[-1]["rollout_infos"] if self.outputs else {}


class SchedulerConversation:
    """Mixed into the class of conversations: the turns are a scheduler's."""

    renders_all = False  # a request's tools and template arguments are its own
    place_images, mark_images = staticmethod(place_tags), staticmethod(mark_tags)

    scheduler_class: type
    scheduler_kwargs: dict[str, Any]  # such as `max_turns`
    loss: LossMask
    length_scope: str  # what max_completion_length counts: `per_round` or `total`
    max_model_calls: int  # responses per rollout
    passes_dataset: bool  # whether requests have the row's columns as `data_dict`

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.environments.places_images = False
        self.engine = SchedulerEngine(self.tokenizer, self.max_model_len)
        self.scheduler = make_scheduler(self.scheduler_class, self.engine, self.scheduler_kwargs)

    @property
    def keeps_thinking(self) -> bool:
        """Whether the model reads the thinking of earlier turns: as in ms-swift, not with `last_round`."""
        return self.loss.base != "last_round"

    async def take_turn(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None = None) -> None:
        """All turns: run the scheduler to its end. Its requests become the rollout's turns."""
        with failures_end(rollout):
            messages = await self.environments.open(rollout)
            session = SchedulerSession(self, rollout, llm, sampling_params, protocol_module())
            with failing("The row cannot be a request"):
                request = await asyncio.to_thread(self.first_request, rollout, session, messages)
            await self.run_scheduler(rollout, session, request)

    def first_request(self, rollout: Rollout, session: SchedulerSession, messages: list[Message]) -> Any:
        """The request with which a conversation begins, without the row's solution. Raises any error."""
        row = with_own_keys(rollout.row, getattr(self.scheduler, "keyword_columns", ()))
        columns = {key: value for key, value in row.items() if key not in STANDARD_COLUMNS and value is not None}
        images = images_of(row)
        if session.images.reader is not None:
            session.prompt, images = tagged(session.prompt or messages, row, "The row")
        messages = messages if row.get("prompt") else session.prompt or messages
        own = ("loss", "loss_scale")  # of messages, for other kinds of training
        messages = [{key: value for key, value in message.items() if key not in own} for message in messages]
        remove_response(messages)
        return session.protocol.RolloutInferRequest(
            messages=messages,
            images=[as_base64(image, paths=True) for image in images],
            tools=listed_tools(row.get("tools")) or None,
            uuid=rollout.environment.request_id,
            data_dict={**columns, **(row.get("data_dict") or {})} if self.passes_dataset else {},
            **{kind: row[kind] for kind in MEDIA if row.get(kind)},
        )

    async def run_scheduler(self, rollout: Rollout, session: SchedulerSession, request: Any) -> None:
        """Let the scheduler run, and fill the rollout. Raises `SchedulerFailure`."""
        config = session.protocol.RequestConfig(
            max_tokens=self.max_completion_length, n=1, logprobs=True, return_details=True
        )
        key = request.uuid  # which the scheduler may change
        self.engine.sessions[key] = session
        try:
            outputs, are_split = await self.watched(session, rollout, request, config)
            train_outputs(session, outputs, are_split, self.loss)
        finally:
            await session.finish()
            del self.engine.sessions[key]
            fill(rollout, session)
        rollout.environment.outputs = [as_columns(output, session) for output in outputs]
        rollout.stop_reason = session.stop_reason or self.why_it_ended(session)

    async def watched(
        self, session: SchedulerSession, rollout: Rollout, request: Any, config: Any
    ) -> tuple[list[Any], bool]:
        """(the outputs, whether they are a list), of what was sampled so far if the scheduler did not end itself."""
        name, timeout = type(self.scheduler).__name__, self.environment_timeout
        running = self.begin(session, request, config)
        try:
            while not running.done() and session.failure is None and not session.over.is_set():
                left = timeout - session.idle_seconds
                if left <= 0:
                    rollout.abandoned = True
                    raise SchedulerFailure(
                        f"{name} took longer than environment_timeout={timeout:g} s between two responses. An async "
                        "method that blocks holds up all conversations: await in it, or make it a plain function."
                    )
                await asyncio.wait([running], timeout=min(left, 1.0))
            if session.failure is not None:
                raise session.failure
            if not running.done():  # it asks on after the end, whatever it is told
                return session.so_far(), False
            if running.cancelled():
                raise SchedulerFailure(f"{name} cancelled itself.")
            returned = running.result()
            return read_outputs(returned, name), isinstance(returned, list)
        except RolloutOver:
            return session.so_far(), False
        except (SchedulerFailure, ToolsUnavailable):
            raise
        except Exception as error:
            if session.failure is not None:
                raise
            raise SchedulerFailure(f"{name} raised {error_line(error)}") from error
        finally:
            running.cancel()

    def begin(self, session: SchedulerSession, request: Any, config: Any) -> asyncio.Future:
        """Begin a conversation on the loop of schedulers. A future of this loop with its result."""
        loop = background_loop(SCHEDULER_THREAD)  # whose own context must not keep the first session
        CURRENT.set(session)  # in this task, whose context the other loop's task gets
        own_run = self.scheduler.run if has_own_run(type(self.scheduler)) else functools.partial(drive, self.scheduler)

        async def run() -> Any:
            try:
                return await own_run(request, config)
            except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # would end the loop of all schedulers
                raise RuntimeError(error_line(error)) from error

        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))

    def why_it_ended(self, session: SchedulerSession) -> StopReason:
        """The reason of a conversation that had room left."""
        if not session.samples:
            raise SchedulerFailure(f"{self.scheduler_class.__name__} never asked for a response.")
        if session.samples[-1].turn.finish_reason == "length":
            return StopReason.MAX_TOKENS
        most = self.scheduler_kwargs.get("max_turns")
        return StopReason.MAX_TURNS if most and len(session.samples) >= most else StopReason.ENVIRONMENT_STOP


def as_columns(output: Any, session: SchedulerSession) -> dict[str, Any]:
    """An output by the names that ms-swift's rewards get."""
    choice, infos, messages = output.response.choices[0], output.rollout_infos, conversation_of(output, session)
    if (last := messages[-1])["role"] == "assistant" and not last["content"].startswith(session.format.lead):
        messages = [*messages[:-1], last | {"content": session.format.lead + last["content"]}]  # as ms-swift decodes
    return {
        "messages": messages,
        "finish_reason": choice.finish_reason,
        "is_truncated": choice.finish_reason == "length",
        "rollout_infos": infos,
        "multi_turn_infos": infos,
        "response_token_ids": output.response_token_ids or [list(choice.token_ids or [])],
        **({"images": infos["images"]} if infos.get("images") is not None else {}),
    }


def has_own_run(cls: type, method: str = "run") -> bool:
    """Whether a class has a method of its own. The `run` of `MultiTurnScheduler` is replaced by `drive`."""
    owner = next((each for each in cls.__mro__ if method in vars(each)), None)
    bases = ("MultiTurnScheduler",) if method == "run" else ("MultiTurnScheduler", "RolloutScheduler")
    return owner is not None and owner.__name__ not in bases


def make_scheduler(cls: type, engine: SchedulerEngine, kwargs: dict[str, Any]) -> Any:
    """An instance, by either constructor: `(infer_engine, max_turns)`, or `(max_turns)` as before 3.8."""
    parameters = inspect.signature(cls).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {"infer_engine": engine, "tokenizer": engine.tokenizer, **kwargs}
    if "max_turns" in parameters and "infer_engine" not in parameters:
        del given["infer_engine"]  # `super().__init__(max_turns, ...)` would be a second value for it
    try:
        scheduler = cls(**{key: value for key, value in given.items() if takes_all or key in parameters})
    except Exception as error:
        name = f"{cls.__name__}{inspect.signature(cls)}"
        raise ValueError(f"multi_turn_scheduler: {name} raised {error_line(error)}") from error
    for key, value in {"infer_engine": engine, "max_turns": kwargs.get("max_turns")}.items():
        if vars(scheduler).get(key) is None:  # its constructor passed on neither
            setattr(scheduler, key, value)
    return scheduler

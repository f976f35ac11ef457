"""`environment: openai_agent`: the conversation is an agent's program, which calls the policy over OpenAI's API
or over Anthropic's.

    agent: my_agent.py:solve             # async def solve(row, client): an AsyncOpenAI client, or a function
    agent_command: python my_agent.py    # the row on standard input, OPENAI_BASE_URL and OPENAI_API_KEY, ANTHROPIC_...

The agent is not changed. Its requests are sampled token for token after what was sampled before; each completion is a
turn with its own credit.
"""

from __future__ import annotations

import asyncio
import inspect
import shlex
import shutil
from typing import Any

from mt_grpo.conversation.environments import failures_end
from mt_grpo.integrations.agents.programs import (
    AgentFailure,
    CommandAgent,
    FunctionAgent,
    read_result,
    run_program,
    told_refusals,
)
from mt_grpo.integrations.agents.server import AgentServer
from mt_grpo.integrations.agents.session import AgentSession
from mt_grpo.integrations.checks import check_settings_of
from mt_grpo.recipe.plugins import load_named
from mt_grpo.rollout import Message, Rollout, StopReason

SECONDS_TO_RETURN = 5.0  # for the agent, once its budget is spent


class Agent:
    """An agent's conversation, as reward functions get it in `environments`.

    Attributes:
        row: The row of the dataset.
        result: The agent's return value as a dict; a number is under `reward`. Empty if its budget was used up first.
    """

    tools: list = []  # it has none of the trainer's; turns get rewards by `client.reward`

    def __init__(self):
        self.row: dict[str, Any] = {}
        self.result: dict[str, Any] = {}
        self.outcome: float | None = None

    def reset(self, **row: Any) -> list[Message] | None:
        """Begin anew. The prompt is what the agent asks first; this one stands for it."""
        self.row, self.result, self.outcome = row, {}, None
        return None if row.get("prompt") else [{"role": "user", "content": "The agent writes the prompt."}]

    def get_reward(self) -> float | None:
        """The outcome reward: what the agent returned. 0 where it was ended because its budget was spent."""
        return self.outcome


def agent_environment(program: FunctionAgent | CommandAgent) -> type:
    """The class of an agent's environments. Its reward is logged under the name of the agent."""
    return type(program.name, (Agent,), {})


class AgentConversation:
    """Mixed into the class of conversations: the conversation between the policy and an agent's program.

    Attributes:
        agent: The program.
        agent_timeout: Seconds that it may take for one row.
        max_model_calls: Completions per rollout.
    """

    renders_all = False  # a request's tools and template arguments are its own
    reads_rows = False  # the agent sends what it wants of a row's images

    agent: FunctionAgent | CommandAgent
    agent_timeout: float
    max_model_calls: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._servers: dict[asyncio.AbstractEventLoop, tuple[AgentServer, asyncio.Task]] = {}

    @staticmethod
    def place_images(prompt: list[Message], *_: Any) -> tuple[list[Message], list]:
        """The prompt as text, which stands for the agent's requests: an image is `<image>`, and none is read."""

        def text(content: Any) -> str:
            return content if isinstance(content, str) else "".join(part.get("text") or "<image>" for part in content)

        return [{**message, "content": text(message["content"])} for message in prompt], []

    mark_images = place_images

    async def take_turn(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None = None) -> None:
        """All turns: run the agent to its end. Its requests become the rollout's turns."""
        with failures_end(rollout):
            await self.environments.open(rollout)
            await self.run_agent(rollout, llm, sampling_params)

    async def run_agent(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None) -> None:
        """Let the program run, and fill the rollout. Raises `AgentFailure`."""
        server, environment = await self.server(), rollout.environment
        session = AgentSession(self, rollout, llm, sampling_params)
        server.add(session)
        try:
            row, limit = environment.row, self.agent_timeout
            result = await run_program(self.agent, row, server, session, limit, SECONDS_TO_RETURN)
        finally:
            server.remove(session)
            await session.finish()
        environment.outcome, environment.result = read_result(result)
        if session.stop_reason is not None and result is None:
            environment.outcome, environment.result = 0.0, {}
        if not session.got_an_answer and session.stop_reason is None:
            raise AgentFailure(
                f"{self.agent.name} never got a completion of the policy{told_refusals(session)}. It has to call the "
                "model once per rollout, at least. Does a cache of its client answer in the policy's place? DSPy's "
                "default is one: dspy.LM(..., cache=False)."
            )
        rollout.stop_reason = session.stop_reason or StopReason.AGENT_DONE

    def close(self, states: list[Rollout] | None = None) -> None:
        """Close the environments of these conversations, None: of all, and the server."""
        super().close(states)
        if states is None:
            for loop, (server, _) in list(self._servers.items()):
                del self._servers[loop]
                if loop.is_running():
                    asyncio.run_coroutine_threadsafe(server.stop(), loop)

    async def server(self) -> AgentServer:
        """The server of this process, which listens."""
        loop = asyncio.get_running_loop()
        if loop not in self._servers:
            server = AgentServer()
            self._servers[loop] = server, loop.create_task(server.start())
        server, starting = self._servers[loop]
        await asyncio.shield(starting)
        return server


def agent_conversation(
    base: type, program: FunctionAgent | CommandAgent, timeout: float, max_model_calls: int
) -> type:
    """The subclass of the class of conversations, `base`, that an agent's program runs."""
    settings = {"agent": program, "agent_timeout": timeout, "max_model_calls": max_model_calls}
    return type("AgentConversation", (AgentConversation, base), settings)


# -- what a recipe says --


def load_agent_conversation(script_args: Any, args: Any, base: type) -> tuple[type, type]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work."""
    check_settings_of("agent", "environment: openai_agent", script_args, args)
    if (script_args.agent is None) == (script_args.agent_command is None):
        got = "neither" if script_args.agent is None else "both"
        raise ValueError(f"environment: openai_agent got {got} of agent and agent_command. Set exactly one of them.")
    program = load_function(script_args.agent) if script_args.agent else load_command(script_args.agent_command)
    conversation = agent_conversation(base, program, script_args.agent_timeout, script_args.max_model_calls)
    return conversation, agent_environment(program)


def load_function(reference: str) -> FunctionAgent:
    """The function that `path.py:function` names. Raises `ValueError` unless it takes a row and a client."""
    function, name, path = load_named(reference, "agent")
    try:
        if not inspect.isfunction(function):
            raise TypeError(f"{name!r} of {path!r} is {function!r}")
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise ValueError(f"agent: {reference!r}: {error}. Expected a function of (row, client).") from None
    return FunctionAgent(function)


def load_command(command: str) -> CommandAgent:
    """The program of a command. Raises `ValueError` if there is none."""
    words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"agent_command: {command!r} begins with no program. Expected one like `python my_agent.py`.")
    return CommandAgent(command)

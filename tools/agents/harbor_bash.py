"""An agent on Harbor's side with one tool, `bash`, for tools/agents/harbor_trial.py.

    HARBOR_AGENT=harbor_bash:BashAgent

It runs in the Python of `HARBOR_PYTHON`, and finds the address and the key of its rollout in the environment.

Needs: harbor and the openai package, in the virtual environment of `HARBOR_PYTHON`.
"""

import json
import shlex

from harbor.agents.base import BaseAgent
from openai import AsyncOpenAI

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Run a shell command.", "parameters": PARAMETERS}


class BashAgent(BaseAgent):
    """Ask the policy until it answers without a call, at most eight times for each step of the task."""

    @staticmethod
    def name() -> str:
        return "bash"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None:
        pass

    async def run(self, instruction, environment, context) -> None:
        client, messages = AsyncOpenAI(max_retries=0), [{"role": "user", "content": instruction}]
        for _ in range(8):
            tools = [{"type": "function", "function": BASH}]
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            if not answer.choices[0].message.tool_calls:
                return
            for call in answer.choices[0].message.tool_calls:
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": await run_call(call, environment)}
                )


async def run_call(call, environment) -> str:
    """Run a call in the task's environment. Returns what the policy reads, from a file: a pipe may stay open."""
    try:
        command = shlex.quote(json.loads(call.function.arguments)["command"])
        result = await environment.exec(f"f=$(mktemp); timeout -k 2 20 bash -c {command} >$f 2>&1; head -c 4000 $f")
    except (ValueError, LookupError, TypeError) as error:
        return f"Error: {error!r}"
    return result.stdout or "(no output)"

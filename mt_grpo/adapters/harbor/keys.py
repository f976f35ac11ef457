"""What a recipe says of task folders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_grpo.adapters.house import House, imports
from mt_grpo.base.fields import key

HARBOR = "the line environment: harbor"


@dataclass
class HarborKeys:
    """Task folders of Harbor, with `environment: harbor`."""

    harbor_command_timeout: float = key(
        20.0, "Seconds of one command of the tool bash; below tool_timeout", within="(0, inf)", needs=HARBOR
    )
    harbor_docker: str = key(
        "auto", "Whether Docker runs the tasks: auto (where it is there), never, always",
        one_of=("auto", "never", "always"), needs=HARBOR,
    )  # fmt: skip
    harbor_network: bool = key(False, "Whether tasks have a network; needs Docker", needs=HARBOR)
    harbor_memory_mb: int = key(
        4096, "Memory in MiB that a task may ask for; one that asks for more is left out", within="[64, inf)",
        needs=HARBOR,
    )  # fmt: skip
    harbor_storage_mb: int = key(
        1024, "MiB of a rollout's files, which are in memory without Docker", within="[16, inf)", needs=HARBOR
    )
    harbor_reward: str = key(
        "reward", "Which reward of reward.json is the outcome, where there are several", needs=HARBOR
    )
    harbor_agent_folders: list[str] | None = key(
        None, "Folders that agent_command reads inside a task's sandbox, beside /usr and the like", path=True,
        needs=f"{HARBOR} and agent_command",
    )  # fmt: skip


class HarborHouse(House):
    """A task folder is the environment of a conversation of the trainer's class."""

    keys = HarborKeys
    line = "environment: harbor"

    def runs(self, script_args: Any) -> bool:
        """Whether the recipe's environment is a task folder."""
        return script_args.environment == "harbor"

    def takes_agents(self, script_args: Any) -> bool:
        """Whether a program of the user's works on the tasks."""
        return script_args.agent_command is not None

    def conversation(self, script_args: Any, args: Any, base: type) -> tuple[type, Any]:
        """The trainer's own, with the tasks; with `agent_command` the one that the program runs."""
        if self.takes_agents(script_args):
            with imports(f"{self.line} with agent_command", extra="agents"):
                from mt_grpo.adapters.harbor.agents import load_task_agents
            return load_task_agents(script_args, args, base)
        if script_args.harbor_agent_folders is not None:
            raise ValueError("harbor_agent_folders has no effect without agent_command. Add it, or remove this key.")
        from mt_grpo.adapters.harbor.environment import load_harbor_conversation

        if script_args.tools_script is not None:
            raise ValueError(f"tools_script has no effect with {self.line}: its tool is bash. Remove it.")
        return load_harbor_conversation(script_args, args, base)

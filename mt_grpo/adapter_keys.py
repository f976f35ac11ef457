"""The recipe keys of `mt_grpo.adapters`, and the class of conversations that a recipe names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mt_grpo.plugins import load_environment

OPENAI_AGENT = "openai_agent"  # a value of `environment`


@dataclass
class AdapterKeys:
    """Which program of another house takes part in the conversation."""

    agent: str | None = field(
        default=None, metadata={"help": "path.py:function of (row, client), with environment: openai_agent"}
    )
    agent_command: str | None = field(
        default=None,
        metadata={"help": "A program in place of agent: a row on standard input, OpenAI's API by address"},
    )
    agent_timeout: float = field(
        default=600.0, metadata={"help": "Seconds of the agent's own for one row, without its waits for the policy"}
    )
    max_model_calls: int = field(default=32, metadata={"help": "Completions that the agent may ask for, per rollout"})


def load_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, classes of environments or None) of a recipe. Raises `ValueError`.

    Args:
        script_args: `environment`, `tools_script` and the keys of adapters.
        args: The other settings.
        base: `MultiTurnToolEnv`.
    """
    if script_args.environment == OPENAI_AGENT:
        try:
            from mt_grpo.adapters.openai_agent import load_agent_conversation
        except ImportError as error:
            raise ValueError(
                f"environment: {OPENAI_AGENT} needs a package that is not installed ({error}). Run "
                "`pip install -e .[agents]` in the clone. (A file of scripts/one_file.py has no adapters.)"
            ) from None
        return load_agent_conversation(script_args, args, base)
    for key in ("agent", "agent_command"):
        if getattr(script_args, key) is not None:
            raise ValueError(f"{key} has no effect without the line environment: {OPENAI_AGENT}. Add it.")
    return load_environment(script_args.environment, script_args.tools_script, base)

"""Everything that `mt_grpo_trainer.py` uses: server client, weight sync, logging, integrations. It never imports it.

A folder imports from itself, from `rollout` and from those above it in this list:

    rollout         the types and protocols of a conversation: Turn, Reply, Rollout, Environment, Backend
    base/           event loop, ranks, files, errors
    images/         images of a conversation
    conversation/   environments, tools, formats, sampling
    generation/     inference servers, and how the policy's weights get there
    training/       rewards, records, tensors, passes of the loss
    run/            checkpoints, resuming, stopping, rollouts in flight
    recipe/         reading and checking a recipe
    reports/        metrics, progress, the log of rollouts, preflight
    integrations/   other frameworks: agents, gym, mcp, openenv, verl, ms_swift

What tools, environments and notebooks need is imported from here: `from mt_grpo import Reply, Turn, load_tools`.
"""

import importlib
import os
import warnings

from mt_grpo.rollout import (
    Context as Context,
    Environment as Environment,
    Generation as Generation,
    Message as Message,
    Reply as Reply,
    Rollout as Rollout,
    StopReason as StopReason,
    ToolCall as ToolCall,
    ToolResult as ToolResult,
    Turn as Turn,
)

# INVARIANT: both are set before torch and TRL are imported, which read them then.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # waiting threads spin briefly: endless spinning slows busy cores
warnings.filterwarnings("ignore", "TRL currently supports vLLM versions", module="trl")  # `warn_of_untested` does
warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)  # of DeepSpeed's calls, several a pass

_MODULES = {
    "ChatFormat": "mt_grpo.conversation.formats.base",
    "GymText": "mt_grpo.integrations.gym.text",
    "Integration": "mt_grpo.recipe.plugins",
    "key": "mt_grpo.base.fields",
    "load_environment": "mt_grpo.recipe.plugins",
    "load_rewards": "mt_grpo.recipe.plugins",
    "load_tools": "mt_grpo.recipe.plugins",
    "read_rollouts": "mt_grpo.reports.rollout_log",
}


def __getattr__(name: str) -> object:
    """Import what is not needed for a plug-in's types when it is asked for: `import mt_grpo` stays quick."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

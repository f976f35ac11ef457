"""What `mt_grpo_trainer.py` stands on. No module of this package imports that script.

A wing imports from itself, from `rollout` and from the wings above it in this list, never from one below.

    rollout         the nouns and protocols of a conversation: Turn, Reply, Rollout, Environment, ToolFormat, Backend
    base/           what every wing stands on: event loop, ranks, files, errors
    conversation/   environments, tools, formats, sampling
    generation/     servers and what they hold; the policy's weights on their way there
    training/       what the loss sees: rewards, records, tensors, what is in flight
    run/            a run loses nothing: checkpoints, resuming, stopping
    recipe/         whether a recipe is right, and what it describes
    reports/        what people see of a run
    adapters/       other houses: agents, gym, mcp, openenv, verl, ms_swift

A plug-in finds what it needs here: `from mt_grpo import Reply, Turn`.
"""

import os
import warnings

# INVARIANT: both are set before torch and TRL are imported, which read them then.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # waiting threads spin briefly: endless spinning slows busy cores
warnings.filterwarnings("ignore", "TRL currently supports vLLM versions", module="trl")  # `outside` warns instead

from mt_grpo.rollout import (  # noqa: E402
    Context,
    Environment,
    Generation,
    Message,
    Reply,
    Rollout,
    StopReason,
    ToolCall,
    ToolFormat,
    ToolResult,
    Turn,
)

__all__ = [
    "Context",
    "Environment",
    "Generation",
    "Message",
    "Reply",
    "Rollout",
    "StopReason",
    "ToolCall",
    "ToolFormat",
    "ToolResult",
    "Turn",
]

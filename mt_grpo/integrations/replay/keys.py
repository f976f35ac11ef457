"""Recipe keys of a log whose rollouts are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key
from mt_grpo.recipe.plugins import Integration


@dataclass
class ReplayKeys:
    """A log whose rollouts are trained in place of new ones."""

    train_from_rollouts: str | None = key(
        None, "Train the rollouts of a log: an output directory, or directory:STEP for those of one step", path=True
    )


class ReplayIntegration(Integration):
    """Wraps the recipe's own conversation, whichever it is: its rollouts are those of a log."""

    keys = ReplayKeys

    def around(self, script_args: Any, args: Any, conversation: type) -> type:
        if script_args.train_from_rollouts is None:
            return conversation
        from mt_grpo.integrations.replay.rollouts import replaying

        return replaying(script_args, args, conversation)

    def rows(self, script_args: Any) -> list[dict[str, Any]] | None:
        if script_args.train_from_rollouts is None:
            return None
        from mt_grpo.integrations.replay.rollouts import data_rows

        return data_rows(script_args.train_from_rollouts)

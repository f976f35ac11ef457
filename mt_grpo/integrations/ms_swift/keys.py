"""What a recipe says of ms-swift's schedulers, with its names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key
from mt_grpo.recipe.plugins import Integration

SCHEDULER = "the key multi_turn_scheduler"


@dataclass
class SwiftKeys:
    """A scheduler of ms-swift, which runs the conversation."""

    multi_turn_scheduler: str | None = key(
        None, "ms-swift's: the name in multi_turns of what runs the conversation", opens=True
    )
    external_plugins: list[str] | None = key(
        None, "ms-swift's: Python files that register schedulers and rewards", path=True, needs=SCHEDULER
    )
    reward_funcs: list[str] | None = key(None, "ms-swift's: names in orms, with multi_turn_scheduler", needs=SCHEDULER)
    max_turns: int | None = key(None, "ms-swift's: responses per conversation", within="[1, inf)", needs=SCHEDULER)
    loss_scale: str = key("default", "ms-swift's: [base+]type[+type...], base of default, last_round", needs=SCHEDULER)
    completion_length_limit_scope: str = key(
        "per_round", "ms-swift's: what max_completion_length bounds, per_round or total", needs=SCHEDULER
    )
    vllm_server_pass_dataset: bool = key(
        True, "ms-swift's: requests have the row's columns as data_dict", needs=SCHEDULER
    )


class SwiftIntegration(Integration):
    """The integration of ms-swift, in which a scheduler runs the conversation."""

    keys = SwiftKeys
    line = "multi_turn_scheduler"

    def runs(self, script_args: Any) -> bool:
        """Whether the recipe names a scheduler."""
        return bool(script_args.multi_turn_scheduler)

    def conversation(self, script_args: Any, args: Any, base: type) -> tuple[type, Any]:
        """The conversation that the scheduler runs."""
        from mt_grpo.integrations.ms_swift.recipe import load_scheduler_conversation

        return load_scheduler_conversation(script_args, args, base)

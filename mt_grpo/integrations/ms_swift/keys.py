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
        "per_round", "ms-swift's: what max_completion_length bounds", one_of=("per_round", "total"), needs=SCHEDULER
    )
    vllm_server_pass_dataset: bool = key(True, "ms-swift's: requests have the row as data_dict", needs=SCHEDULER)


class SwiftIntegration(Integration):
    """The integration of ms-swift, in which a scheduler runs the conversation."""

    keys = SwiftKeys
    line = "multi_turn_scheduler"
    loads = "mt_grpo.integrations.ms_swift.recipe:load_scheduler_conversation"

    def runs(self, script_args: Any) -> bool:
        """Whether the recipe names a scheduler."""
        return bool(script_args.multi_turn_scheduler)

"""FrozenLake as text: the board alone, with the player's place in brackets. For `gym_text` in a recipe.

Needs: gymnasium (`pip install -e '.[gym]'`), and `gym_kwargs: {render_mode: ansi}`.

Protects against: nothing, and nothing is needed; it reads a drawing of 16 letters.

>>> import gymnasium
>>> lake = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
>>> text = FrozenLakeText(lake, ("left", "down", "right", "up"))
>>> _ = lake.reset(), lake.step(text.action("<action>down</action>"))
>>> print(text.observation(4, {}))
SFFF
[F]HFH
FFFH
HFFG
"""

from typing import Any

from mt_grpo.adapters.gym.text import GymText


class FrozenLakeText(GymText):
    """Without the line that repeats the last action: boards that look the same are the same state."""

    def __init__(self, env, actions=()):
        if env.render_mode != "ansi":
            raise ValueError(
                f"FrozenLakeText reads a drawing, and render_mode is {env.render_mode}. Expected gym_kwargs with "
                "render_mode: ansi."
            )
        super().__init__(env, actions)

    def observation(self, observation: Any, info: dict[str, Any]) -> str:
        """The board's rows."""
        lines = super().observation(observation, info).splitlines()
        return "\n".join(line for line in lines if not line.strip().startswith("("))

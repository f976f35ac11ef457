"""FrozenLake as text: the board with the player's place in brackets. For `gym_text` in a recipe.

Needs: gymnasium (`pip install -e '.[gym]'`), and `gym_kwargs: {render_mode: ansi}`.

Protects against: nothing, and needs no protection: it reads a board of 16 letters.

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

from mt_grpo import GymText


class FrozenLakeText(GymText):
    """Leaves out the line that repeats the last action, so that equal boards are the same state."""

    def __init__(self, env, actions=()):
        if env.render_mode != "ansi":
            raise ValueError(
                f"FrozenLakeText reads a text rendering, got render_mode: {env.render_mode}. Set render_mode: ansi in "
                "gym_kwargs."
            )
        super().__init__(env, actions)

    def observation(self, observation: Any, info: dict[str, Any]) -> str:
        """Return the board's rows as text."""
        lines = super().observation(observation, info).splitlines()
        return "\n".join(line for line in lines if not line.strip().startswith("("))

"""FrozenLake as an OpenEnv server, for hf_recipes/tiny/openenv.yaml: each turn is a move, and reaching G earns 1.

    python -m venv openenv && openenv/bin/pip install "openenv==0.10.*"
    openenv/bin/python tools/openenv/frozen_lake.py --port 8030

Needs: openenv in a separate virtual environment, since its dependencies conflict with those of the trainer.

Protects against: nothing, and needs no protection: it moves a mark on a board of 16 letters, and listens on loopback.

>>> lake = Lake()
>>> print(lake.act("I go <action>right</action>"))
('S[F]FF\\nFHFH\\nFFFH\\nHFFG', 0.0, False)
>>> lake.act("fly")
("Error: expected an action as <action>...</action>: left, down, right or up. Got 'fly'.", None, False)
"""

import argparse

BOARD = ("SFFF", "FHFH", "FFFH", "HFFG")
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
NAMES = "left, down, right or up"
RULES = f"Answer with an action as <action>...</action>: {NAMES}.\n"
MOST_STEPS = 100


class Lake:
    """One game. It ends with reward 1 at G, and with reward 0 in a hole or after 100 steps."""

    def __init__(self):
        self.row = self.column = self.steps = 0

    def board(self) -> str:
        """Return the board's rows as text, with the player's place in brackets."""
        rows = [list(row) for row in BOARD]
        rows[self.row][self.column] = f"[{rows[self.row][self.column]}]"
        return "\n".join("".join(row) for row in rows)

    def act(self, text: str) -> tuple[str, float | None, bool]:
        """Make a move. Returns (observation, reward, whether the game is over). Invalid text does not move."""
        before, closed, _ = text.rpartition("</action>")
        name = before.rpartition("<action>")[2].strip().lower() if closed else text.strip()
        if not closed or name not in MOVES:
            return f"Error: expected an action as <action>...</action>: {NAMES}. Got {name[:60]!r}.", None, False
        self.steps += 1
        down, right = MOVES[name]
        self.row, self.column = min(max(self.row + down, 0), 3), min(max(self.column + right, 0), 3)
        place = BOARD[self.row][self.column]
        return self.board(), float(place == "G"), place in "GH" or self.steps >= MOST_STEPS


def make_app(sessions: int):
    """Create the FastAPI application of the server with openenv."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Seen(Observation):
        text: str

    class FrozenLake(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True  # sessions share nothing

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.lake, self.episode_id = Lake(), episode_id
            return Seen(text=RULES + self.lake.board())

        def step(self, action, timeout_s=None, **kwargs):
            text, reward, done = self.lake.act(action.message)
            return Seen(text=text, reward=reward, done=done)

        @property
        def state(self):
            return State(
                episode_id=self.episode_id, step_count=self.lake.steps, place=[self.lake.row, self.lake.column]
            )

    return create_fastapi_app(FrozenLake, Say, Seen, max_concurrent_envs=sessions)


def main() -> None:
    """Run the server until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8030)
    parser.add_argument("--sessions", type=int, default=64, help="Concurrent sessions, as many as a step has rollouts")
    args = parser.parse_args()
    import uvicorn

    uvicorn.run(make_app(args.sessions), host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()

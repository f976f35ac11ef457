"""How noisy the credit from an outcome alone is, in games whose gradient is known: the table of docs/credit.md.

    python scripts/bench/variance.py            # five minutes on one core
    python scripts/bench/variance.py --report   # only the table, from docs/results/variance.json

Each game has a few turns with four actions, of which the first is right. A policy is a table of probabilities, one per
turn and state; a state says whether all went well so far. The estimators are the trainer's own, on tables of rewards
that are made as it makes them. Of each estimator the gradient of 20,000 groups is compared with the exact one:
its variance, times the turns that were sampled, relative to that of `outcome`; its direction; and how many groups gave
no gradient at all.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench.common import Frame

ACTIONS, GROUPS, PARTS, GROUP_SIZE = 4, 20_000, 8, 24


class Game(NamedTuple):
    """The policy of a game, and what an action leads to.

    Attributes:
        right: The chance of the right action at each turn, (K,).
        decides: Whether a turn's wrong action loses the game, (K,).
        ends: Whether the third action ends the game where all went well so far, with half a point.
    """

    right: tuple[float, ...]
    decides: tuple[bool, ...]
    ends: bool = False

    def policy(self) -> torch.Tensor:
        """Probabilities, (K, 2, A): per turn, of the state lost (0) and well (1)."""
        wrong = [[(1 - p) / (ACTIONS - 1)] * (ACTIONS - 1) for p in self.right]
        return torch.tensor([[[p, *rest]] * 2 for p, rest in zip(self.right, wrong)], dtype=torch.float64)

    def play(self, turn: torch.Tensor, well: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Play on from each (turn, well), (n,): actions (n, K), -1 outside, states (n, K), outcomes, lengths (n,)."""
        policy, count, num_turns = self.policy(), len(turn), len(self.right)
        actions, states = torch.full((count, num_turns), -1), torch.zeros(count, num_turns, dtype=torch.long)
        well, early, length = well.clone(), torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.long)
        for k in range(num_turns):
            now = (turn <= k) & ~early
            chance = policy[k][well.long()].cumsum(1)
            action = (torch.rand(count, 1, generator=draw, dtype=torch.float64) > chance).sum(1).clamp(max=ACTIONS - 1)
            actions[:, k], states[:, k] = torch.where(now, action, -1), well.long()
            if self.ends:
                early = early | (now & (action == 2) & well)
            if self.decides[k]:
                well = torch.where(now & ~early, well & (action == 0), well)
            length = torch.where(now, k + 1, length)
        return actions, states, torch.where(early, 0.5, well.double()), length

    def gradient(self) -> torch.Tensor:
        """Of the expected outcome, in the logits, (K, 2, A): each turn's chance of a state times p (Q - V)."""
        policy, num_turns = self.policy(), len(self.right)
        value = torch.tensor([0.0, 1.0], dtype=torch.float64)
        action_values = torch.zeros_like(policy)
        for k in reversed(range(num_turns)):
            action_values[k] = value[:, None].expand(2, ACTIONS)
            if self.decides[k]:
                action_values[k, 1, 1:] = value[0]
            if self.ends:
                action_values[k, 1, 2] = 0.5
            value = (policy[k] * action_values[k]).sum(1)
        found, reach = torch.zeros_like(policy), torch.tensor([0.0, 1.0], dtype=torch.float64)
        for k in range(num_turns):
            mean = (policy[k] * action_values[k]).sum(1, keepdim=True)
            found[k] = reach[:, None] * policy[k] * (action_values[k] - mean)
            on = 1.0 - policy[k, 1, 2] if self.ends else 1.0
            if self.decides[k]:
                reach = torch.stack([reach[0] + reach[1] * (on - policy[k, 1, 0]), reach[1] * policy[k, 1, 0]])
            else:
                reach = reach * torch.tensor([1.0, on], dtype=torch.float64)
        return found


GAMES = {
    "three turns, each must be right (0.3)": Game((0.3,) * 3, (True,) * 3),
    "three turns, each must be right (0.6)": Game((0.6,) * 3, (True,) * 3),
    "six turns, each must be right (0.7)": Game((0.7,) * 6, (True,) * 6),
    "six turns, the first decides (0.3)": Game((0.3,) * 6, (True,) + (False,) * 5),
    "six turns, the fourth decides (0.3)": Game((0.3,) * 6, (False,) * 3 + (True,) + (False,) * 2),
    "three turns, one action ends early": Game((0.5,) * 3, (True,) * 3, ends=True),
}
WAYS: dict[str, dict[str, Any]] = {  # the table's columns -> what each sets; `states` 0: as many as there can be
    "outcome": {"credit": "outcome"},
    "tree": {"credit": "tree", "branches": 1, "states": 1},
    "tree, num_branches: 2": {"credit": "tree", "branches": 2, "states": 1},
    "tree, branch_states: all": {"credit": "tree", "branches": 1, "states": 0},
    "gigpo, outcome_in_return": {"credit": "gigpo"},
}


def gradients(game: Game, way: dict[str, Any], groups: int, draw: torch.Generator) -> tuple[torch.Tensor, float]:
    """(the sum over a group of advantage times score, (groups, K, 2, A); the turns that a group sampled)."""
    import mt_grpo_trainer as mt

    num_turns = len(game.right)
    num_states = way.get("states", 0) or num_turns - 1
    size = 1 + way["branches"] * num_states if way["credit"] == "tree" else 1
    count = groups * max(GROUP_SIZE // size, 2)
    start = torch.zeros(count, dtype=torch.long)
    trunk = game.play(start, torch.ones(count, dtype=torch.bool), draw)
    rollouts, copied = [trunk], [start]
    order = torch.rand(count, num_turns - 1, generator=draw).argsort(1) + 1  # drawn before: of states, not of rollouts
    for at in order[:, :num_states].T if size > 1 else ():
        passed = trunk[3] > at  # else it begins anew
        turn = torch.where(passed, at, 0)
        well = torch.where(passed, trunk[1].gather(1, at[:, None])[:, 0].bool(), True)
        for _ in range(way["branches"]):
            rollouts.append(game.play(turn, well, draw))
            copied.append(turn)
    actions, states, outcome, _ = (torch.stack([each[k] for each in rollouts], 1).flatten(0, 1) for k in range(4))
    copied, played = torch.stack(copied, 1).flatten(), actions >= 0
    none = torch.full(played.shape, mt.NAN, dtype=torch.float64)
    keys = torch.arange(num_turns) * 2 + states
    table = mt.RewardTable(outcome, none[:, 0], none, played, played, keys.where(played, -1), num_copied=copied)
    credit = mt.turn_advantages(
        table,
        way["credit"],
        len(outcome) // groups,
        1.0,
        "none",
        tree_size=size,
        outcome_in_return=way["credit"] == "gigpo",
    )
    score = torch.nn.functional.one_hot(actions.clamp(min=0), ACTIONS) - game.policy()[torch.arange(num_turns), states]
    of_group = torch.arange(groups).repeat_interleave(len(outcome) // groups)
    flat = torch.zeros(groups * num_turns * 2, ACTIONS, dtype=torch.float64)
    index = (of_group[:, None] * num_turns + torch.arange(num_turns)) * 2 + states
    flat.index_add_(0, index.flatten(), (score * (credit * played)[:, :, None]).flatten(0, 1))
    return flat.view(groups, num_turns, 2, ACTIONS), played.sum().item() / groups


def measure(game: Game, way: dict[str, Any]) -> dict[str, float]:
    """Variance times cost (of a gradient that is scaled to the exact one), direction, and groups without gradient."""
    draw, exact = torch.Generator().manual_seed(0), game.gradient()
    parts = [gradients(game, way, GROUPS // PARTS, draw) for _ in range(PARTS)]
    found, turns = torch.cat([part[0] for part in parts]), sum(part[1] for part in parts) / PARTS
    mean, square = found.mean(0), exact.square().sum()
    scale = (mean * exact).sum() / square
    return {
        "noise": (found.var(0).sum() / scale**2 / square * turns).item(),
        "cosine": ((mean * exact).sum() / mean.norm() / exact.norm()).item(),
        "without": (found.abs().flatten(1).sum(1) < 1e-9).double().mean().item(),
    }


def section(results: dict[str, Any]) -> str:
    """The table of docs/credit.md."""
    lines = [
        "Variance of the gradient times the turns that were sampled, relative to `outcome`; behind it the share of "
        f"groups without a gradient ({GROUPS:,} groups of {GROUP_SIZE}, `scale_rewards: none`; in brackets the chance "
        "of the right action):",
        "",
        "| game | " + " | ".join(f"`{name}`" for name in WAYS) + " |",
        "|---" * (len(WAYS) + 1) + "|",
    ]
    for name, rows in results.items():
        cells = [f"{row['noise'] / rows['outcome']['noise']:.2f}, {row['without']:.2f}" for row in rows.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    least = {way: min(rows[way]["cosine"] for rows in results.values()) for way in WAYS}
    lines += [
        "",
        "The least cosine to the exact gradient: " + ", ".join(f"`{k}` {v:.3f}" for k, v in least.items()) + ".",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    frame = Frame("variance", section)
    frame.page = frame.page.with_name("credit.md")
    if frame.parse(__doc__, argv, None) is None:
        return
    results: dict[str, Any] = {}
    for name, game in GAMES.items():
        results[name] = {way: measure(game, given) for way, given in WAYS.items()}
        print(name, {way: {k: round(v, 3) for k, v in row.items()} for way, row in results[name].items()}, flush=True)
    frame.finish(results, short=False)


if __name__ == "__main__":
    main()

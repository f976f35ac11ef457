"""The group that README shows is the one that docs/method.md works by hand, and its numbers are the trainer's."""

import re
from pathlib import Path

import torch

from mt_grpo_trainer import NAN, RewardTable, turn_advantages

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| [A-D] \|.*$", re.M)


def test_the_group_of_readme_has_the_trainers_numbers():
    lines = ROW.findall((ROOT / "README.md").read_text())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == list("ABCD")
    turns = [[cell for cell in row[1:4] if cell] for row in rows]
    paid = [[float(cell.rpartition(", ")[2]) for cell in cells] for cells in turns]
    called = [["call" in cell for cell in cells] for cells in turns]
    width = max(map(len, turns))
    table = RewardTable(
        outcome=torch.tensor([values[-1] for values in paid]),
        rollout_turn=torch.full((4,), NAN),
        turn=torch.tensor([
            [value if call else NAN for value, call in zip(values, calls)] + [NAN] * (width - len(values))
            for values, calls in zip(paid, called)
        ]),
        observed=torch.tensor([calls + [False] * (width - len(calls)) for calls in called]),
        sampled=torch.tensor([[True] * len(cells) + [False] * (width - len(cells)) for cells in turns]),
        state=torch.full((4, width), -1),
    )  # fmt: skip
    for name, column in (("outcome", 4), ("mt_grpo", 5)):
        advantages = turn_advantages(table, name, group_size=4, coef=1.0, scale_rewards="none")
        for row, found, sampled in zip(rows, advantages, table.sampled):
            shown = [float(number) for number in row[column].split(", ")]
            expected = [round(value, 2) for value in found[sampled].tolist()]
            assert shown == (expected if column == 5 else list(dict.fromkeys(expected))), row

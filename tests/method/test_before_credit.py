"""What stands between rewards and credit, for a fork: the ideas of docs/forking.md, each in two places at most."""

import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from project import ROOT
from refill_run import make
from server_run import calculator
from test_trainer import settings as of_trainer

from mt_grpo.recipe.plugins import import_file
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer

PAGE = (ROOT / "docs/forking.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.partition("## Between rewards and credit")[2], re.M | re.S)[:3]


def fork(tmp_path, block):
    """The script with a method of the page in the place of its own, as a module."""
    assert len(block.splitlines()) <= 20
    source = (ROOT / "mt_grpo_trainer.py").read_text()
    (name,) = re.findall(r"^    def (\w+)", block, re.M)
    own = re.search(rf"^    def {name}\(.*?(?=^    (?:async )?def |^    # --)", source, re.M | re.S)[0]
    source = source.replace(own, block + "\n")
    path = tmp_path / f"fork_{name}.py"
    path.write_text(source)
    return import_file(str(path), "a fork")


def settings(out, **changes):
    short = {"per_device_train_batch_size": 4, "max_completion_length": 96, "max_steps": 1, "learning_rate": 1e-6}
    return of_trainer(out, **{**short, **changes})


ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {n} * 3?"}]} for n in range(11, 19)])


def by_place(completions, **kwargs):
    return [float(i) for i in range(len(completions))]


def test_a_penalty_per_token(tmp_path):
    """0.001 times the number of a turn's trained tokens, of the turns that were sampled."""
    mt = fork(tmp_path, BLOCKS[0])
    tokens, sampled = torch.tensor([[100, 50], [20, 0]]), torch.tensor([[True, True], [True, False]])
    table = SimpleNamespace(turn=torch.tensor([[0.5, mt.NAN], [mt.NAN, mt.NAN]]), num_tokens=tokens, sampled=sampled)
    this = SimpleNamespace(args=SimpleNamespace(refill_groups=0))
    mt.MTGRPOEnvTrainer._before_credit(this, SimpleNamespace(rewards=table))
    assert table.turn[sampled].tolist() == pytest.approx([0.4, -0.05, -0.02]) and table.turn[1, 1].isnan()


def test_other_groups_are_sampled_again(tmp_path, random_model):
    """By the page's rule groups above nine tenths go, too."""
    mt = fork(tmp_path, BLOCKS[1])
    table = SimpleNamespace(outcome=torch.tensor([0.9, 1.0, 0.5, 0.5, 0.0, 1.0]))
    batch = SimpleNamespace(rewards=table, group_size=2, trained_turns=lambda args: torch.ones(6, 1, dtype=bool))
    outcome = table.outcome.view(-1, 2)
    advantages = (outcome - outcome.mean(1, keepdim=True)).reshape(-1, 1)
    this = SimpleNamespace(_advantages=lambda *_: advantages, args=SimpleNamespace(scale_rewards="none"))
    assert mt.MTGRPOEnvTrainer._without_signal(this, batch).tolist() == [True, True, False]
    trainer = make(random_model, tmp_path / "run", max_steps=1)
    trainer._without_signal = lambda batch: mt.MTGRPOEnvTrainer._without_signal(trainer, batch)
    trainer.train()
    assert trainer.trained == {0: [0, 4]}


@pytest.mark.timeout(300)
def test_a_conversation_that_branches_trains_in_process(tmp_path):
    """Rollouts 1 and 3 read the first turns of 0 and 2, and are trained on what they do behind them."""
    assert len(BLOCKS[2].partition("\nclass")[2].splitlines()) <= 18
    exec(BLOCKS[2], names := {})
    env = names["Branching"]([calculator], "Use the calculator, then answer.")
    model = str(ROOT / "hf_recipes/tiny/calculator-model")
    args = MTGRPOConfig(**settings(tmp_path, max_steps=3))
    trainer = MTGRPOEnvTrainer(model, env, [], [by_place], args=args, train_dataset=ROWS)
    seen, roll_out = [], trainer._roll_out
    trainer._roll_out = lambda rows: seen.append(roll_out(rows)) or seen[-1]
    trainer.train()
    pairs = [(r[i], r[i + 1]) for r in seen for i in (0, 2) if len(r[i].turns) > 1]
    assert len(seen) == 3 and pairs
    for left, right in pairs:
        length = len(left.turns[0].token_ids) + len(left.turns[0].observation_ids)
        assert left.completion_ids[:length] == right.completion_ids[:length]
        assert right.turns[0].token_ids == left.turns[0].token_ids and right.turns[0] is not left.turns[0]
        assert right.turn_ids[:length] == [-1] * length and right.loss_mask[:length] == [0] * length
        assert left.loss_mask[0] == 1 and sum(right.loss_mask) > 0
    assert all(row["tokens/ids_differ"] == 0 for row in trainer.state.log_history if "tokens/ids_differ" in row)

"""The benchmark of a whole step: each side samples a batch that has all turns, and makes its step."""

import pytest
from bench import whole as bench
from project import ROOT
from transformers import TrainerCallback
from trl.trainer import grpo_trainer

from mt_grpo.conversation.formats.choose import HermesFormat


@pytest.mark.parametrize("side", ["trl", "in process"])
def test_a_side_takes_its_step_with_all_turns(side, tmp_path, monkeypatch):
    """`build_trainer` raises for a step whose conversations have fewer turns."""
    monkeypatch.setattr(bench, "MODEL", ROOT / "hf_recipes/tiny/calculator-hermes-model")
    monkeypatch.setattr(bench, "TOKENS", 8)
    for owner, name in ((grpo_trainer, "parse_response"), (HermesFormat, "parse_text")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # which a side replaces
    shape = {"G": 2, "rollouts": 4, "rows": 2}
    trainer = bench.build_trainer(side, shape, ["12 * 34", "2 + 2"] * 4, str(tmp_path), TrainerCallback())
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.state.log_history[0]["grad_norm"] > 0

"""The loss that the script shows is the loss that TRL optimises."""

import re

import pytest
import torch
from datasets import Dataset
from project import ROOT
from test_trainer import settings

import mt_grpo_trainer as mt
from mt_grpo.recipe.plugins import import_file
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv, clipped_loss


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize("old_logps", ["policy", "sampled"])
def test_the_loss_that_is_shown_is_the_one_that_runs(old_logps, random_model, tmp_path):
    """Value and gradient, on tokens of which some are clipped, some masked, with an importance ratio of their own."""
    args = MTGRPOConfig(**settings(tmp_path, num_generations=4, max_completion_length=6))
    prompt = [{"role": "user", "content": "say hi"}]
    trainer = MTGRPOEnvTrainer(
        random_model, MultiTurnToolEnv([], system_prompt=None), [], [nothing], args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 4),
    )  # fmt: skip
    assert trainer.loss_type == "dapo" and trainer.importance_sampling_level == "token"
    trainer.current_gradient_accumulation_steps, trainer.model.accepts_loss_kwargs = 1, False
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True  # as with a server
    trainer.model.train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200, (4, 3 + 6), generator=generator)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 1, 0]])
    real = torch.ones(4, 6, dtype=torch.long)
    real[2, 4:] = real[3, 5:] = 0

    def logps() -> torch.Tensor:
        whole = torch.cat([torch.ones(4, 3, dtype=torch.long), real], 1)
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, whole, 6)[0]

    moved = 0.5 * torch.randn(4, 6, generator=generator)  # of a standard deviation of 0.5, most of them are clipped
    old = logps().detach() + moved
    advantages = torch.randn(4, 6, generator=generator)
    importance = torch.rand(4, 6, generator=generator) + 0.5 if old_logps == "policy" else torch.ones(4, 6)
    shown = clipped_loss(logps(), old, advantages, mask, importance, args.epsilon)
    (expected,) = torch.autograd.grad(shown, [trainer.model.get_input_embeddings().weight])
    batch = {
        "prompt_ids": ids[:, :3], "prompt_mask": torch.ones(4, 3, dtype=torch.long), "completion_ids": ids[:, 3:],
        "completion_mask": real, "tool_mask": mask, "advantages": advantages, "old_per_token_logps": old,
        "importance_sampling_ratio": importance, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    run = trainer.compute_loss(trainer.model, batch)
    (gradient,) = torch.autograd.grad(run, [trainer.model.get_input_embeddings().weight])
    assert shown.item() == pytest.approx(run.item(), rel=1e-5) and abs(run.item()) > 1e-3
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-7) and gradient.abs().max() > 1e-4
    ratio = torch.exp(-moved)
    assert ((ratio > 1.2) & (advantages > 0) & (mask == 1)).any()  # a token that clipping silences


def test_the_loss_that_is_shown_by_hand():
    """Ratios 1, 1.5 and 0.5 with epsilon 0.2; the fourth token is of the environment."""
    old, new = torch.log(torch.tensor([[0.5, 0.5, 0.5, 0.1]])), torch.log(torch.tensor([[0.5, 0.75, 0.25, 0.9]]))
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0, 9.0]]), torch.tensor([[1, 1, 1, 0]])
    assert clipped_loss(new, old, advantages, mask).item() == pytest.approx(-(1 + 1.2 - 0.8) / 3)
    assert clipped_loss(new, old, -advantages, mask).item() == pytest.approx((1 + 1.5 - 0.5) / 3)
    importance = torch.tensor([[2.0, 1.0, 0.5, 1.0]])
    assert clipped_loss(new, old, advantages, mask, importance, 0.1).item() == pytest.approx(-(2 + 1.1 - 0.45) / 3)


def test_the_loss_of_the_page_is_trls_without_clipping(random_model, tmp_path):
    """docs/forking.md: a copy with this block trains as the script does if nothing is clipped, in several passes."""
    copy = tmp_path / "my_loss.py"
    source, page = ((ROOT / name).read_text() for name in ("mt_grpo_trainer.py", "docs/forking.md"))
    (block,) = re.findall(r"^```python\n( {12}mask = .*?)^```$", page, re.M | re.S)
    line = "            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)\n"
    assert source.count(line) == 1
    copy.write_text(source.replace(line, block))
    logs = []
    for module, epsilon in ((mt, 1e9), (import_file(str(copy), "a fork"), 0.2)):
        values = dict(num_generations=4, max_completion_length=16, num_iterations=2, max_steps=4, epsilon=epsilon)
        trainer = module.MTGRPOEnvTrainer(
            random_model, module.MultiTurnToolEnv([], system_prompt=None), [],
            [lambda completions, **kwargs: [float(len(str(each))) for each in completions]],
            args=module.MTGRPOConfig(**settings(tmp_path, learning_rate=0.05, max_tokens_per_pass=64, **values)),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "say hi"}]}] * 4),
        )  # fmt: skip
        trainer.train()
        logs.append([row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row])
    assert logs[1] == pytest.approx(logs[0], rel=1e-4) and len(logs[0]) == 4 and min(logs[0]) > 1e-3

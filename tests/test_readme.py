"""What the README says is so: its keys exist, its metrics are logged, its examples run, its files are there."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from trl import GRPOConfig, ScriptArguments

import mt_grpo_trainer as mt

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return re.search(rf"^## {title}$(.*?)(?=^## |\Z)", README, re.M | re.S)[1]


def first_column(title: str) -> list[str]:
    """The names in backticks of the first column of a section's table."""
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def own_keys() -> set[str]:
    def names(cls):
        return {f.name for f in dataclasses.fields(cls)}

    return (names(mt.MTGRPOConfig) - names(GRPOConfig)) | (names(mt.MTGRPOScriptArguments) - names(ScriptArguments))


def test_every_key_is_documented_with_its_default():
    documented = first_column("Recipe keys")
    assert own_keys() <= set(documented)
    for key in documented:
        assert key in mt.known_keys(), key
    for line in section("Recipe keys").splitlines():
        if match := re.match(r"\| `(\w+)` \| `?([\w.]+)`? \|", line):
            default = mt.default_of(match[1])
            if match[2] not in ("none", "all") and isinstance(default, (int, float, str)):
                assert yaml.safe_load(match[2]) == default, line


def test_every_documented_metric_is_logged_and_every_own_metric_documented(random_model, tmp_path):
    def echo(text: str) -> str:
        """Return the text."""
        return text

    def reward(completion_ids, **kwargs):
        return [float(sum(ids) % 7) for ids in completion_ids]

    args = mt.MTGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=4, num_generations=4, max_completion_length=16, max_steps=1, logging_steps=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = mt.MTGRPOEnvTrainer(
        random_model, mt.MultiTurnToolEnv([echo], None), [], [reward], args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}] * 4),
    )  # fmt: skip
    trainer.train()
    logged = set(trainer.state.log_history[0])
    documented = set(first_column("Metrics")) | set(re.findall(r"`((?:sync|completions)/\w+)`", section("Metrics")))
    with_server = {name for name in documented if name.startswith(("sync/", "sampling/"))}
    assert documented - with_server - {"rewards/<function>/mean"} <= logged
    source = (ROOT / "mt_grpo_trainer.py").read_text()
    phases = {f"sync/{phase}_seconds" for phase in ("gather", "write", "load", "check")}
    for name in with_server - {"sampling/sampling_logp_difference/mean"} - phases:
        assert f'"{name}"' in source, name
    own = {name for name in logged if name.startswith(("turns/", "tools/", "stop/", "credit/", "rollout/"))}
    assert own <= documented


def test_the_reward_example_runs():
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "TURN_REWARD_FUNCS" in b)
    space: dict = {}
    exec(compile(block, "README", "exec"), space)
    turn = mt.Turn([1], None, "", "stop", observation="4")
    (values,) = space["TURN_REWARD_FUNCS"][0](rollout_turns=[[turn, turn, mt.Turn([1], None, "", "stop")]])
    assert values == [0.1, 0.0, None]


def test_the_fork_runs():
    """The diff's added function, used as the README says, on a table of two rollouts."""
    diff = next(b for b in re.findall(r"```diff\n(.*?)```", README, re.S))
    added = "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith('+    "'))
    space = {"norm": mt.norm}
    exec(compile(added, "README", "exec"), space)
    advantages = space["best_turn_advantages"](mt.example(), 2, 0.5, "none", 1.0)
    # 1 + 0.5 * 0.6 = 1.3 against 0 + 0.5 * 0.4 = 0.2.
    assert torch.allclose(advantages, torch.tensor([[0.55] * 3, [-0.55] * 3]))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:hf_recipes|scripts|tools|docs)/[\w./-]+\.\w+", README))))
def test_every_file_that_is_named_exists(path):
    assert (ROOT / path).is_file()

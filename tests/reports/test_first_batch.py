"""--preflight on recipes that are broken on purpose, and the look at the first batch of every run."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from project import ROOT
from test_recipes import change_model

import mt_grpo_trainer as mt
from mt_grpo.reports.preflight import READINGS, bytes_per_token, facts_of_batches, plan, run_preflight, troubles
from mt_grpo.rollout import Rollout, StopReason, ToolCall, ToolResult, Turn
from mt_grpo.training.batch import Batch
from mt_grpo.training.pass_metrics import DepthMetrics
from mt_grpo.training.rewards import RewardFunctions

CALCULATOR = ROOT / "hf_recipes/tiny/calculator.yaml"
CONSTANT = (
    "def constant(rollout_turns, **kwargs):\n    return [0.3] * len(rollout_turns)\nOUTCOME_REWARD_FUNCS = [constant]"
)
FAILING = '''
def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers combined with + - * / and parentheses.
    """
    raise ConnectionError("no server at 127.0.0.1:9")


TOOL_FUNCTIONS = [calculator]
'''
# Leaves system messages out.
NO_SYSTEM = (
    "{% for message in messages if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def recipe_file(folder, source=CALCULATOR, **changes):
    """A recipe of 16 rollouts, with some keys changed."""
    recipe = yaml.safe_load(source.read_text()) | {
        "per_device_train_batch_size": 16,
        "output_dir": str(folder / "out"),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (recipe | changes).items() if value is not None}))
    return str(path)


def preflight(path, capsys):
    """(exit code, what is printed, names of the troubles)."""
    with pytest.raises(SystemExit) as ended:
        mt.main(["--config", path, "--preflight"])
    text = capsys.readouterr().out
    return ended.value.code, text, re.findall(r"^  \d+\. (.*?):", text, re.M)


@pytest.mark.contract("preflight")
@pytest.mark.parametrize(("bf16", "memory", "copies"), [(False, "0.0135", "0"), (True, "0.0152", "0.00168")])
def test_a_recipe_that_is_well(bf16, memory, copies, tmp_path, capsys):
    """It says what will happen, and writes nothing. Four bytes of weights are 16 of a run, and 18 with autocast."""
    code, text, found = preflight(recipe_file(tmp_path, bf16=bf16), capsys)
    assert (code, found) == (0, [])
    assert "34 (longest prompt) + 160 (max_completion_length) = 194 tokens of 1024" in text
    assert f"memory   {memory} GiB per rank before it is sharded (weights 0.00337 GiB, gradients 0.00337 GiB" in text
    assert f"half-precision copies {copies} GiB), and what" in text
    assert "of a pass of at most 2,628 tokens (" in text  # 2 prompts of 34, 16 completions of 160
    assert bf16 or "tokens (0.134 GiB); beside" in text
    assert "<|im_start|>system\nUse the calculator, then answer.<|im_end|>\n<|im_start|>user\nWhat is" in text
    assert re.search(r"^16 rollouts, [12]\.\d turns, \d+% call a tool, .* groups without signal; \d", text, re.M)
    assert not (tmp_path / "out").exists()


def test_what_is_sharded_is_float32_when_it_trains(tmp_path, monkeypatch):
    """Weights that are loaded in bfloat16: ZeRO-3 keeps 18 bytes of each parameter."""
    recipe = recipe_file(tmp_path, bf16=True, dtype="bfloat16")
    trainer = mt.build_trainer(*mt.parse_arguments(["--config", recipe]))
    monkeypatch.setattr(type(trainer), "_is_sharded", True)
    assert "memory   0.0152 GiB per rank before it is sharded (weights 0.00337 GiB," in plan(trainer)[1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_the_layers_keep_of_a_token(checkpointing, tmp_path):
    """By hand, of four layers in float32. Of one that is computed again its input stays."""
    path = recipe_file(tmp_path, gradient_checkpointing=checkpointing)
    kept = bytes_per_token(mt.build_trainer(*mt.parse_arguments(["--config", path])))
    hidden, heads, inner = 128, 4 * 32, 384
    layer = hidden if checkpointing else 5 * hidden + 9 * heads + 4 * inner  # 9: queries, keys, values, their norms
    assert 4 * 4 * layer <= kept <= 4 * (4 * 1.01 * layer + 4 * hidden)  # and the last norm's


@pytest.mark.parametrize("disable_tqdm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_run_opens_with_a_look_at_its_first_batch(disable_tqdm, tmp_path, capsys, caplog):
    """Once, of the rollouts that it trains on, and says what means trouble. No log is printed as a dictionary."""
    mt.main(["--config", recipe_file(tmp_path, max_steps=2, learning_rate=0.02, disable_tqdm=disable_tqdm)])
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^first batch: (16 rollouts, .*)$", printed, re.M)
    assert re.search(r"^2/2  reward ", printed, re.M) and "{'" not in printed
    (warning,) = [record.getMessage() for record in caplog.records if "learning_rate is 0.02" in record.getMessage()]
    assert warning.startswith("learning rate: ")
    history = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    assert f"reward {history[0]['reward']:.2f} (" in line and f"{history[0]['turns/mean']:.1f} turns" in line


def called(index, name, error=None):
    """A rollout with one call. Its id is that of its number in the batch."""
    turn = Turn([index], None, "", "stop", [ToolCall(name, {})], [ToolResult("Error: down" if error else "1", error)])
    return Rollout([], [1], index, [turn], StopReason.ANSWERED)


def facts_of(*batches, max_turn_tokens=None, functions=None, metrics=None):
    args = SimpleNamespace(longest_turn=max_turn_tokens or 9, max_completion_length=9, num_generations=2)
    functions = functions or RewardFunctions([], [], 0)
    used = (torch.full((len(functions.names),), 4.0),) * 2
    layout = SimpleNamespace(metrics=SimpleNamespace(depth=DepthMetrics()))
    trainer = SimpleNamespace(args=args, reward_functions=functions, layout=layout, accelerator=None)
    trainer._metrics = {"train": metrics or {}}
    return facts_of_batches(trainer, [Batch([], 2, rollouts=rollouts, used=used) for rollouts in batches])


def test_facts_are_of_all_batches():
    """One of three tools fails."""
    first = [called(i, "search", "tool" if i % 2 else None) for i in range(4)]
    second = [called(i, name, "timeout" if name == "search" else None) for i, name in
              enumerate(["search"] * 4 + ["calculator"] * 8 + ["other"])]  # fmt: skip
    facts = {**facts_of(first, second), "has_tools": True, "temperature": 1.0}
    assert (facts["num_rollouts"], facts["tools/broken"], facts["tools/all_broken"]) == (17, 6 / 8, 0.0)
    (trouble,) = [each for each in troubles(facts) if each.name == "failing tools"]
    assert (
        trouble.text.startswith("75% of the calls that reach the tool search fail: Error: down")
        and not trouble.pointless
    )
    few = facts_of([called(i, "search", "tool") for i in range(7)])
    assert few["tools/broken"] is None and few["calls/malformed"] is None
    malformed = facts_of([called(i, "search", "call") for i in range(8)])
    assert malformed["tools/broken"] is None and malformed["calls/malformed"] == 1.0


def test_a_main_outcome_that_is_0_for_all_is_told_where_other_rewards_vary():
    def right(**kwargs):
        return []

    def calls(**kwargs):
        return []

    functions = RewardFunctions([calls, right], [1.0, 1.0], 1)
    metrics = {f"rewards/{name}/{kind}": [value] for name, kind, value in [
        ("calls", "mean", 0.5), ("calls", "std", 0.2), ("right", "mean", 0.0), ("right", "std", 0.0)]}  # fmt: skip
    metrics["rewards/right/frac_scored"] = [0.5]  # two of the four have it
    rollouts = [called(i, "search") for i in range(4)]
    (trouble,) = troubles(facts_of(rollouts, functions=functions, metrics=metrics))
    assert trouble.name == "main outcome" and trouble.text.startswith("The main outcome right is 0 for all 2 rollouts")
    metrics["rewards/right/std"] = [0.1, float("nan")]  # in the other batch nothing was scored
    assert not troubles(facts_of(rollouts, [], functions=functions, metrics=metrics))


def test_a_rollout_is_cut_off_by_one_limit():
    """By that of its turn where the completion had room left, by the completion's where it had none."""

    def cut(index, length):
        turn = Turn(list(range(length)), None, "", "length")
        return Rollout([{"role": "user", "content": "?"}], [1], index, [turn], StopReason.MAX_TOKENS)

    rollouts = [cut(0, 4), cut(1, 9), called(2, "search"), called(3, "search")]
    rollouts[0].prompt_messages.append({"role": "assistant", "content": "4"})
    facts = facts_of(rollouts, max_turn_tokens=4)
    assert facts["cut/by_turn"] == facts["prompt/ends_with_assistant"] == 0.25


def test_further_batches_have_other_prompts(tmp_path, capsys, monkeypatch):
    """TRL gives each batch as often as it is used. No weight changes."""
    (tmp_path / "constant.py").write_text(CONSTANT)
    seen, score = [], mt.MTGRPOEnvTrainer._generate_and_score_completions

    def watched(self, inputs):
        seen.append(tuple(row["question"] for row in inputs))
        return score(self, inputs)

    monkeypatch.setattr(mt.MTGRPOEnvTrainer, "_generate_and_score_completions", watched)
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_iterations": 2}
    path = recipe_file(tmp_path, save_strategy="no", reward_fn=str(tmp_path / "constant.py"), **keys)
    trainer = mt.build_trainer(*mt.parse_arguments(["--config", path]))
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    assert run_preflight(trainer) == 1 and trainer.state.global_step == 0
    assert all(torch.equal(old, new) for old, new in zip(weights, trainer.model.parameters()))
    text = capsys.readouterr().out
    assert "  1. constant rewards: " in text and len(seen) == len(set(seen)) == 4
    assert [f"Sampling batch {number} ..." in text for number in (2, 3, 4, 5)] == [True, True, True, False]


def test_the_page_has_the_table_of_readings():
    """Each name once, in the order of the code."""
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("### Readings")[2].partition("\n## ")[0]
    names = [line.strip("|").split("|")[0].strip() for line in page.splitlines() if line[:2] == "| "]
    assert names[1:] == list(dict.fromkeys(each.name for each in READINGS))


FILES = {
    "failing.py": FAILING,
    "empty.jsonl": "\n".join(json.dumps({"question": f"What is {n} * 3?", "answer": ""}) for n in range(11, 40)),
}
# Changes of the recipe, the trouble that is named first, what its text says, exit code.
BROKEN = {
    "no system role": ({}, "system prompt", "chat template with a system role", 1),
    "no tool in the prompt": ({"system_prompt": "Answer."}, "tools", "does not mention the tool calculator. .*"
                              "Write its name as it is, or {tool_descriptions}, into system_prompt", 0),
    "answers that are empty": ({"reward_fn": "rewards/information_gain.py", "dataset_name": "empty.jsonl",
                                "dataset_size": None}, "no rewards", "is a number. .*columns that", 1),
    "a failing tool": ({"tools_script": "failing.py"}, "failing tools",
                       "100% of the calls that reach the tool calculator fail: Error: no server .*Fix the", 1),
}  # fmt: skip


@pytest.mark.contract("preflight")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_recipe_names_its_cause_first(name, tmp_path, capsys):
    changes, first, says, expected = BROKEN[name]
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    changes = {key: str(tmp_path / value) if value in FILES else value for key, value in changes.items()}
    if name == "no system role":
        model = str(ROOT / "hf_recipes/tiny/calculator-model")
        changes = {"model_name_or_path": change_model(tmp_path, model, "chat_template.jinja", NO_SYSTEM)}
    code, text, found = preflight(recipe_file(tmp_path, **changes), capsys)
    assert found[:1] == [first], text
    assert re.search(rf"^  1\. {first}: .*{says}", text, re.M), text
    assert code == expected and ("Training would be pointless." in text) == bool(expected)

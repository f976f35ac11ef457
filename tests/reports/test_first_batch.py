"""--preflight on recipes that are broken on purpose, and the look at the first batch of every run."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import yaml
from test_recipes import change_model

import mt_grpo_trainer as mt
from mt_grpo.base.rows import Rows
from mt_grpo.recipe.data import empty_prompts, load_rows
from mt_grpo.recipe.refusals import text_of_cuts
from mt_grpo.reports import preflight as first_batch
from mt_grpo.reports.facts import facts_of_batches, facts_of_data, is_other_task, whole_groups
from mt_grpo.reports.preflight import FirstBatch
from mt_grpo.reports.troubles import (  # fmt: skip
    AT_LIMIT,
    CLIPPED,
    CUT,
    CUT_ALL,
    EFFECTIVE,
    ENTROPY,
    FAILED,
    FAILS,
    FAILS_ALL,
    FAILS_TOOL,
    FAR_REFERENCE,
    FEW_GROUPS,
    GAP,
    HOT,
    LORA_LR,
    LOST,
    LR,
    MIN_CALLS,
    NEVER,
    READINGS,
    REPEATED,
    ROUNDED,
    SAME,
    STUCK,
    UNSOLVED,
    troubles,
)
from mt_grpo.rollout import Rollout, StopReason, ToolCall, ToolResult, Turn
from mt_grpo.training.batch import Batch
from mt_grpo.training.rewards import RewardFunctions

pytestmark = pytest.mark.servers  # a group of scripts/test.sh

ROOT = Path(__file__).resolve().parents[2]
CALCULATOR = ROOT / "hf_recipes/tiny/calculator.yaml"
CONSTANT = (
    "def constant(rollout_turns, **kwargs):\n    return [0.3] * len(rollout_turns)\nOUTCOME_REWARD_FUNCS = [constant]"
)
OF_TURNS = (
    "def constant(rollout_turns, **kwargs):\n    return [0.3] * len(rollout_turns)\n"
    "def lengths(rollout_turns, **kwargs):\n    return [[len(t.token_ids) / 9 for t in r] for r in rollout_turns]\n"
    "OUTCOME_REWARD_FUNCS, TURN_REWARD_FUNCS = [constant], [lengths]"
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
UNSURE_TOOL = FAILING.replace(
    '    raise ConnectionError("no server at 127.0.0.1:9")\n',
    '    if next(CALLS) % 3:\n        raise ConnectionError("busy")\n    return "1"\n',
).replace("\ndef", "\nimport itertools\n\nCALLS = itertools.count()\n\n\ndef", 1)
# Leaves system messages out.
NO_SYSTEM = (
    "{% for message in messages if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def project_folder(monkeypatch):
    monkeypatch.chdir(ROOT)


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
    """(exit code, what is printed, names of the troubles but for the two groups a step of the recipes here)."""
    with pytest.raises(SystemExit) as ended:
        mt.main(["--config", path, "--preflight"])
    text = capsys.readouterr().out
    return ended.value.code, text, re.findall(r"^  \d+\. (?!few groups)(.*?):", text, re.M)


@pytest.mark.contract("preflight")
def test_a_recipe_that_is_well(tmp_path, capsys):
    """It says what will happen, and writes nothing."""
    code, text, found = preflight(recipe_file(tmp_path), capsys)
    assert (code, found) == (0, []) and "few groups: An optimizer step has 2 groups of rollouts" in text
    assert "a batch  2 prompts x 8 rollouts = 16 = 16 per device x 1 rank x 1; 1 optimizer step from each" in text
    assert "an epoch  1,024 batches = 16,384 rollouts = 1,024 optimizer steps; the run: 75 optimizer steps" in text
    assert "904,576 parameters, 904,576 of them trained, kept as float32, computed in float32" in text
    assert "tokens of 1024; a turn has at most 64, a result 48, a conversation 2 observations" in text
    assert "<|im_start|>system\nUse the calculator, then answer.<|im_end|>\n<|im_start|>user\nWhat is" in text
    assert re.search(r"^16 rollouts, [12]\.\d turns, \d+% call a tool, .* of the groups without signal$", text, re.M)
    assert re.search(
        r"^seconds: rollouts \d+\.\d \(tools .*, training \d+\.\d per optimizer step; \d+ tok", text, re.M
    )
    assert re.search(r"^the run: about \d+ (s|min) if", text, re.M)
    assert not (tmp_path / "out").exists()


def random_state():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("changes, code", [({}, 0), ({"reward_fn": "constant.py"}, 1)])  # the second one goes on
def test_it_changes_neither_the_weights_nor_the_random_state(changes, code, tmp_path):
    (tmp_path / "constant.py").write_text(CONSTANT)
    changes = {key: str(tmp_path / value) for key, value in changes.items()}
    trainer = mt.build_trainer(*mt.parse_arguments(["--config", recipe_file(tmp_path, save_strategy="no", **changes)]))
    before, weights = random_state(), [p.detach().clone() for p in trainer.model.parameters()]
    assert first_batch.run_preflight(trainer) == code
    assert random_state() == before and trainer.state.global_step == 0
    assert all(torch.equal(old, new) for old, new in zip(weights, trainer.model.parameters()))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_every_run_opens_with_a_look_at_its_first_batch(tmp_path, capsys, caplog, monkeypatch):
    """Once, of the rollouts that it trains on; it draws no random number, and says what means trouble."""
    path, looked = recipe_file(tmp_path, max_steps=2, learning_rate=0.02), []
    look = FirstBatch.on_pre_optimizer_step

    def watched(self, *given, **more):
        before = random_state()
        look(self, *given, **more)
        looked.append(random_state() == before)

    monkeypatch.setattr(FirstBatch, "on_pre_optimizer_step", watched)
    mt.main(["--config", path])
    assert looked == [True, True]
    (line,) = re.findall(r"^first batch: (16 rollouts, .*)$", capsys.readouterr().out, re.M)
    (warning,) = [record.getMessage() for record in caplog.records if "learning_rate is 0.02" in record.getMessage()]
    assert warning.startswith("learning rate: ")
    history = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    assert f"reward {history[0]['reward']:.2f} (" in line and f"{history[0]['turns/mean']:.1f} turns" in line


def test_a_group_counts_where_it_is_whole():
    """The rollouts of a rank may begin and end within one."""
    rollouts = [SimpleNamespace(index=index) for index in range(3, 9)]
    assert [[r.index for r in group] for group in whole_groups(rollouts, 4)] == [[4, 5, 6, 7]]
    assert whole_groups(rollouts[:1], 2) == []


def called(index, name, error=None):
    """A rollout with one call. Its id is that of its number in the batch."""
    turn = Turn([index], None, "", "stop", [ToolCall(name, {})], [ToolResult("Error: down" if error else "1", error)])
    return Rollout([], [1], index, [turn], StopReason.ANSWERED)


def facts_of(*batches, max_turn_tokens=None):
    args = SimpleNamespace(longest_turn=max_turn_tokens or 9, max_completion_length=9, num_generations=2,
                           generation_batch_size=4, credit_assignment="mt_grpo")  # fmt: skip
    batches = [Batch([], 2, rollouts=rollouts, used=(torch.zeros(0), torch.zeros(0))) for rollouts in batches]
    return facts_of_batches(args, {}, RewardFunctions([], [], 0), batches)


def test_facts_are_of_all_batches():
    """One of three tools fails. Groups of different batches are other groups, though their numbers are the same."""
    first = [called(i, "search", "tool" if i % 2 else None) for i in range(4)]
    second = [called(i, name, "timeout" if name == "search" else None) for i, name in
              enumerate(["search"] * 4 + ["calculator"] * 8 + ["other"])]  # fmt: skip
    facts = {**facts_of(first, second), "has_tools": True, "temperature": 1.0}
    assert (facts["num_rollouts"], facts["groups/identical"]) == (8, 0.0)
    assert (facts["tools/broken"], facts["tools/all_broken"]) == (6 / 8, 0.0)
    (trouble,) = [each for each in troubles(facts) if each.name == "failing tools"]
    assert (
        trouble.text.startswith("75% of the calls that reach the tool search fail: Error: down")
        and not trouble.pointless
    )
    few = facts_of([called(i, "search", "tool") for i in range(7)])
    assert few["tools/broken"] is None and few["calls/malformed"] is None
    malformed = facts_of([called(i, "search", "call") for i in range(8)])
    assert malformed["tools/broken"] is None and malformed["calls/malformed"] == 1.0


def test_an_error_that_ended_no_rollout_is_no_failure():
    """An answer may have an error beside it, as of an agent that ended late. What failed stands behind it here."""
    beside, failed = called(0, "search"), called(1, "search")
    beside.error = RuntimeError("closed late")
    assert facts_of([beside])["frequent/failure"] == ""
    failed.error, failed.stop_reason = RuntimeError("no display"), StopReason.ENVIRONMENT_ERROR
    assert facts_of([beside, failed])["frequent/failure"] == ": no display"


def test_the_most_frequent_kind_of_error_is_shown():
    """Not the first one. Names and numbers make no kind of their own."""
    texts = ["the call is not valid JSON (char 3)", *(f"unknown tool 'search{i}'. Known: wiki" for i in range(5))]
    rollouts = [called(i, "search", "call") for i in range(8)]
    for rollout, text in zip(rollouts, [*texts, "the call is not valid JSON (char 9)", "no name"]):
        rollout.turns[0].results = [ToolResult(f"Error: {text}", "call")]
    facts = facts_of(rollouts)
    assert facts["frequent/call_error"] == "Error: unknown tool 'search0'. Known: wiki (5 of 8 errors)"
    assert facts["calls/failed"] == 1.0


def test_a_main_outcome_that_is_0_for_all_is_told_where_other_rewards_vary():
    def right(**kwargs):
        return []

    def calls(**kwargs):
        return []

    functions = RewardFunctions([calls, right], [1.0, 1.0], 1)
    metrics = {f"rewards/{name}/{kind}": [value] for name, kind, value in [
        ("calls", "mean", 0.5), ("calls", "std", 0.2), ("right", "mean", 0.0), ("right", "std", 0.0)]}  # fmt: skip
    args = SimpleNamespace(longest_turn=9, max_completion_length=9, num_generations=2, generation_batch_size=4,
                           credit_assignment="mt_grpo")  # fmt: skip
    metrics["rewards/right/frac_scored"] = [0.5]  # two of the four have it
    used = torch.tensor([4, 4]), torch.tensor([4, 4])
    batches = [Batch([], 2, rollouts=[called(i, "search") for i in range(4)], used=used)]
    (trouble,) = troubles({**facts_of_batches(args, metrics, functions, batches), "has_tools": True})
    assert trouble.name == "main outcome" and trouble.text.startswith("The main outcome right is 0 for all 2 rollouts")
    metrics["rewards/right/std"] = [0.1]
    assert not troubles({**facts_of_batches(args, metrics, functions, batches), "has_tools": True})


def test_a_prompt_may_end_with_an_assistants_message_by_mistake():
    rollouts = [called(i, "search") for i in range(4)]
    for rollout in rollouts:
        rollout.prompt_messages.append({"role": "user", "content": "?"})
    rollouts[3].prompt_messages.append({"role": "assistant", "content": "4"})
    assert facts_of(rollouts)["prompt/ends_with_assistant"] == 0.25


def test_a_run_that_goes_through_few_rows_often_is_told():
    """Prompts are counted, and rows where an environment reads more of them than the prompt."""
    args = SimpleNamespace(generation_batch_size=16, num_generations=8, steps_per_generation=2, num_iterations=2,
                           gradient_accumulation_steps=1, max_steps=160, num_train_epochs=3)  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": "?"}], "id": i} for i in range(4)]  # 40 batches of 2 prompts
    assert facts_of_data(Rows(rows), args, False) == {"data/different": 1, "data/passes": 80.0}
    assert facts_of_data(Rows(rows), args, True) == {"data/different": 4, "data/passes": 20.0}
    assert facts_of_data(Rows([{"seed": i} for i in range(40)]), args, True)["data/passes"] < REPEATED
    assert facts_of_data(empty_prompts(2), args, True) == {}
    args.max_steps = -1  # 3 epochs of 2 batches
    assert facts_of_data(Rows(rows), args, True) == {"data/different": 1, "data/passes": 12.0}


def test_what_is_sampled_otherwise_matters_to_importance_ratios_alone():
    """These are between a server's logprobs and the trainer's."""
    given = {"top_p": 0.9, "generation_kwargs": {"min_tokens": 4}}

    def text(use_vllm, corrects):
        return text_of_cuts(SimpleNamespace(use_vllm=use_vllm, vllm_importance_sampling_correction=corrects, **given))

    assert text(True, True) == "top_p=0.9, min_tokens=4"
    assert text(False, True) == text(True, False) == text(False, False) == ""


def test_a_rollout_is_cut_off_by_one_limit():
    """By that of its turn where the completion had room left, by the completion's where it had none."""

    def cut(index, length):
        turn = Turn(list(range(length)), None, "", "length")
        return Rollout([], [1], index, [turn], StopReason.MAX_TOKENS)

    rollouts = [cut(0, 4), cut(1, 9), called(2, "search"), called(3, "search")]
    facts = facts_of(rollouts, max_turn_tokens=4)
    assert (facts["cut/by_turn"], facts["cut/by_completion"], facts["rollouts/ended"]) == (0.25, 0.25, 0.5)


def test_a_preflight_of_a_checkpoint_is_refused(tmp_path):
    flags = ["--config", recipe_file(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)]
    mt.main(flags)
    with pytest.raises(SystemExit, match="error: --preflight checks the model of model_name_or_path"):
        mt.main([*flags, "--preflight", "--resume_from_checkpoint", str(tmp_path / "out/checkpoint-1")])


def test_further_batches_have_other_prompts(tmp_path, capsys, monkeypatch):
    """TRL gives each batch as often as it is used."""
    (tmp_path / "constant.py").write_text(CONSTANT)
    seen, score = [], mt.MTGRPOEnvTrainer._generate_and_score_completions

    def watched(self, inputs):
        seen.append(tuple(row["question"] for row in inputs))
        return score(self, inputs)

    monkeypatch.setattr(mt.MTGRPOEnvTrainer, "_generate_and_score_completions", watched)
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_iterations": 2}
    code, text, found = preflight(recipe_file(tmp_path, reward_fn=str(tmp_path / "constant.py"), **keys), capsys)
    assert (code, found) == (1, ["constant rewards"]) and len(seen) == len(set(seen)) == 4
    assert [f"Sampling batch {number} ..." in text for number in (2, 3, 4, 5)] == [True, True, True, False]


def test_a_bundled_models_own_recipes_ask_what_it_was_trained_on():
    models = set()
    for path in CALCULATOR.parent.glob("*.yaml"):
        recipe = yaml.safe_load(path.read_text())
        model, name = recipe["model_name_or_path"], recipe.get("dataset_name", "seeds")
        models.add(model)
        for row in load_rows(name, "train", 20, needs_prompt=False) if name != "seeds" else []:
            assert not is_other_task(model, row["prompt"][-1]["content"] if "prompt" in row else "")
        assert is_other_task(model, "Who wrote Hamlet?") and not is_other_task(model, "")
    assert len(models) == 9 and not is_other_task("Qwen/Qwen3-1.7B", "Who wrote Hamlet?")


def test_a_report_that_fails_ends_no_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(first_batch, "facts_of_batches", lambda *batches: 1 / 0)
    mt.main(["--config", recipe_file(tmp_path, max_steps=1)])
    assert "first batch failed: ZeroDivisionError: division by zero" in caplog.text
    assert (tmp_path / "out/trainer_state.json").exists()


def test_the_page_has_the_table_of_readings():
    """Each name once, in the order of the code, with its thresholds."""
    page = (ROOT / "docs/preflight.md").read_text().partition("## Readings")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    assert [row[0] for row in rows[1:]] == list(dict.fromkeys(each.name for each in READINGS))
    values = {
        "learning rate": [LR, 0, LORA_LR], "temperature": [HOT], "failures": [FAILED, CUT_ALL],
        "agent time": [FAILED, CUT_ALL], "effective share": [EFFECTIVE],
        "identical rollouts": [SAME], "rounding": [ROUNDED],
        "cut off by max_turn_tokens": [CUT, CUT_ALL], "cut off": [CUT, CLIPPED, CUT_ALL], "context": [CUT, CUT_ALL],
        "failing tools": [FAILS_TOOL, MIN_CALLS, FAILS_ALL], "malformed calls": [FAILS, MIN_CALLS, FAILS_ALL],
        "few rows": [REPEATED], "few groups": [FEW_GROUPS],
        "no calls": [NEVER], "no answers": [NEVER],
        "turns at the limit": [AT_LIMIT], "logprobs": [GAP], "kl": [FAR_REFERENCE], "outcome": [LOST],
        "entropy": [ENTROPY, STUCK, UNSOLVED],
    }  # fmt: skip
    for name, *cells in rows[1:]:
        text = re.sub(r"\S*\.md\S*|bfloat16", "", " ".join(cells))
        numbers = re.findall(r"([\d.]+)(%?)", text)
        assert [float(number) / (100 if percent else 1) for number, percent in numbers] == values.get(name, []), name


def broken(name, folder):
    """(changes of the recipe, the trouble that is named first, what its text says, exit code)."""
    if name == "no system role":
        model = change_model(folder, str(ROOT / "hf_recipes/tiny/calculator-model"), "chat_template.jinja", NO_SYSTEM)
        return {"model_name_or_path": model}, "system prompt", "chat template with a system role", 1
    (folder / "constant.py").write_text(CONSTANT)
    empty = [json.dumps({"question": f"What is {n} * 3?", "answer": ""}) for n in range(11, 40)]
    (folder / "empty.jsonl").write_text("\n".join(empty))
    (folder / "of_turns.py").write_text(OF_TURNS)
    (folder / "failing.py").write_text(FAILING)
    (folder / "compute.py").write_text(FAILING.replace("calculator", "compute"))
    (folder / "unsure.py").write_text(UNSURE_TOOL)
    return {
        "too short": ({"max_completion_length": 3, "max_turn_tokens": None}, "cut off",
                      "of the rollouts are cut off at max_completion_length=3. .*Raise max_completion_length", 1),
        "too short turns": ({"max_turn_tokens": 12}, "cut off by max_turn_tokens",
                            "cut off at max_turn_tokens=12. .*Raise max_turn_tokens", 0),
        "no tool in the prompt": ({"system_prompt": "Answer."}, "tools", "does not mention the tool calculator. .*"
                                  "Write its name as it is, or {tool_descriptions}, into system_prompt", 0),
        "another name": ({"tools_script": str(folder / "compute.py")}, "tools",
                         "does not mention the tool compute. (?s:.*)malformed calls: .* unknown tool "
                         r"'calculator'. Known tools: compute \(\d+ of \d+ errors\)", 1),
        "a constant reward": ({"reward_fn": str(folder / "constant.py")}, "constant rewards",
                              "the same for all rollouts: constant 0.3. .*Look how the functions compare answers", 1),
        "answers that are empty": (
            {"reward_fn": "rewards/information_gain.py", "dataset_name": str(folder / "empty.jsonl"),
             "dataset_size": None}, "no rewards", "to any rollout. .*columns that the functions read", 1),
        "turn rewards that nothing uses": (
            {"reward_fn": str(folder / "of_turns.py"), "credit_assignment": "outcome"}, "unused rewards",
            "No number of lengths moves an advantage with credit_assignment=outcome. .*Choose another", 1),
        "a failing tool": ({"tools_script": str(folder / "failing.py")}, "failing tools",
                           "100% of the calls that reach the tool calculator fail: Error: no server at 127.0.0.1:9 "
                           ".*Fix the", 1),
        "two of three calls fail": ({"tools_script": str(folder / "unsure.py"), "per_device_train_batch_size": 64},
                                    "failing tools",
                                    "[67]\\d% of the calls that reach the tool calculator fail: Error: busy", 0),
        "no learning rate": ({"learning_rate": 0.0}, "learning rate", "learning_rate is 0. No weight changes", 1),
        "too hot": ({"temperature": 1.6}, "temperature", "temperature is 1.6. .*Set temperature: 1.0", 0),
        "a learning rate of 1": ({"learning_rate": 1.0}, "learning rate", "learning_rate is 1. .*Set learn", 1),
        "no temperature": ({"temperature": 0.01}, "identical rollouts",
                           "at temperature=0.01. .*Set temperature: 1.0", 1),
        "a bundled model of another task": ({"dataset_name": "chain"}, "bundled model",
                                            "trained for the format and the task of its own recipe .*SmolLM2", 1),
        "one choice": ({"top_k": 1}, "identical rollouts", "look whether top_k, top_p or min_p leave one", 1),
    }[name]  # fmt: skip


NAMES = ["no system role", "too short", "too short turns", "no tool in the prompt", "another name",
         "a constant reward", "answers that are empty", "turn rewards that nothing uses", "a failing tool",
         "two of three calls fail", "no learning rate", "too hot",
         "a learning rate of 1", "no temperature", "a bundled model of another task", "one choice"]  # fmt: skip


@pytest.mark.contract("preflight")
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_recipe_names_its_cause_first(name, tmp_path, capsys):
    changes, first, says, expected = broken(name, tmp_path)
    code, text, found = preflight(recipe_file(tmp_path, **changes), capsys)
    assert found[:1] == [first], text
    assert re.search(rf"^  1\. {first}: .*{says}", text, re.M), text
    assert code == expected and ("Training would be pointless." in text) == bool(expected)

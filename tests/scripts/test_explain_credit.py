"""explain_credit.py: a real group against the trainer's own tensors, and hand-written groups for text and page."""

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import explain_credit as ex
import pytest
from explain_credit import GroupCredit
from project import ROOT
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.recipe.data import make_arithmetic
from mt_grpo.reports.rollout_log import token_texts

RECIPE = "hf_recipes/tiny/calculator.yaml"
EVIL = '</span><script>alert(1)</script><img src=x onerror="alert(2)">\'" &lt;b&gt; --> \x1b[31m\x00\u202e\ud800'


def data_of(page):
    """What a page shows."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def tokens_of(row):
    """(id, in the loss, advantage) of every token of a row, in order; what was read has no advantage."""
    return [
        token
        for turn in row["turns"]
        for token in (*zip(turn["token_ids"], turn["loss_mask"], turn["advantages"], strict=True),
                      *((read, 0, None) for read in turn["read_ids"]))
    ]  # fmt: skip


def turn(text, tokens=(), advantage=0.0, read=(), trained=True, results=()):
    """A turn of a row of the log."""
    return {"text": text, "num_tokens": len(tokens), "num_trained": len(tokens) * trained, "calls": [],
            "results": [{"error": error, "text": said} for error, said in results], "observation": None,
            "seconds": 0.0, "token_ids": list(range(len(tokens))), "token_texts": list(tokens), "logprobs": None,
            "loss_mask": [int(trained)] * len(tokens), "advantages": [advantage] * len(tokens),
            "trainer_logprobs": None, "read_ids": list(range(len(read))), "read_texts": list(read)}  # fmt: skip


def logged(*turns, **more):
    """A row of the log."""
    return {"schema": 1, "messages": [{"role": "user", "content": "What is 2 + 2?"},
                                      {"role": "assistant", "content": turns[0]["text"]}],
            "turns": [*turns], "group": 0, "stop_reason": "answered", "reward": 1.0, "rewards": {},
            "turn_rewards": [None] * len(turns), "turn_advantages": [each["advantages"][0] for each in turns],
            "num_tokens": 3, "policy_version": 0, "num_prompt_messages": 1, **more}  # fmt: skip


def group(**changes):
    """Two rollouts: one called a tool, one did not."""
    failed = [("call", "no\nsuch tool")]
    called = logged(
        turn("<tool>{}\nthen</tool>", ["<tool>", "\n"], 2.0, ["<|im_end|>"], results=failed),
        turn("<answer>4</answer>", ["4"], 0.5),
        reward=1.7,
        rewards={"exact_match": 1.0, "style": None, "step": 0.25},
        turn_rewards=[0.5, None],
        outcome_advantage=0.75,
    )
    silent = logged(
        turn("4", ["4"], -0.5),
        turn("5", ["5"], -0.5, trained=False),
        stop_reason="no_tool_call",
        reward=None,
        rewards={"exact_match": 0.0, "style": None, "step": None},
    )
    settings = [("gold answer", "4"), ("credit", "credit_assignment mt_grpo"), ("rollouts from", "training row 0")]
    weights = {"exact_match": 1.0, "style": 1.0, "step": 2.0}
    whole = GroupCredit("What is 2 + 2?", settings, weights, [called, silent], [])
    return dataclasses.replace(whole, **changes)


# --- a real group ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`main` on the bundled model: the trainer, what its step returned, the page and what was printed."""
    path, seen = tmp_path_factory.mktemp("page") / "new" / "credit.html", SimpleNamespace()
    build = mt.build_trainer

    def spy(*recipe):
        seen.trainer = build(*recipe)
        step = seen.trainer._generate_and_score_completions

        def record(inputs):
            seen.inputs, seen.output = inputs, step(inputs)
            return seen.output

        seen.trainer._generate_and_score_completions = record
        return seen.trainer

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(ROOT)
        patch.setattr(mt, "build_trainer", spy)
        patch.setenv("COLUMNS", "110")
        ex.main(["--config", RECIPE, "--output", str(path), "--row", "0"])
    seen.printed, seen.data = printed.getvalue(), data_of(path.read_text(encoding="utf-8"))
    seen.rows = [item["row"] for item in seen.data["rollouts"]]
    return seen


def test_one_group_is_rolled_out_and_the_recipe_is_left_alone(run):
    assert [row["question"] for row in run.inputs] == ["What is 99 - 55 * 7?"] * 8
    assert len({tuple(rollout.prompt_ids) for rollout in run.trainer.batch.rollouts}) == 1
    assert run.trainer._metrics["train"]["turns/mean"] and not run.trainer._metrics["eval"]
    folder = Path(run.trainer.args.output_dir)  # a temporary one, gone by now
    assert folder.name.startswith("explain-credit-") and not folder.exists()


@pytest.mark.contract("explain_credit")
def test_every_token_of_the_page_is_the_trainers(run):
    rollouts, advantages = run.trainer.batch.rollouts, run.output["advantages"]
    assert any(-1 in rollout.turn_ids for rollout in rollouts)  # else nothing below is about the environment
    assert (advantages > 0).any() and (advantages < 0).any()
    assert len(run.rows) == len(rollouts) == 8
    for i, (rollout, row) in enumerate(zip(rollouts, run.rows, strict=True)):
        expected = [
            (token, int(turn >= 0), advantages[i, k].item() if turn >= 0 else None)
            for k, (token, turn) in enumerate(zip(rollout.completion_ids, rollout.turn_ids, strict=True))
        ]
        assert tokens_of(row) == expected
        assert row["turn_advantages"] == [
            advantages[i, rollout.turn_ids.index(k)].item() for k in range(len(rollout.turns))
        ]
    assert (run.data["start"], run.data["served"]) == ("group/0/0", False)


@pytest.mark.contract("explain_credit")
def test_the_text_has_every_turn_with_its_advantage(run):
    lines = run.printed.splitlines()
    assert lines[:3] == [
        "question       What is 99 - 55 * 7?",
        "gold answer    -286",
        "credit         credit_assignment mt_grpo, turn_advantage_coef 1, scale_rewards group",
    ]
    assert "\x1b" not in run.printed and max(map(len, lines)) <= 110
    turns = [re.fullmatch(r" +(\d+) +(\S+) +([+-]?\d+\.\d\d)  (.*)", line) for line in lines]
    turns = [(int(m[1]), m[2], float(m[3])) for m in turns if m]
    expected = []
    for i, rollout in enumerate(run.trainer.batch.rollouts):
        assert f"rollout {i}  {rollout.stop_reason}" in lines
        for k in range(len(rollout.turns)):
            advantage = run.output["advantages"][i, rollout.turn_ids.index(k)].item()
            expected.append((k, "-", pytest.approx(advantage, abs=6e-3)))
    assert turns == expected
    results = [result for row in run.rows for turn in row["turns"] for result in turn["results"]]
    assert run.printed.count("-> ") == len(results) > 0
    assert "exact_match_reward_func 1.00" in run.printed


def test_rows_and_settings_can_be_chosen_and_masked_rollouts_are_shown():
    shown = ex.explain(RECIPE, 3, ["--credit_assignment", "outcome", "--num_generations=4", "--outcome_reward_weights",
                                   "1", "2"])  # fmt: skip
    row, settings = make_arithmetic(4, seed=0)[3], dict(shown.settings)
    assert (shown.question, settings["gold answer"]) == (row["question"], row["answer"])
    assert "training row 3" in settings["rollouts from"] and "credit_assignment outcome" in settings["credit"]
    assert len(shown.rows) == 4 and list(shown.weights.items())[1] == ("answer_given_reward_func", 2)
    for row in shown.rows:
        assert len(set(row["turn_advantages"])) == 1  # outcome only: turns are not told apart
        weighted = [weight * (row["rewards"][name] or 0.0) for name, weight in shown.weights.items()]
        assert row["reward"] == pytest.approx(sum(weighted))
    assert "answer_given_reward_func (weight 2) " in ex.render_text(shown, 500)
    shown = ex.explain(RECIPE, 0, ["--mask_truncated_completions", "true", "--max_completion_length", "3"])
    assert {row["stop_reason"] for row in shown.rows} == {"max_tokens"}
    tokens = [token for row in shown.rows for token in tokens_of(row)]
    assert len(tokens) == 3 * 8 and not any(trained for _, trained, _ in tokens)
    assert ex.render_text(shown).count("   0       -          -        -       -  ") == 8
    assert [note for note in shown.notes if "mask_truncated_completions" in note] and len(shown.notes) == 1


def test_a_group_without_signal_says_why():
    """Turn rewards that differ and move nothing are not called equal."""
    credit = {"credit_assignment": "outcome", "scale_rewards": "group"}
    one, other = (logged(turn("4", ["4"]), rewards={"right": 0.3}, turn_rewards=[number]) for number in (0.1, 0.2))
    assert ex.notes([one, other], credit, ["lengths"]) == [
        "Nothing that lengths gave moves an advantage with outcome.",
        "Every advantage is 0, though the rewards differ: what is compared with each other is the same. "
        "Nothing is learned.",
    ]
    same = "Every advantage is 0, since the rewards are the same for all rollouts. Nothing is learned."
    assert ex.notes([one, one], credit, []) == [same]


# --- settings and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["generation_batch_size: 32", "steps_per_generation: 2"])
def test_a_recipe_that_writes_evaluates_and_pushes_does_none_of_it(size, monkeypatch, tmp_path, caplog):
    lines = (ROOT / RECIPE).read_text().replace('save_strategy: "no"', "save_strategy: steps").splitlines()
    lines = [line for line in lines if not line.startswith("per_device_train_batch_size")]
    lines += [
        size, "per_device_train_batch_size: 16", "eval_strategy: steps", "eval_steps: 10", "save_steps: 10",
        "dataset_test_split: test[:8]", "load_best_model_at_end: true",
        "metric_for_best_model: reward", "push_to_hub: true", "log_completions: true",
    ]  # fmt: skip
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    mt.parse_arguments(["--config", str(tmp_path / "recipe.yaml")])  # trains as it stands
    script_args, args, _ = ex.group_recipe(str(tmp_path / "recipe.yaml"), [], str(tmp_path / "elsewhere"))
    assert "given 2 times" not in caplog.text  # nothing is said of what this program itself sets
    assert (args.generation_batch_size, args.steps_per_generation, args.num_generations) == (8, 1, 8)
    assert (args.eval_strategy, args.save_strategy) == ("no", "no")
    assert not (args.push_to_hub or args.load_best_model_at_end or args.log_completions)
    assert args.log_rollouts >= args.num_generations and args.log_rollout_tokens  # into a folder that is deleted
    assert args.output_dir == str(tmp_path / "elsewhere")


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_as_text(random_model):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    ids = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2  # bytes, neither of which is a character
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert token_texts(tokenizer, [*ids, end]) == ["\ufffd", "\ufffd", "<|im_end|>"]
    pieces = {1: "\u2581the", 2: "the", 3: None}
    tokenizer = SimpleNamespace(
        decode=lambda ids, **_: {1: "the", 2: "the", 3: "?"}[ids[0]], convert_ids_to_tokens=pieces.get
    )
    assert token_texts(tokenizer, [1, 2, 3]) == [" the", "the", "?"]


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_text_of_a_group():
    lines = ex.render_text(group(notes=["Mind this."]), width=60).splitlines()
    assert lines[6] in (ROOT / "docs/choosing_credit.md").read_text().splitlines()
    assert lines == [
        "question       What is 2 + 2?",
        "gold answer    4",
        "credit         credit_assignment mt_grpo",
        "rollouts from  training row 0",
        "note           Mind this.",
        "",
        "turn  reward  advantage  outcome    turn  text, and what the environment said",
        "",
        "rollout 0  answered",
        "      reward  1.70 = exact_match 1.00, style -, step (weight",
        "              2) 0.25",
        "   0    0.50      +2.00    +0.75   +1.25  <tool>{}↵then</to…",
        "                                          -> call error: no…",
        "   1       -      +0.50    +0.75   -0.25  <answer>4</answer>",
        "",
        "rollout 1  no_tool_call",
        "      reward  - = exact_match 0.00, style -, step (weight 2)",
        "              -",
        "   0       -      -0.50        -       -  4",
        "   1       -          -        -       -  5",
    ]


def test_model_text_cannot_bring_control_characters():
    evil = logged(turn(EVIL, ["x"], 1.0, results=[(None, EVIL)]), turn("", ["x"], -1.0))
    shown = group(question=EVIL, settings=[("gold answer", EVIL)], rows=[evil, group().rows[1]])
    plain = ex.render_text(shown, 300)
    assert not set("\x1b\x00\u202e\ud800") & set(plain) and "␛[31m␀⟨U+202E⟩⟨U+D800⟩" in plain

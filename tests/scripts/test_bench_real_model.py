"""The report of the study of the real model, from made-up results."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import real_model as bench  # noqa: E402
from bench.common import markers  # noqa: E402

CONVERSATION = {
    "messages": [{"role": "user", "content": "Who led?"}, {"role": "assistant", "content": "<answer>Rollo</answer>"}],
    "calls": [], "answer": "Rollo", "stop_reason": "answered", "rewards": {"exact_match_reward_func": 1.0},
}  # fmt: skip


def found(exact):
    return {
        "tool_executed": 0.5, "result_found": 0.25, "exact_match": exact, "mean_turns": 2.0,
        "rewards": {"outcome": {"f1_reward_func": exact / 4, "right_sentence_reward_func": 0.12}},
        "behaviour": {"calls": 1.0, "question_in_query": 0.5, "answered": 1.0, "answer_words": 2.5},
        "conversations": [CONVERSATION],
    }  # fmt: skip


def run(method, seed, exact, **changes):
    curve = [{"step": k, "rewards/exact_match_reward_func/mean": exact * k / 3, "num_tokens": 1000.0 * k,
              "rewards/answer_in_search_results_reward_func/mean": 0.25} for k in (1, 2, 3)]  # fmt: skip
    after = {"sampled": found(exact), "greedy": found(exact + 0.1), "perplexity": 12.0 + seed}
    return {"method": method, "seed": seed, "steps": 3, "after": after, "seconds": 600.0 + 60 * seed,
            "inputs": "made up", "resumed": False, "curve": curve, **changes}  # fmt: skip


@pytest.fixture
def results():
    before = {"sampled": found(0.0), "greedy": found(0.1), "perplexity": 11.0, "inputs": "made up"}
    return {
        "machine": {"cpu": "a processor", "cores": 2}, "before": before,
        "runs": [run("outcome", 0, 0.2), run("outcome", 1, 0.4), run("mt_grpo", 0, 0.3), run("mt_grpo", 1, 0.5)],
    }  # fmt: skip


def test_the_table_has_means_over_seeds_and_their_interval(results):
    lines = bench.section(results).splitlines()
    assert lines[0] == "| sampled | before | `outcome` | `mt_grpo` |"
    # Two values 0.2 apart: t is 12.706, and the standard error 0.1.
    assert "| exact match | 0.00 | 0.30 ± 1.27 | 0.40 ± 1.27 |" in lines
    assert "| exact match | 0.10 | 0.40 ± 1.27 | 0.50 ± 1.27 |" in lines  # greedy
    assert "| F1 | 0.00 | 0.15 ± 0.64 | 0.20 ± 0.64 |" in lines  # the reward is half of F1
    assert "| answer out of the right sentence | 0.40 | 0.40 ± 0.00 | 0.40 ± 0.00 |" in lines  # it pays 0.3
    assert "| words of an answer | 2.50 | 2.50 ± 0.00 | 2.50 ± 0.00 |" in lines
    # Perplexities 12 and 13 of both.
    read = "11.00 before, 12.50 ± 6.35 after `outcome`, 12.50 ± 6.35 after `mt_grpo`."
    assert any(line.endswith(read) for line in lines)
    costs = next(line for line in lines if "held-out questions, 1 sample" in line)
    assert costs.endswith(
        "`outcome`: seeds 0, 1; `mt_grpo`: seeds 0, 1. 3 steps of 32 rollouts in 10 to 11 minutes with the server's "
        "start, 3,000 tokens, on 2 cores (a processor)."
    )
    assert "ended  answered; exact_match_reward_func 1" in bench.section(results)


def test_methods_are_compared_in_pairs_of_seeds(results):
    """Each pair differs by 0.1, so the interval is none; a seed that one of them lacks is in no pair."""
    results["runs"].append(run("mt_grpo", 2, 0.9))
    text = bench.section(results)
    assert "`mt_grpo` minus `outcome`, in pairs of 2 seeds:" in text
    assert "| exact match | +0.10 ± 0.00 | +0.10 ± 0.00 |" in text
    results["runs"] = [run("outcome", 0, 0.2), run("mt_grpo", 1, 0.3)]
    assert "minus" not in bench.section(results)


def test_of_one_seed_there_is_no_interval_and_a_resumed_run_has_no_time(results):
    results["runs"] = [run("mt_grpo", 0, 0.3), run("mt_grpo", 1, 0.3, resumed=True)]
    assert "in 10 minutes" in bench.section(results)
    results["runs"] = results["runs"][:1]
    assert "| exact match | 0.00 | 0.30 |" in bench.section(results) and "`mt_grpo`: seed 0." in bench.section(results)


@pytest.fixture
def study(results, tmp_path, monkeypatch):
    """The folder of a study whose runs are finished."""
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    monkeypatch.setattr(bench, "prepare", lambda: None)
    monkeypatch.setattr(bench, "inputs", lambda: "made up")
    for name in ("results", "picture", "page"):
        monkeypatch.setattr(
            bench.FRAME, name, tmp_path / {"results": "r.json", "picture": "p.png", "page": "p.md"}[name]
        )
    (tmp_path / "before.json").write_text(json.dumps(results["before"]))
    for each in results["runs"]:
        path = tmp_path / f"{bench.name_of(each['method'], each['seed'], 3)}.json"
        path.write_text(json.dumps(each))
    (tmp_path / "p.md").write_text("\n".join(markers("real_model")))
    return tmp_path


def test_finished_runs_are_not_run_again(study):
    """A file of a run, and of what was before, is taken as it is; the report also has those not asked for."""
    pytest.importorskip("matplotlib")
    bench.main(["--seeds", "0", "--steps", "3"])
    kept = json.loads((study / "r.json").read_text())
    assert [(each["method"], each["seed"]) for each in kept["runs"]] == [
        ("outcome", 0), ("outcome", 1), ("mt_grpo", 0), ("mt_grpo", 1)
    ]  # fmt: skip
    assert "| exact match | 0.00 | 0.30 ± 1.27" in (study / "p.md").read_text() and (study / "p.png").is_file()


def test_results_of_another_recipe_are_refused(study, monkeypatch):
    """Also the folder of a run that was stopped: its checkpoints are of that recipe."""
    monkeypatch.setattr(bench, "inputs", lambda: "another")
    with pytest.raises(SystemExit, match="before.json was made with another recipe.*digest made up, expected another"):
        bench.before()
    (study / "mt_grpo-steps3-seed7").mkdir()
    (study / "mt_grpo-steps3-seed7/inputs.json").write_text('{"inputs": "made up"}')
    with pytest.raises(SystemExit, match="inputs.json was made with another recipe"):
        bench.run("mt_grpo", 7, 3)


def test_a_method_without_a_value_is_refused():
    with pytest.raises(SystemExit, match="'beta' of --methods, expected key=value"):
        bench.options_of("mt_grpo,beta")


def test_behaviour_counts_what_was_asked_and_answered():
    """A conversation without a call has no query; one without an answer has no length."""
    call = {"name": "wiki_search", "arguments": {"query": "who LED"}}
    other = {**CONVERSATION, "calls": [call, {"name": "wiki_search", "arguments": {}}], "answer": None}
    assert bench.behaviour([CONVERSATION, other]) == {
        "calls": 1.0, "question_in_query": 1.0, "answered": 0.5, "answer_words": 1.0
    }  # fmt: skip
    assert bench.behaviour([{**CONVERSATION, "answer": ""}]) == {
        "calls": 0.0, "question_in_query": None, "answered": 0.0, "answer_words": None
    }  # fmt: skip


def test_texts_for_people_change_no_result(tmp_path):
    """Comments and docstrings may be mended behind a run; anything else is another recipe or reward."""
    code, recipe = tmp_path / "reward.py", tmp_path / "recipe.yaml"
    code.write_text('"""Says this."""\n\n\ndef f(x):\n    """One."""\n    return x  # as it is\n')
    recipe.write_text("# one\nbeta: 0.0\n")
    before = [bench.meaning(path) for path in (code, recipe)]
    code.write_text('"""Says that."""\ndef f(x):\n    """Two."""\n    return x\n')
    recipe.write_text("beta: 0.0 # none\n")
    assert [bench.meaning(path) for path in (code, recipe)] == before
    code.write_text("def f(x):\n    return -x\n")
    recipe.write_text("beta: 0.1\n")
    assert all(bench.meaning(path) != was for path, was in zip((code, recipe), before))

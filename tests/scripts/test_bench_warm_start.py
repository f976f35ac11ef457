"""The round of a warm start: what is asked of which model, and its report; nothing is trained."""

import json
from pathlib import Path

import pytest
from bench import warm_start as bench
from test_bench_real_model import found


def answers(exact, perplexity):
    return {"sampled": found(exact), "greedy": found(exact + 0.5), "perplexity": perplexity}


def test_the_report():
    models = {"before": answers(0.0, 31.0), "after": answers(0.25, 32.5), "run": answers(0.125, 32.0)}
    training = {"rows": 301, "learning_rate": 2e-5, "tokens": 66_822, "trained_tokens": 14_378, "seconds": 600.0}
    machine = {"cpu": "a processor", "cores": 2}
    text = bench.section({"machine": machine, "steps": 60, "training": training, "models": models})
    head, rule, *rows = text.splitlines()
    assert head == "| sampled | before | after the supervised training | the run, 60 steps, with examples |"
    assert "| exact match | 0.00 | 0.25 | 0.12 |" in rows and "| exact match | 0.50 | 0.75 | 0.62 |" in rows
    assert (
        "Perplexity of the passages: 31.0, 32.5, 32.0. 301 rollouts, 14,378 trained of 66,822 tokens, learning rate "
        "2e-05, 10 minutes on 2 cores (a processor). 100 held-out questions, one run."
    ) in rows
    assert text.count("Who led?") == 1  # of the trained model, as many as there are


@pytest.fixture
def round_of(tmp_path, monkeypatch):
    """(a round on a run's folder, what was done in it)."""
    recipe, run, done = tmp_path / "recipe.yaml", tmp_path / "mt_grpo-steps60-seed1", []
    recipe.write_text("beta: 0.0\nprompt_examples: examples.yaml # of four\nseed: 42\n")
    run.mkdir()
    (run / "trainer_state.json").write_text('{"global_step": 60}')
    (run / "inputs.json").write_text('{"inputs": "made up"}')
    (run / "model.safetensors").write_bytes(b"weights")

    def evaluated(model, recipe):
        done.append((str(model), str(recipe)))
        return answers(0.25, 31.0)

    def trained(data, model, read):
        done.append(("train", str(data), str(model)))
        return {"rows": 1, "learning_rate": 2e-5, "tokens": 3, "trained_tokens": 2, "seconds": 60.0}

    def export(words):
        done.append(("export", *words))
        Path(words[1]).write_text("a row")

    for name, value in {
        "OUT": tmp_path / "out", "RECIPE": str(recipe), "inputs": lambda: "made up", "evaluated": evaluated,
        "trained": trained, "prepare": lambda: None, "machine": lambda: {"cpu": "a processor", "cores": 2},
    }.items():  # fmt: skip
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench.export_sft, "main", export)
    monkeypatch.setattr(bench.FRAME, "results", tmp_path / "results.json")
    monkeypatch.setattr(bench.FRAME, "report", lambda: None)
    return lambda: bench.main(["--run", str(run)]), done, run


def test_a_round_asks_the_model_without_examples_and_the_run_with_them(round_of, tmp_path):
    go, done, run = round_of
    go()
    out = tmp_path / "out" / run.name
    export, *rest = done
    assert export == (
        "export", str(run), str(out / "rows.jsonl"), "--min", "answer_in_search_results_reward_func=0.5",
        "--per_prompt", "2", "--without_examples", "--config", str(tmp_path / "recipe.yaml"),
    )  # fmt: skip
    assert rest == [
        (bench.MODEL, str(out / "recipe.yaml")),
        ("train", str(out / "rows.jsonl"), str(out / "model")),
        (str(out / "model"), str(out / "recipe.yaml")),
        (str(run), str(tmp_path / "recipe.yaml")),
    ]
    assert (out / "recipe.yaml").read_text() == "beta: 0.0\nseed: 42\n"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["steps"] == 60 and list(results["models"]) == ["before", "after", "run"]
    go()
    assert len(done) == 7 and done[5:] == [export, rest[1]]  # what was asked is not asked again
    (run / "model.safetensors").write_bytes(b"weights of another run")
    go()
    assert done[7:] == [export, *rest[1:]]  # but for the model as it comes


def test_a_run_of_another_recipe_is_refused(round_of):
    go, done, run = round_of
    (run / "inputs.json").write_text('{"inputs": "of another"}')
    with pytest.raises(SystemExit, match="was made with another recipe, reward, model or data"):
        go()
    (run / "inputs.json").unlink()
    with pytest.raises(SystemExit, match="has no inputs.json. Expected a run of scripts/bench/real_model.py"):
        go()
    assert done == []


@pytest.mark.parametrize("words", [[], ["--run", "not/there"]])
def test_without_a_run_the_error_says_what_is_expected(words):
    with pytest.raises(SystemExit, match=r"^error: --run .*\. Expected the folder of a run, with its rollouts"):
        bench.main(words)

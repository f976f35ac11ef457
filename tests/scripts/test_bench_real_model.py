"""The study of the real model: what a run is asked for, and what is kept (its table: docs/test_docs.py)."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from bench import real_model as bench
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from project import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer


def figures(exact, found=0.25):
    return {label: 2.0 for label in bench.FIGURES} | {"answer among the results": found, "exact match": exact}


def row(method, seed, exact, found=0.25):
    return {
        "task": "squad-search", "method": method, "seed": seed, "steps": 20, "commit": "abc", "num_tokens": 3000.0,
        "machine": "2 cores (a processor)", "seconds": 600.0 + 60 * seed, "no_signal": 0.5,
        "sampled": figures(exact, found), "greedy": figures(exact + 0.1, found), "curve": [0, 10, 20],
        **dict.fromkeys(bench.PERPLEXITIES, 12.0 + seed),
    }  # fmt: skip


SEARCH = {"sampled": figures(0.0, 0.1), "greedy": figures(0.1), **dict.fromkeys(bench.PERPLEXITIES, 11.0)}
BEFORE = {"squad-search": SEARCH}


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_trains_with_what_its_name_says(stopped, tmp_path, monkeypatch):
    """A stopped one goes on from its checkpoint, and has no time of its own."""
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    if stopped:
        (tmp_path / "squad-search-merged-steps3-seed7/checkpoint-2").mkdir(parents=True)
        (tmp_path / "squad-search-merged-steps3-seed7/checkpoint-2/trainer_state.json").write_text("{}")
    asked = []

    @contextmanager
    def server(model, *flags, env):
        asked.append(model)
        assert flags[-2:] == ("--seed", "7")  # else all runs would sample from one state
        yield SimpleNamespace(url="http://there")
        asked.append("stopped")

    def train(recipe, output, *words):
        asked.append((recipe, output, " ".join(map(str, words))))
        return [{"reward": 0.5, "num_tokens": 9, "credit/frac_groups_without_signal": 0.25}]

    monkeypatch.setattr(bench, "VLLMServer", server)
    monkeypatch.setattr(bench.common, "train", train)
    monkeypatch.setattr(bench, "evaluated", lambda model, task, num_problems: {"sampled": str(model)})
    result = bench.run("squad-search", "merged", 7, 3, 100)
    assert asked[0] == bench.MODEL and asked[2] == "stopped"
    recipe, output, words = asked[1]
    words = words.removeprefix(f"--model_name_or_path {bench.MODEL} ")
    assert (recipe, output) == (bench.TASKS["squad-search"]["recipe"], tmp_path / "squad-search-merged-steps3-seed7")
    assert words.startswith("--credit_assignment merged --seed 7 --max_steps 3 --use_vllm true")
    assert "--vllm_server_base_url http://there" in words
    assert words.endswith("--resume_from_checkpoint true") == stopped == (result["seconds"] is None)
    assert result["sampled"] == str(output) and result["no_signal"] == 0.25


def test_finished_runs_are_kept_at_once_and_not_run_again(tmp_path, monkeypatch):
    asked, path = [], tmp_path / "results.json"
    monkeypatch.setattr(bench, "evaluated", lambda model, task, num_problems: SEARCH)

    def run(task, method, seed, steps, num_problems):
        asked.append((method, seed))
        if seed == 2 and method == "mt_grpo":
            raise KeyboardInterrupt
        return row(method, seed, 0.2)

    monkeypatch.setattr(bench, "run", run)
    words = ["--tasks", "squad-search", "--methods", "mt_grpo", "outcome", "--results", str(path), "--seeds", "1"]
    monkeypatch.setattr(bench.common, "prepare", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        bench.main([*words, "2"])
    kept = bench.results_in(path)["runs"]
    assert [(each["method"], each["seed"]) for each in kept] == [("outcome", 1), ("mt_grpo", 1)]
    assert asked == [("mt_grpo", 1), ("outcome", 1), ("mt_grpo", 2)]
    del asked[:]
    bench.main(words)
    assert not asked and bench.results_in(path)["before"] == BEFORE


def test_the_perplexity_is_of_each_token_behind_the_first():
    """By hand, of a model of random weights. A longer text counts by its tokens, and not as one."""
    model, texts, logps = ROOT / "hf_recipes/tiny/calculator-model", ["2 + 2", "a longer text of other words"], []
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for text in texts:
        ids = torch.tensor([AutoTokenizer.from_pretrained(model)(text).input_ids])
        of_all = network(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        logps += of_all.gather(1, ids[0, 1:, None])[:, 0].tolist()
    both, first = bench.perplexities(model, [texts, texts[:1]])
    assert both == pytest.approx(math.exp(-sum(logps) / len(logps)), rel=1e-4) and first != both


def test_a_lora_is_evaluated_with_its_adapter_merged(random_model, tmp_path):
    assert bench.whole(tmp_path) == tmp_path
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(random_model), config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(random_model).save_pretrained(tmp_path)

    def logits(cls, path):
        return cls.from_pretrained(path, dtype=torch.float32)(torch.arange(9)[None]).logits

    adapted, merged = logits(AutoPeftModelForCausalLM, tmp_path), logits(AutoModelForCausalLM, bench.whole(tmp_path))
    base = logits(AutoModelForCausalLM, random_model)
    assert (adapted - merged).abs().max() < 1e-4 < (adapted - base).abs().max()


def test_few_runs_are_rows_with_their_costs():
    of = ("merged", 1, 0.1), ("mt_grpo", 1, 0.5), ("mt_grpo", 2, 0.4)
    runs = [row(method, seed, exact) | {"gib": seed + 0.25} for method, seed, exact in of]
    runs[1]["seconds"] = None  # it was stopped
    head, _, *rows, empty, sentence = bench.by_run(SEARCH, runs)
    assert head.count("|") == rows[0].count("|") == 8 and empty == ""
    assert rows == [
        "| before | 2.00; 2.00 | 0.10; 0.25 | 0.00; 0.10 | 11.00 | 11.00 |  |",
        "| `merged`, 20 steps, seed 1 | 2.00; 2.00 | 0.25; 0.25 | 0.10; 0.20 | 13.00 | 13.00 | 11 |",
        "| `mt_grpo`, 20 steps, seed 1 2 | 2.00 2.00; 2.00 2.00 | 0.25 0.25; 0.25 0.25 | 0.50 0.40; 0.60 0.50 | "
        "13.00 14.00 | 13.00 14.00 | 12 |",
    ]
    assert "at most 2.2 GiB in a process, on 2 cores" in sentence

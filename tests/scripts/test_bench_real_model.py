"""The report of the study of the real model, from made-up results."""

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import real_model as bench  # noqa: E402

CONVERSATION = {
    "messages": [{"role": "user", "content": "Who led?"}, {"role": "assistant", "content": "<answer>Rollo</answer>"}],
    "calls": [], "answer": "Rollo", "stop_reason": "answered", "rewards": {"exact_match_reward_func": 1.0},
    "error": None,
}  # fmt: skip


def found(exact):
    return {
        "tool_executed": 0.5, "result_found": 0.25, "exact_match": exact, "mean_turns": 2.0,
        "rewards": {"outcome": {"f1_reward_func": exact / 4}}, "num_problems": 100,
        "behaviour": {"question_in_query": 0.5, "answer_words": 2.5},
        "conversations": [CONVERSATION],
    }  # fmt: skip


def raw(method, seed, exact, **changes):
    """What a run's file has."""
    curve = [{"step": k, "rewards/exact_match_reward_func/mean": exact * k / 3, "num_tokens": 1000.0 * k,
              "rewards/answer_in_search_results_reward_func/mean": 0.25} for k in (1, 2, 3)]  # fmt: skip
    after = {"sampled": found(exact), "greedy": found(exact + 0.1), "perplexity": 12.0 + seed,
             "perplexity_elsewhere": 6.0 + seed}  # fmt: skip
    return {"method": method, "seed": seed, "steps": 3, "after": after, "seconds": 600.0 + 60 * seed,
            "resumed": False, "curve": curve,
            "machine": {"cpu": "a processor", "cores": 2}, **changes}  # fmt: skip


def run(*args, **changes):
    """A run as the report has it."""
    return bench.one_of(raw(*args, **changes))


BEFORE = {"sampled": found(0.0), "greedy": found(0.1), "perplexity": 11.0, "perplexity_elsewhere": 5.0}  # fmt: skip
RUNS = [raw(method, seed, 0.2 + 0.1 * (method == "mt_grpo") + 0.2 * seed)
        for method in ("outcome", "mt_grpo") for seed in range(3)]  # fmt: skip


@pytest.fixture
def results():
    return {"before": bench.aggregated(BEFORE), "steps": 3, "runs": [bench.one_of(each) for each in RUNS]}


def test_the_table_has_means_over_seeds_and_their_interval(results):
    lines = bench.section(results).splitlines()
    assert lines[0] == "| sampled | before | `outcome` | `mt_grpo` |"
    # Three values 0.2 apart: t is 4.303, and the standard error 0.2 / sqrt(3).
    assert "| exact match | 0.00 | 0.40 ± 0.50 | 0.50 ± 0.50 |" in lines
    assert "| exact match | 0.10 | 0.50 ± 0.50 | 0.60 ± 0.50 |" in lines  # greedy
    assert "| F1 | 0.00 | 0.20 ± 0.25 | 0.25 ± 0.25 |" in lines  # the reward is half of F1
    assert "| words of an answer | 2.50 | 2.50 ± 0.00 | 2.50 ± 0.00 |" in lines
    # Perplexities 12, 13 and 14 of both.
    read = "11.00 before, 13.00 ± 2.48 after `outcome`, 13.00 ± 2.48 after `mt_grpo`."
    assert f"Perplexity of 40 passages of the articles: {read}" in lines
    read = "5.00 before, 7.00 ± 2.48 after `outcome`, 7.00 ± 2.48 after `mt_grpo`."
    assert f"Perplexity of 20 texts that no run reads (Python's documentation): {read}" in lines
    assert "<details><summary>5 held-out questions after `mt_grpo`, seed 2, sampled</summary>" in lines
    costs = next(line for line in lines if "held-out questions, 1 sample" in line)
    assert costs.endswith(
        "`outcome`: seeds 0, 1, 2; `mt_grpo`: seeds 0, 1, 2. 3 steps of 32 rollouts in 10 to 12 minutes with the "
        "server's start, 3,000 tokens, on 2 cores (a processor)."
    )
    assert "ended  answered; exact_match_reward_func 1" in bench.section(results)


def test_methods_are_compared_in_pairs_of_seeds(results):
    """Each pair differs by 0.1, so the interval is none; a seed that one of them lacks is in no pair."""
    results["runs"].append(run("mt_grpo", 3, 0.9))
    text = bench.section(results)
    assert "`mt_grpo` minus `outcome`, in pairs of 3 seeds:" in text
    assert "| exact match | +0.10 ± 0.00 | +0.10 ± 0.00 |" in text
    results["runs"] = [run("outcome", 0, 0.2), run("outcome", 1, 0.2), run("mt_grpo", 1, 0.3), run("mt_grpo", 0, 0.3)]
    assert "minus" not in bench.section(results)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_trains_with_what_its_name_says(stopped, tmp_path, monkeypatch):
    """A stopped one goes on from its checkpoint, and has no time of its own."""
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    name = "mt_grpo,beta=0.04-steps3-seed7"
    if stopped:
        (tmp_path / name / "checkpoint-2").mkdir(parents=True)
        (tmp_path / name / "checkpoint-2/trainer_state.json").write_text("{}")
    asked = []

    class Server:
        url = "http://there"

        def __init__(self, model, *flags, env):
            asked.append(model)
            assert flags[-2:] == ("--seed", "7")  # else all runs would sample from one state

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append("stopped")

    def train(recipe, output, *words):
        asked.append((recipe, output, " ".join(map(str, words))))
        return [{"step": 1, "reward": 0.5, "num_tokens": 9, "rewards/f1_reward_func/mean": 0.25}]

    monkeypatch.setattr(bench, "VLLMServer", Server)
    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(bench, "evaluated", lambda model: {"of": str(model)})
    result = bench.run("mt_grpo,beta=0.04", 7, 3)
    assert asked[0] == bench.MODEL and asked[2] == "stopped"
    recipe, output, words = asked[1]
    assert (recipe, output) == (bench.RECIPE, tmp_path / name)
    assert words.startswith("--credit_assignment mt_grpo --beta 0.04 --seed 7 --max_steps 3 --use_vllm true")
    assert "--vllm_server_base_url http://there" in words
    assert words.endswith("--resume_from_checkpoint true") == stopped == result["resumed"]
    assert result["curve"] == [{"step": 1, "num_tokens": 9, "rewards/f1_reward_func/mean": 0.25}]
    assert result["after"] == {"of": str(tmp_path / name)}
    assert json.loads((tmp_path / f"{name}.json").read_text())["method"] == "mt_grpo,beta=0.04"
    assert bench.run("mt_grpo,beta=0.04", 7, 3)["seed"] == 7 and len(asked) == 3  # not again


def test_what_a_run_with_lora_saved_is_asked_whole(tmp_path):
    """The folder for the server has no adapter, and its logits are those of base and adapter together."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = ROOT / "hf_recipes/tiny/calculator-model"
    assert bench.merged(model) == model
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), LoraConfig(r=2, target_modules="all-linear")
    )
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    whole = bench.merged(tmp_path)
    assert not list(whole.glob("adapter*")) and (whole / "tokenizer.json").is_file()
    ids = torch.tensor([[5, 9, 11, 40]])
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        got = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)(input_ids=ids).logits
        with adapted.disable_adapter():
            plain = adapted(input_ids=ids).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert (got - plain).abs().max() > 0.1


def test_behaviour_counts_what_was_asked_and_answered():
    """A call that cannot be read is no query; without a query there is no share, without an answer no length."""
    calls = [{"name": None, "arguments": {}}, {"name": "wiki_search", "arguments": {"query": "LED it"}},
             {"name": "wiki_search", "arguments": {"query": "x"}}]  # fmt: skip
    other = {**CONVERSATION, "calls": calls, "answer": None}
    assert bench.behaviour([CONVERSATION, other]) == {
        "question_in_query": 0.5, "answer_words": 1.0
    }  # fmt: skip
    none_asked = {"question_in_query": None, "answer_words": None}
    assert bench.behaviour([{**CONVERSATION, "calls": calls[:1], "answer": ""}]) == none_asked
    empty = {**CONVERSATION, "messages": [{"role": "user", "content": "?"}], "calls": calls[1:2], "answer": ""}
    assert bench.behaviour([empty]) == none_asked


def test_the_perplexity_is_of_each_token_behind_the_first(tmp_path, monkeypatch):
    """By hand, of a model of random weights. A longer text counts by its tokens, and not as one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = ROOT / "hf_recipes/tiny/calculator-model"
    texts = ["2 + 2", "a longer text of other words"]
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(model),
    )
    logps = []
    for text in texts:
        ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            of_all = network(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        logps += of_all.gather(1, ids[0, 1:, None])[:, 0].tolist()
    expected = math.exp(-sum(logps) / len(logps))
    both, first = bench.perplexities(model, [texts, texts[:1]])
    assert both == pytest.approx(expected, rel=1e-4) and first != both
    assert len(bench.elsewhere()) == 20 and all(0 < len(text) <= 1000 for text in bench.elsewhere())

"""The credit benchmark: a real run and its resumption, and the report by hand-written numbers."""

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from bench import credit as bench
from bench.common import markers, with_section

import mt_grpo_trainer as mt

BEGIN, END = markers("credit")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Results, picture, page and runs in a folder of their own."""
    monkeypatch.setattr(bench, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "docs/results.json")
    monkeypatch.setattr(bench, "PICTURE", tmp_path / "docs/credit.png")
    monkeypatch.setattr(bench, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    (tmp_path / "runs").mkdir()
    return tmp_path


def row(method, seed, exact_match, learning_rate=6e-4, task="chain", area=0.5, passed=20):
    steps = bench.TASKS[task]["steps"]
    return {
        "task": task, "method": method, "learning_rate": learning_rate, "seed": seed, "steps": steps,
        "train_exact_match": [exact_match] * steps, "without_signal": 0.1, "train_turns": [4.0] * steps, "area": area,
        "steps_to_threshold": passed, "tool_executed": 1.0, "result_found": 0.9, "mean_turns": 4.5,
        "exact_match": exact_match, "train_seconds": 50.0, "seconds": 60.0,
    }  # fmt: skip


def write(rows):
    for r in rows:
        (bench.RUNS / f"{bench.name_of(r)}.json").write_text(json.dumps(r))


def test_the_report_quotes_five_seeds(folders):
    exact = [0.90, 0.92, 0.94, 0.96, 0.98]  # mean 0.94, std 0.0316228, t(4) = 2.776: half width 0.0392579
    passed = [10, 30, None, 20, None]  # ordered 10 20 30 - -: the median is 30
    rows = [row("mt_grpo", seed, e, passed=p) for seed, (e, p) in enumerate(zip(exact, passed))]
    rows += [row("mt_grpo", 7, 0.0, learning_rate=3e-4)]  # not the rate of the table
    rows += [row("outcome", seed, 0.7) for seed in range(4)]  # one seed short
    rows += [row("mt_grpo", 9, 0.1)] + [row("merged", seed, 0.5) for seed in range(6)]  # not both
    write(rows)
    bench.report()
    text = bench.PAGE.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n**(b)") and text.endswith(f"{END}\nafter\n")
    quoted = "| `mt_grpo` | 0.94 ± 0.04 | 0.50 ± 0.00 | 30 | 0.90 ± 0.00 | 1.00 ± 0.00 | 4.50 ± 0.00 | 0.10 ± 0.00 |"
    assert f"{quoted} 0.0006 |" in text
    assert "| `merged` | 0.50 ± 0.00 |" in text
    assert "5 seeds" in text and "`outcome`" not in text and "old" not in text
    results = json.loads(bench.RESULTS.read_text())["results"]
    assert [(of["method"], of["seed"]) for of in results] == [
        ("merged", [0, 1, 2, 3, 4]),
        ("mt_grpo", [0, 1, 2, 3, 4]),
    ]
    assert bench.PICTURE.read_bytes().startswith(b"\x89PNG") and bench.PICTURE.stat().st_size > 10_000


def test_a_task_has_as_many_seeds_as_it_says(folders):
    """Three of (g), where five are usual: fewer are not quoted, and more are."""
    jobs = bench.make_jobs(["hops", "alone"], [], None)
    assert {task: {job["seed"] for job in jobs if job["task"] == task} for task in ("hops", "alone")} == {
        "hops": {0, 1, 2},
        "alone": {0, 1, 2, 3, 4},
    }
    few = {"alone": 4, "hops": 2}
    assert bench.aggregated([row("outcome", seed, 0.8, task=task) for task in few for seed in range(few[task])]) == []
    rows = [row("outcome", seed, 0.8, task="hops") for seed in range(3)]
    more = [row("gain", seed, 0.9, task="hops") for seed in range(4)]
    text = bench.markdown(bench.aggregated(rows + more))
    assert "256 held-out problems, 3 seeds, mean" in text
    assert "| `outcome` | 0.80 ± 0.00 | 0.80 0.80 0.80 | - |" in text
    assert "| `gain` | 0.90 ± 0.00 | 0.90 0.90 0.90 | - |" in text


JOB = {"task": "chain", "method": "turn_return", "learning_rate": 3e-4, "seed": 3, "steps": 1}


class Here(ThreadPoolExecutor):
    """Runs in this thread: rewards run in a process's main one."""

    def submit(self, function, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done


def test_a_run_is_kept_and_not_run_again(folders, monkeypatch, capsys):
    """This process trains the chain for one step in place of a worker; the second time there is no worker."""
    monkeypatch.setattr(bench, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(bench, "begin", lambda: None)
    monkeypatch.setattr(bench, "NUM_PROBLEMS", 32)
    bench.run_all([JOB], 1)
    assert "1/1  chain-turn_return-lr0.0003-steps1-seed3" in capsys.readouterr().out
    (kept,) = bench.finished().values()
    assert kept.items() >= JOB.items() and re.match("[0-9a-f]{7}", kept["commit"])
    assert len(kept["train_exact_match"]) == 1
    assert 0 <= kept["exact_match"] < 0.5 and 1 < kept["mean_turns"] <= 6 and 0.5 < kept["tool_executed"] <= 1
    monkeypatch.setattr(bench, "run", None)
    bench.run_all([JOB], 1)


def test_the_page_has_the_table_of_the_results_file():
    rows = json.loads(bench.RESULTS.read_text(encoding="utf-8"))["results"]
    text = bench.PAGE.read_text(encoding="utf-8")
    assert with_section(text, "credit", bench.markdown(rows)) == text
    quoted = re.findall(r"^\| `(\w+)` \| \d\.\d\d ± ", text, re.M)
    assert quoted and set(quoted) <= set(bench.NAMES)


def test_the_ways_of_a_task_are_its_methods_and_set_what_the_script_reads():
    jobs = bench.make_jobs(["alone"], ["mt_grpo"], [0, 1])
    assert [(job["method"], job["seed"]) for job in jobs] == [(way, seed) for seed in (0, 1) for way in bench.WAYS]
    assert {job["learning_rate"] for job in jobs} == {6e-4}
    for way, arguments in bench.WAYS.items():
        recipe = [*bench.TASKS["alone"]["arguments"], *arguments, "--output_dir", "runs/unused"]
        _, args, _ = mt.parse_arguments(recipe)
        settings = args.credit_assignment, args.scale_rewards, args.outcome_in_return, args.state_baseline
        sampled = args.refill_groups, args.per_device_train_batch_size
        rollouts = 192 if way == "outcome_thrice" else 64
        assert sampled == (2 * way.endswith("_refill"), rollouts)
        assert (
            args.turn_reward_weights == [0, 0]
            and settings
            == {
                "outcome": ("outcome", "group", False, "mean"),
                "outcome_by_mean": ("outcome", "mean", False, "mean"),
                "gigpo_return": ("gigpo", "group", True, "mean"),
                "gigpo_others": ("gigpo", "group", True, "leave_one_out"),
                "outcome_refill": ("outcome", "group", False, "mean"),
                "gigpo_refill": ("gigpo", "group", True, "mean"),
                "outcome_thrice": ("outcome", "group", False, "mean"),
            }[way]
        )
    found = {}
    for way, arguments in bench.HOPS.items():
        recipe = [*bench.TASKS["hops"]["arguments"], *arguments, "--output_dir", "runs/unused"]
        script_args, args, _ = mt.parse_arguments(recipe)
        assert script_args.reward_fn.endswith("information_gain.py")
        settings = args.credit_assignment, args.scale_rewards, args.outcome_in_return
        found[way] = *settings, args.turn_reward_weights, args.refill_groups, args.per_device_train_batch_size
    assert found == {
        "outcome": ("outcome", "group", False, [0], 0, 64),
        "outcome_by_mean": ("outcome", "mean", False, [0], 0, 64),
        "gigpo_return": ("gigpo", "group", True, [0], 0, 64),
        "outcome_refill": ("outcome", "group", False, [0], 2, 64),
        "outcome_ten": ("outcome", "group", False, [0], 0, 80),
        "gain": ("mt_grpo", "group", False, None, 0, 64),
        "gain_zero_sum": ("zero_sum", "group", False, None, 0, 64),
    }
    assert bench.rate_of("alone", "mt_grpo") is None and bench.rate_of("chain", "gigpo_return") is None
    assert bench.rate_of("chain", "gigpo") == 1.2e-3 and bench.rate_of("hops", "gain") == 6e-4

"""The credit benchmark: a real run and its resumption, the bifurcation, and the table of its results."""

import re
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from bench import bifurcation, credit as bench
from bench.common import with_section

from mt_grpo import ToolResult
from mt_grpo.conversation.environments import Environments


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Results and runs in a folder of their own."""
    monkeypatch.setattr(bench, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "docs/results.json")


class Here(ThreadPoolExecutor):
    """Runs in this thread: rewards run in a process's main one."""

    def submit(self, function, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done


def test_a_run_is_kept_and_not_run_again(folders, monkeypatch, capsys):
    """This process trains the bifurcation for one step in place of a worker; the second time there is no worker."""
    monkeypatch.setattr(bench, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(bench, "NUM_PROBLEMS", 32)
    monkeypatch.setitem(bench.TASKS, "bifurcation", {**bench.TASKS["bifurcation"], "tokens": 1})
    job = {"task": "bifurcation", "method": "gigpo", "seed": 3}
    bench.run_all([job], 1)
    assert "1/1  bifurcation-gigpo-3" in capsys.readouterr().out
    (kept,) = bench.finished()
    assert kept.items() >= job.items() and re.match("[0-9a-f]{7}", kept["commit"])
    assert 0 <= kept["exact_match"] < 0.6 and 1 < kept["turns"] <= 6
    monkeypatch.setattr(bench, "run", None)
    bench.run_all([job], 1)


def test_one_call_of_the_bifurcation_decides():
    """The others return the chain's values whatever they say, and earn their own reward."""
    rows = {"question": "Start with 9, then + 6, then - 7, then * 4.", "decisive": 1}
    Environments(bifurcation.Bifurcation, 5.0, {})  # fits
    game = bifurcation.Bifurcation()
    game.reset(**rows)
    assert game.calculator("1 + 1") == ToolResult("15", reward=0.0) and game.state_key() == (1, "15")
    assert game.calculator("15 - 7") == ToolResult("8") and game.get_reward() == 1.0
    assert game.calculator("8 * 4") == ToolResult("32", reward=bifurcation.DECOY)
    assert game.calculator("2 + 2") == ToolResult("4")  # the chain is over
    game.reset(**rows)
    game.calculator("9 + 6")
    assert game.calculator("15 - 6") == ToolResult("9") and game.get_reward() == 0.0
    assert game.calculator("8 * 4").text == "36"


def test_the_page_has_the_table_of_the_results_file():
    text = bench.PAGE.read_text(encoding="utf-8")
    assert with_section(text, "credit", bench.markdown(bench.finished())) == text

"""Runs in trouble are told once, with what to do, and others are not."""

from math import nan
from types import SimpleNamespace

import pytest

from mt_grpo.reports import preflight
from mt_grpo.reports.preflight import WINDOW, Watch
from mt_grpo.training.rewards import RewardFunctions


def calls(**kwargs):
    return []


def match(**kwargs):
    return []


WELL = {"reward": 1.0, "rewards/match/mean": 0.5, "entropy": 0.3, "stop/max_turns": 0.2, "stop/agent_error": 0.0}
WELL |= {"completions/clipped_ratio": 0.2, "credit/frac_groups_without_signal": 0.4, "stop/environment_error": 0.01}
WELL |= {"stop/agent_timeout": 0.0, "stop/context_length": 0.0, "tokens/ids_differ": 0.0}
WELL["sampling/sampling_logp_difference/mean"] = 0.02


def watched(logs, caplog, at_end=False):
    """The warnings about a job, in order; `at_end` has only those at its end."""
    functions, history = RewardFunctions([calls, match], [1.0, 2.0], 1), []
    watch, caplog.records[:] = Watch(SimpleNamespace(reward_functions=functions), print), []
    for step, log in enumerate(logs, 1):
        state = SimpleNamespace(global_step=step, is_world_process_zero=True, log_history=history)
        history.append(log)
        watch.on_log(None, state, None, logs=log)
    if at_end:
        caplog.records[:] = []
        watch.on_train_end(None, state, None)
    return [record.getMessage().partition(", ")[2] for record in caplog.records]


def names(warnings):
    return [warning.split(":")[0] for warning in warnings]


def run_of(**values):
    """Two windows of logs: (before, now) of each metric, else it is well."""
    return [{**WELL, **{name.replace("__", "/"): pair[k] for name, pair in values.items()}}
            for k in (0, 1) for _ in range(WINDOW)]  # fmt: skip


TROUBLES = {
    "no signal": (run_of(credit__frac_groups_without_signal=(0.9, 1.0)), "no signal"),
    "paid for something else": (run_of(reward=(1.0, 1.2), rewards__match__mean=(0.5, 0.4)), "reward"),
    "always cut off": (run_of(completions__clipped_ratio=(0.45, 0.45)), "cut off"),
    "what was learned is lost": (run_of(reward=(1.0, 0.5), rewards__match__mean=(0.5, 0.2)), "outcome"),
    "no entropy": (run_of(entropy=(0.2, 0.001), credit__frac_groups_without_signal=(0.4, 0.6)), "entropy"),
}
NO_TROUBLES = {
    "well": run_of(),
    "a large rate of any optimizer": [{**WELL, "learning_rate": 0.1}] * 6,
    "an outcome that rises more slowly": run_of(reward=(1.0, 1.5), rewards__match__mean=(0.5, 0.51)),
    "both fall a little": run_of(reward=(1.0, 0.5), rewards__match__mean=(0.5, 0.26)),
    "solved": run_of(
        entropy=(0.2, 0.001), rewards__match__mean=(0.9, 0.99), credit__frac_groups_without_signal=(0.4, 0.6)
    ),
    "one group has signal": run_of(credit__frac_groups_without_signal=(1.0, 1.0))[:WINDOW - 1] + run_of(),
    "a metric that is not there": run_of(entropy=(None, None), stop__max_turns=(float("nan"), float("nan"))),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_a_run_in_trouble_is_told_once(name, caplog):
    logs, told = TROUBLES[name]
    assert names(watched(logs * 3, caplog)) == [told]


@pytest.mark.parametrize(("step", "told"), [(0, ["kl"]), (7, [])])
def test_a_reference_that_is_another_model_is_told_before_the_first_step(step, told, monkeypatch, caplog):
    """Whatever `logging_steps` is. The policy of a resumed run may be far from it."""
    monkeypatch.setattr(preflight, "facts_of_batches", lambda *_: {"kl": 7.7})
    monkeypatch.setattr(preflight, "facts_of_settings", lambda _: {})
    state = SimpleNamespace(global_step=step, is_world_process_zero=True)
    Watch(SimpleNamespace(batch="a batch"), print).on_pre_optimizer_step(None, state, None)
    assert names(record.getMessage() for record in caplog.records) == told


@pytest.mark.parametrize("name", NO_TROUBLES)
def test_another_run_is_not(name, caplog):
    assert watched(NO_TROUBLES[name], caplog) == []


def test_the_end_of_a_run_tells_whether_it_still_learned(caplog):
    """Also of a run of few logs; not if a solved run has another wave."""
    assert watched(run_of(), caplog, at_end=True) == watched([WELL] * 4, caplog, at_end=True) == []
    silent = [{**WELL, "credit/frac_groups_without_signal": 1.0}, {"eval_reward": 1.0}] * 5
    (text,) = watched(silent, caplog, at_end=True)
    assert text.startswith("no signal: No group in the last 5 logs has trained rollouts whose rewards differ")
    lost = [{**WELL, "rewards/match/mean": value} for value in (0.1, 0.8, 0.3) for _ in range(WINDOW)]
    (text,) = watched(lost, caplog, at_end=True)
    assert text.startswith("outcome: The main outcome has fallen from 0.80 to 0.30")
    wave = [{**WELL, "rewards/match/mean": value} for value in (0.9, 0.5) for _ in range(WINDOW)]
    assert watched(wave, caplog, at_end=True) == []


def test_a_report_that_fails_ends_no_run(caplog, monkeypatch):
    """As by a plug-in's error. A subclass that brings batches of its own has no report on the first one."""
    trainer = SimpleNamespace(batch=None, env=SimpleNamespace(environments=None, tools=None))
    trainer.args, trainer.train_dataset = None, [{}]
    watch, facts = Watch(trainer, print), {"rewards/calls/mean": 0.5, "rewards/calls/std": 0.1, "rewards/no/mean": nan}
    watch.on_pre_optimizer_step(None, None, None)
    assert watch.facts is None
    monkeypatch.setattr(preflight, "facts_of_batches", lambda *given: facts)
    trainer.batch = object()
    watch.on_pre_optimizer_step(None, None, None)
    assert "The report on the first batch failed: TypeError" in caplog.text and watch.facts == facts
    assert "(calls 0.50 ± 0.10)" in preflight.summary(facts)  # only the rewards that were given

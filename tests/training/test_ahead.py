"""`max_staleness` and `late_groups` with several passes, epochs, stops, evaluations and ranks."""

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from project import json_lines
from server_run import Watched, assert_from_the_weights_of_its_version, first_number, holding, make_trainer, needs_vllm

from mt_grpo.base.errors import RunStopped
from mt_grpo.generation.samples import versions_of


class Noted(Watched):
    """Also keeps which prompts were asked for, and which prompts each finished step trained."""

    signal_at = killed_at = None  # the step before which it stops

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked, self.trained = [], {}

    def _start_rollouts(self, prompts, which):
        if self.model.training:
            self.asked += [prompts[i]["prompt"][-1]["content"] for i in which[::8]]
        return super()._start_rollouts(prompts, which)

    def training_step(self, *args, **kwargs):
        step = self.state.global_step
        if step == self.killed_at:
            raise KeyboardInterrupt
        if step == self.signal_at:
            self._stop_signal = signal.SIGTERM
            self._stop_if_asked()
        loss = super().training_step(*args, **kwargs)
        self.trained[step] = [row["prompt"][-1]["content"] for row in self.batch.rows[::8]]
        return loss


def in_flight_of(checkpoint):
    """What a checkpoint holds of the prompts that were asked for."""
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text())["stateful_callbacks"]["in_flight"]


def run_to_its_stop(trainer, checkpoint=None):
    """Train until the signal, and return the checkpoint that is saved then."""
    with trainer.stop_on_signals(), pytest.raises(RunStopped):
        trainer.train(checkpoint)
    said = trainer.save_where_it_stopped()
    assert "Continue with --resume_from_checkpoint " in said
    return said.rpartition(" ")[2]


@needs_vllm
def test_admission_refills_from_what_is_in_flight(server, tmp_path):
    """Groups without signal give way to complete ones. A stop costs no prompt, and none is asked for twice."""
    dead = {f"What is {a} * {b}?" for a, b in ((12, 76), (13, 75), (16, 72))}  # of eight

    def reward(completions, prompts, **kwargs):
        return [0.5 if prompt[-1]["content"] in dead else float(i % 2) for i, prompt in enumerate(prompts)]

    def make(**changes):
        values = dict(max_steps=5, max_staleness=1, late_groups="admit", refill_groups=3, prompts=8, log_rollouts=16,
                      save_strategy="steps", save_steps=100, shuffle_dataset=False)  # fmt: skip
        return make_trainer(server.port, tmp_path, reward=reward, trainer_class=Noted, **{**values, **changes})

    first, second = make(), make()
    first.signal_at = 2
    checkpoint = run_to_its_stop(first)
    state = in_flight_of(checkpoint)
    begun = [first.train_dataset[k]["prompt"][-1]["content"] for k in state["prompts"]]
    second.train(checkpoint)
    asked = first.asked + second.asked[len(begun) :]
    order = [row["prompt"][-1]["content"] for row in first.train_dataset]
    assert second.asked[: len(begun)] == begun and asked == (order * 9)[: len(asked)]
    trained = [prompt for step in range(5) for prompt in (first.trained | second.trained)[step]]
    assert len(trained) == 10 and not dead & set(trained)
    rows = [row for row in json_lines(tmp_path / "rollouts.rank0.jsonl") if row["mode"] == "dropped"]
    early, late = ([r["messages"][1]["content"] for r in rows if (r["step"] < 2) == k][::8] for k in (True, False))
    assert {*early, *late} == dead
    used = Counter([*first.trained[0], *first.trained[1], *early])
    assert used + Counter(begun) == Counter(first.asked)
    assert not Counter(trained + early + late) - Counter(asked)
    assert all(value == 0.0 for trainer in (first, second)
               for value in trainer.rows("credit/frac_groups_without_signal"))  # fmt: skip


@needs_vllm
@pytest.mark.parametrize("limit", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_batch_of_two_passes_counts_once_for_the_bound(server, tmp_path, limit):
    """`wait`: batches are trained twice each, in the order in which they were begun, also behind a stop in between."""

    def make(**kwargs):
        return make_trainer(server.port, tmp_path, trainer_class=Noted, max_steps=12, max_staleness=limit,
                            num_iterations=2, prompts=12, **kwargs)  # fmt: skip

    stopped, resumed = make(), make()
    stopped.signal_at = 7
    checkpoint = run_to_its_stop(stopped)
    resumed.train(checkpoint)
    trained = stopped.trained | resumed.trained
    assert list(trained) == list(range(12))
    assert all(trained[step] == trained[step + 1] for step in range(0, 12, 2))
    order = [prompt for step in range(0, 12, 2) for prompt in trained[step]]
    assert len(set(order)) == 12
    assert stopped.asked == order[: 2 * (4 + limit)]  # those of the four batches, and what was in flight
    assert resumed.asked == order[6:]  # the fourth batch is rolled out again
    # Batch b is asked for in the first step of batch b - limit, or in the run's first one.
    versions = [{r.policy_version for r in batch} for batch in stopped.batches]
    assert versions == [{1 + 2 * max(0, b - limit)} for b in range(4)]
    # A process counts the versions of its weights from 1.
    stale = [{1 + step - r.policy_version for r in batch} for step, batch in zip((0, 1, 3), resumed.batches)]
    assert stale == ([{0}, {0}, {0}] if limit == 0 else [{0}, {1}, {3}])
    assert resumed.rows("rollout/staleness_max") == [2 * min(b, limit) for b in range(4)] + [max(s) for s in stale]
    assert not resumed.in_flight.groups and resumed.rows("rollout/restarted") == [0] * 7


@pytest.mark.contract_server("late_groups")
@needs_vllm
@pytest.mark.parametrize("late_groups", [pytest.param("wait", marks=pytest.mark.slow), "admit"])
def test_an_evaluation_leaves_what_is_in_flight(server, tmp_path, late_groups):
    """It is sampled from the current weights. What is in flight is trained later, and is asked for once."""

    def is_held(trainer, rollout, number):
        """One group of a batch is in flight until the push behind the one that it began with has ended."""
        until = {5: 2, 7: 3, 9: 4, 11: 5}.get(trainer.asked.index(rollout.row["prompt"][-1]["content"]), 0)
        return number >= 0 and trainer.held_version < until

    trainer = make_trainer(
        server.port, tmp_path, env_class=holding(is_held), trainer_class=Noted, evaluates=True, max_steps=6,
        prompts=12, max_staleness=2, late_groups=late_groups, eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=16,
    )  # fmt: skip
    trainer.train()
    assert (False, True) in trainer.synced_with_prefetched  # an evaluation pushed its weights to what was in flight
    assert [{r.policy_version for r in batch} for batch in trainer.evaluated] == [{3}, {5}, {7}]
    of_evaluations = [(r.policy_version, turn) for batch in trainer.evaluated for r in batch for turn in r.turns]
    assert all(set(versions_of(turn)) == {version} for version, turn in of_evaluations)
    spans = [(r.policy_version, versions_of(r.turns[-1])[1]) for batch in trainer.batches for r in batch]
    assert any(began < version <= ended for began, ended in spans for version in (3, 5))  # evaluations' pushes
    trained = [prompt for step in range(6) for prompt in trainer.trained[step]]
    assert len(set(trained)) == 12 and sorted(trained) == sorted(trainer.asked)
    assert trainer.rows("rollout/restarted") == trainer.rows("rollout/retries") == [0] * 6
    assert not trainer.in_flight.groups
    assert_from_the_weights_of_its_version(trainer)


@needs_vllm
def test_a_signal_does_not_wait_for_a_slow_group(server, tmp_path):
    """SIGTERM while a step waits for groups: the run ends at once, saved; one without `admit` trains the rest."""
    over, begun = threading.Event(), threading.Event()

    class Signalled(Noted):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            take = self.in_flight._take

            def signalled(*args):
                if self.state.global_step == 2 and not begun.is_set():  # of the five quick groups four are trained
                    begun.set()
                    threading.Timer(1.0, self.stop).start()
                return take(*args)

            self.in_flight._take = signalled

        def stop(self):
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # which would end these tests
                os.kill(os.getpid(), signal.SIGTERM)

    def is_held(trainer, rollout, number):
        return first_number(rollout) in (11, 14, 17) and not over.is_set()

    def make(**changes):
        values = dict(env_class=holding(is_held), max_steps=4, max_staleness=3, late_groups="admit", prompts=8)
        return make_trainer(server.port, tmp_path, **{**values, **changes})

    stopped = make(trainer_class=Signalled)
    checkpoint = run_to_its_stop(stopped)
    assert not over.is_set() and checkpoint == str(tmp_path / "checkpoint-2")
    over.set()
    assert len(in_flight_of(checkpoint)["prompts"]) == 4
    resumed = make(trainer_class=Noted, max_staleness=0, late_groups="wait")
    resumed.train(checkpoint)
    trained = [prompt for step, batch in (stopped.trained | resumed.trained).items() for prompt in batch]
    assert sorted(trained) == sorted(stopped.asked) and len(set(trained)) == 8
    assert Counter(resumed.asked) == Counter(set(trained) - {p for batch in stopped.trained.values() for p in batch})

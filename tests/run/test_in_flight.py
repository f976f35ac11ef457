"""What is in flight, by itself: conversations that are over at once, on the second of two ranks."""

from types import SimpleNamespace

import pytest
import torch

from mt_grpo.base.ranks import RunError, RunStopped
from mt_grpo.rollout import Rollout
from mt_grpo.run.in_flight import GroupInFlight, InFlight
from mt_grpo.run.next_prompts import IN_FLIGHT, EpochPrompts, PassPrompts, slot_kinds

ROWS = [{"prompt": "a"}, {"prompt": "b"}]


class Over:
    """A batch whose conversations are over; those at the places `lost` were lost with their server."""

    over, seconds, waited, cancelled = True, 1.0, 50.0, False

    def __init__(self, rows, places, lost=()):
        self.rollouts = [Rollout([], [], 2 + place) for place in places]
        self.prompts = [row["prompt"] for row in rows]
        self.lost = [rollout for rollout in self.rollouts if rollout.index - 2 in lost]

    def wait(self):
        return [None if rollout in self.lost else rollout for rollout in self.rollouts]

    def cancel(self):
        self.cancelled = True


class Trainer(SimpleNamespace):
    """A batch of rollouts serves two forward passes, which are one optimizer step."""

    def __init__(self, lost=()):
        super().__init__(
            args=SimpleNamespace(
                max_staleness=2,
                late_groups="wait",
                refill_groups=0,
                steps_per_generation=2,
                gradient_accumulation_steps=2,
                generation_batch_size=4,
                num_generations=2,
                ignore_data_skip=False,
            ),
            state=SimpleNamespace(max_steps=9, global_step=0),
            _step=0,
            num_iterations=1,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(process_index=1, is_main_process=False),
            llm=SimpleNamespace(retries=0, joined=[0]),
            weight_sync=SimpleNamespace(doubted=False),
            env=SimpleNamespace(close=lambda rollouts: self.closed.extend(rollouts)),
            started=[],
            closed=[],
            lost=list(lost),
            num_pushes=0,
        )
        self.in_flight = InFlight(self)

    def _start_rollouts(self, rows, places):
        self.llm.retries += 2
        self.started.append([rows[place]["prompt"] for place in places])
        return Over(rows, places, self.lost.pop(0) if self.lost else ())

    def _sync_weights(self):
        self.num_pushes += 1

    def _stop_if_asked(self):
        pass

    def _on_all_ranks(self, function, what):
        return function()


def test_what_a_lost_server_leaves_starts_over_and_is_closed():
    trainer = Trainer(lost=[(1,)])
    rollouts, metrics = trainer.in_flight.complete(ROWS)
    assert trainer.started == [["a", "b"], ["b"]] and [rollout.index for rollout in rollouts] == [2, 3]
    assert [rollout.index for rollout in trainer.closed] == [3] and trainer.closed[0] is not rollouts[1]
    assert (metrics["rollout/restarted"], metrics["rollout/retries"], trainer.llm.retries) == (1, 4, 0)
    assert metrics["rollout/wait_seconds"] > 100.0  # of two batches, before they were taken
    assert trainer.num_pushes == 2 and not trainer.weight_sync.doubted  # another server holds the weights


def test_without_another_server_weights_are_pushed_again_and_not_for_ever():
    trainer = Trainer(lost=[(0,)] * 3)
    trainer.llm.joined = []
    with pytest.raises(RunError, match="restarted 3 times during one batch"):
        trainer.in_flight.complete(ROWS)
    assert trainer.weight_sync.doubted and trainer.started == [["a", "b"], ["a"], ["a"]]


def test_an_evaluation_gets_the_newest_weights_and_conversations_of_its_own():
    trainer = Trainer()
    ahead = Over(ROWS, [0, 1])
    trainer.in_flight.groups.append(ahead)
    trainer.model.training = False
    trainer.in_flight.complete(ROWS)
    assert trainer.num_pushes == 1 and trainer.started == [["a", "b"]] and list(trainer.in_flight.groups) == [ahead]
    trainer.model.training = True
    assert trainer.in_flight.complete(ROWS)[0] == ahead.rollouts and trainer.num_pushes == 1


@pytest.mark.parametrize(
    "steps_left, step, ahead",
    [(9, 0, "bc"), (2, 0, "b"), (1, 0, ""), (1, 1, "b")],
)
def test_nothing_is_begun_that_would_not_be_trained(steps_left, step, ahead):
    """At most two further batches, and none behind the last step. A run may be resumed inside a batch (`step`)."""
    trainer = Trainer()
    trainer.state.max_steps = steps_left
    trainer._step, epoch = step, ([{"prompt": name}] for name in "aabbccdd")
    next(shown := trainer.in_flight.shown(epoch))
    assert trainer.in_flight.shown(epoch) is shown
    trainer.in_flight.rows_of_step([{"prompt": "a"}])
    trainer.in_flight.start_next()
    assert trainer.started == [[name] for name in ahead]
    assert next(trainer.in_flight.shown(iter([[{"prompt": "z"}]]))) == [{"prompt": "z"}]  # of the next epoch


def test_an_epoch_that_is_given_up_leaves_nothing(tmp_path):
    """Nor does a run leave its prompts to the next one."""
    in_flight = Trainer().in_flight
    in_flight._prompts, ahead = EpochPrompts(0, [3, 1, 0, 2], place=2, again=[1]), Over(ROWS, [0])
    in_flight.groups.append(ahead)
    in_flight.end_epoch()
    assert ahead.cancelled and not in_flight.groups and in_flight.current is None and in_flight._prompts.left == 0
    in_flight.begin(None)
    in_flight.note()
    in_flight.save(tmp_path)
    assert not (tmp_path / IN_FLIGHT).exists()


def of_two_ranks():
    """What is in flight on rank 0 of two, with a group of two on each; conversations are over at once."""

    def start(rows, which):
        rollouts = [Rollout([], [1], row=rows[i]) for i in which]
        return SimpleNamespace(rollouts=rollouts, over=True, seconds=0.0, wait=lambda: rollouts)

    trainer = SimpleNamespace(
        args=SimpleNamespace(
            max_staleness=1, late_groups="admit", refill_groups=2, steps_per_generation=1, ignore_data_skip=False,
            gradient_accumulation_steps=1, generation_batch_size=4, num_generations=2,
        ),
        accelerator=SimpleNamespace(
            num_processes=2, process_index=0, is_main_process=True, device="cpu", reduce=lambda tensor, how: 2 * tensor
        ),
        state=SimpleNamespace(max_steps=1, global_step=0), _step=0, num_iterations=1, num_generations=2,
        model=SimpleNamespace(training=True), train_dataset=[{"prompt": n} for n in range(20)],
        _on_all_ranks=lambda function, what: function() or [0, 0, 0], _stop_if_asked=lambda: None, _stop_signal=None,
        _sync_weights=lambda: None, _start_rollouts=start, env=SimpleNamespace(close=lambda rollouts: None),
        llm=SimpleNamespace(),
    )  # fmt: skip
    flight = InFlight(trainer)
    flight._prompts = PassPrompts(0, lambda number: list(range(20)))
    return flight


def test_a_refill_leaves_no_step_without_a_group_for_each_slot():
    """A step that needs both kinds finds two of one kind in flight, and asks for the one that is missing."""
    flight, right = of_two_ranks(), slot_kinds(2, 2, 2)[1]
    flight.groups.extend(GroupInFlight(n, right, [], None) for n in (17, 18))
    rows = flight.rows_of_step([{}, {}])
    assert rows == [{"prompt": 0}] * 2 and flight._batch_prompts == [0, 17]
    assert [(group.prompt, group.kind) for group in flight.groups] == [(18, right)]
    further, rollouts, _ = flight.refill(rows, [0, 1])
    assert further == [{"prompt": 1}] * 2 and [rollout.row for rollout in rollouts] == further
    assert [rollout.index for rollout in rollouts] == [0, 1]
    assert flight._batch_prompts == [1, 18] and not flight.groups
    assert flight.refill(rows, [1])[:2] == ([], []) and flight._batch_prompts == [1, 2]


def test_a_step_waits_for_what_all_ranks_have():
    """Here both groups are complete, on the other rank the second one alone: it is the one that is taken."""
    flight, kind = of_two_ranks(), slot_kinds(2, 2, 2)[1]
    flight.groups.extend(GroupInFlight(n, kind, [], None) for n in (17, 18))
    others, asked = torch.tensor([0, 1, 1], dtype=torch.int32), []
    flight.trainer.accelerator.reduce = lambda flags, how: asked.append(flags.tolist()) or flags + others
    assert flight._wait_for_groups([kind]) == [1] and asked == [[1, 1, 1]]


def test_kinds_that_can_fill_no_slot_are_an_error():
    flight, (left, right) = of_two_ranks(), slot_kinds(2, 2, 2)
    flight.groups.extend(GroupInFlight(n, right, [], None) for n in (17, 18))
    with pytest.raises(RunError, match="2 groups left, expected"):
        flight._wait_for_groups([left, right])


def test_ranks_meet_while_the_conversations_of_one_go_on():
    """Here they are over before the other rank's. A rank that waited in one call would be given up as lost."""
    flight, seen = of_two_ranks(), []
    flight.POLL_SECONDS, flight.current = 0.0, SimpleNamespace(over=False)
    others = [[0, 1], [0, 1], [1, 1]]

    def reduce(flags, how):
        seen.append(flags.tolist())
        flight.current.over = True
        return flags + torch.tensor(others[len(seen) - 1], dtype=torch.int32)

    flight.trainer.accelerator.reduce = reduce
    flight._meet_until_over()
    assert seen == [[0, 1], [1, 1], [1, 1]]

    def stop():
        raise RunStopped(15)

    flight.trainer._stop_if_asked = stop
    others.append([0, 0])  # a signal has come there
    with pytest.raises(RunStopped):
        flight._meet_until_over()

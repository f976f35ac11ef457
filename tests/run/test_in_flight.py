"""The queue of groups in flight, by itself: conversations that are over at once, on one rank of one or two."""

from types import SimpleNamespace

import pytest
import torch

from mt_grpo.base.errors import RunError, RunStopped
from mt_grpo.rollout import Rollout
from mt_grpo.run.in_flight import GroupInFlight, InFlight, Prompts, slot_kinds

ROWS = [{"prompt": n} for n in range(20)]


def rows(*prompts):
    return [ROWS[n] for n in prompts for _ in range(2)]


class Over:
    """A batch whose conversations are over; those at the places `lost` were lost with their server."""

    seconds, cancelled, is_over = 1.0, False, True

    def __init__(self, rows, places, first=0, lost=()):
        self.rollouts = [Rollout([], [1], first + place, row=rows[place]) for place in places]
        self.lost = [rollout for rollout in self.rollouts if rollout.index - first in lost]

    def wait(self):
        return [None if rollout in self.lost else rollout for rollout in self.rollouts]

    def over(self):
        return self.is_over

    def cancel(self):
        self.cancelled = True


class Trainer(SimpleNamespace):
    """A batch has two groups of two: on one rank, or on two ranks a group each."""

    def __init__(self, num_ranks=1, rank=0, lost=(), **settings):
        args = dict(
            max_staleness=2, late_groups="wait", refill_groups=0, steps_per_generation=1, ignore_data_skip=False,
            gradient_accumulation_steps=1, generation_batch_size=4, num_generations=2,
        )  # fmt: skip
        super().__init__(
            args=SimpleNamespace(**args | settings),
            accelerator=SimpleNamespace(
                num_processes=num_ranks, process_index=rank, device="cpu", reduce=lambda flags, how: num_ranks * flags
            ),
            state=SimpleNamespace(max_steps=9, global_step=0), _step=0, _buffered_inputs=None,
            num_iterations=1, num_generations=2,
            model=SimpleNamespace(training=True), train_dataset=ROWS, llm=SimpleNamespace(retries=0, joined=[0]),
            weight_sync=SimpleNamespace(doubted=False), _stop_signal=None, _stop_if_asked=lambda: None,
            env=SimpleNamespace(close=lambda rollouts: self.closed.extend(rollouts)),
            _on_all_ranks=lambda function, what: function() or [0, 0, 0],
            started=[], closed=[], lost=list(lost), num_pushes=0,
        )  # fmt: skip
        self.in_flight = InFlight(self)

    def _start_rollouts(self, rows, places):
        self.llm.retries += 2
        self.started.append([rows[place]["prompt"] for place in places])
        first = self.accelerator.process_index * len(rows)
        return Over(rows, places, first, self.lost.pop(0) if self.lost else ())

    def _sync_weights(self):
        self.num_pushes += 1

    def _get_train_sampler(self, dataset):
        return SimpleNamespace(of_epoch=lambda number: [n for n in range(12) for _ in range(2)])


def test_without_another_server_weights_are_pushed_again_and_not_for_ever():
    trainer = Trainer(lost=[(0,)] * 3)
    trainer.llm.joined = []
    with pytest.raises(RunError, match="restarted 3 times during one batch"):
        trainer.in_flight.complete(ROWS[:2])
    assert trainer.weight_sync.doubted and trainer.started == [[0, 1], [0], [0]]


@pytest.mark.parametrize("late_groups", ["wait", "admit"])
@pytest.mark.parametrize("steps_left, step, begun", [(9, 0, 6), (2, 0, 4), (1, 0, 2), (1, 1, 4)])
def test_nothing_is_begun_that_would_not_be_trained(steps_left, step, begun, late_groups):
    """At most two further batches, and none behind the last step. A run may be resumed inside a batch (`step`).

    Each batch is trained in two passes, which are one step.
    """
    trainer = Trainer(late_groups=late_groups, steps_per_generation=2, gradient_accumulation_steps=2)
    trainer.state.max_steps, trainer._step = steps_left, step
    order = [n for first in range(0, 12, 2) for _ in range(2) for n in (first, first, first + 1, first + 1)]
    trainer._get_train_sampler = lambda dataset: SimpleNamespace(of_epoch=lambda number: order)
    assert trainer.in_flight.rows_of_step(rows(0, 1)) == rows(0, 1)
    trainer.in_flight.complete(rows(0, 1))
    trainer.in_flight.start_next()
    assert trainer.started == [[n, n] for n in range(begun)]


def test_what_a_checkpoint_holds_and_which_one_is_refused():
    """The prompts that were asked for and not trained; of a batch that is trained further its own come first. Its
    prompts that were trained are not those that this run would leave out."""
    trainer = Trainer(late_groups="admit", steps_per_generation=2)
    flight = trainer.in_flight
    flight.prompts = Prompts(lambda number: [3, 1, 0, 2], 0, place=3, prompts=[1])
    flight.groups.append(GroupInFlight(0, ROWS[0], (2,), []))
    flight._batch_prompts, state = {0: 3, 1: 2}, SimpleNamespace(num_input_tokens_seen=5)
    flight.on_step_end(trainer.args, state, None)
    assert flight.state == {"epoch": 0, "place": 3, "prompts": [0, 1], "endless": False}
    trainer._step = 1
    flight.on_step_end(trainer.args, state, None)
    assert flight.state["prompts"] == [3, 2, 0, 1]
    flight.begin({**flight.state, "prompts": []})
    assert flight.state is None  # `Trainer` knows the place in the data
    flight = Trainer(late_groups="admit").in_flight
    flight.begin({"epoch": 0, "place": 6, "prompts": [4, 5], "endless": False})
    flight.trainer._step = 4
    with pytest.raises(RunError, match="of epoch 0, 4 prompts trained, got epoch 0, 8 prompts"):
        flight.rows_of_step(rows(8, 9))


@pytest.mark.parametrize("late_groups", ["wait", "admit"])
def test_a_batch_that_was_changed_is_refused_at_an_epochs_beginning(late_groups):
    """The run asks for the prompts of the sampler, and would train them instead of those that it is given."""
    trainer = Trainer(late_groups=late_groups)
    with pytest.raises(RunError, match="The batch has other prompts than the trainer's own sampler returns"):
        trainer.in_flight.rows_of_step(rows(1, 0))
    assert not trainer.started


@pytest.mark.parametrize("endless", [False, True])
def test_an_epoch_that_is_given_up_leaves_nothing(endless):
    """Passes through the data go on. The next epoch begins with a batch of its own; not a run inside one."""
    trainer, batch = Trainer(steps_per_generation=2), Over(rows(1), (0, 1))
    flight, trainer._step = trainer.in_flight, 3
    flight.on_epoch_begin(None, None, None)
    assert (trainer._step, flight.epoch) == (3, 1)  # `Trainer` has no batch yet
    trainer._buffered_inputs, flight.epoch = [{}, {}], 0
    flight.prompts = Prompts(lambda number: [3, 1, 0, 2], 0, place=2, prompts=[1], endless=endless)
    flight.groups.append(GroupInFlight(1, ROWS[1], (2,), [batch]))
    flight.on_epoch_begin(None, None, None)
    assert batch.cancelled == (not endless) and bool(flight.groups) == endless and flight.epoch == 1
    assert (flight.prompts is None) == (not endless) and trainer._step == 0


def of_two_ranks():
    """What is in flight on rank 0 of two, with a group of two on each."""
    flight = Trainer(num_ranks=2, late_groups="admit", max_staleness=1, refill_groups=2).in_flight
    flight.trainer.state.max_steps = 1
    flight.prompts = Prompts(lambda number: list(range(20)), 0, 0, endless=True)
    return flight


def test_a_refill_leaves_no_step_without_a_group_for_each_slot():
    """A step that needs both kinds finds two of one kind in flight, and asks for the one that is missing."""
    flight, right = of_two_ranks(), slot_kinds(2, 2, 2)[1]
    flight.groups.extend(GroupInFlight(n, ROWS[n], right, []) for n in (17, 18))
    batch = flight.rows_of_step([{}, {}])
    assert batch == rows(0)[:1] * 2 and flight._batch_prompts == {0: 0, 1: 17}
    assert [(group.prompt, group.kind) for group in flight.groups] == [(18, right)]
    further, rollouts, _ = flight.refill(batch, [0, 1])
    assert further == rows(1) and [rollout.row for rollout in rollouts] == further
    assert [rollout.index for rollout in rollouts] == [0, 1]
    assert flight._batch_prompts == {0: 1, 1: 18} and not flight.groups
    assert flight.refill(batch, [1])[:2] == ([], []) and flight._batch_prompts == {0: 1, 1: 2}


def test_ranks_meet_and_take_what_all_have():
    """Here both groups are complete, on the other rank the second one alone: it is the one that is taken. Here they
    are over before the other rank's. A rank that waited in one call would be given up as lost."""
    flight, kind = of_two_ranks(), slot_kinds(2, 2, 2)[1]
    flight.groups.extend(GroupInFlight(n, ROWS[n], kind, []) for n in (17, 18))
    others, asked = torch.tensor([0, 1, 1], dtype=torch.int32), []
    flight.trainer.accelerator.reduce = lambda flags, how: asked.append(flags.tolist()) or flags + others
    assert [group.prompt for group in flight._wait_for([1], None)] == [18] and asked == [[1, 1, 1]]
    flight, seen = of_two_ranks(), []
    flight.trainer.client, flight.POLL_SECONDS = object(), 0.0
    others = [[0, 1], [0, 1], [1, 1]]

    def reduce(flags, how):
        seen.append(flags.tolist())
        return flags + torch.tensor(others[len(seen) - 1], dtype=torch.int32)

    flight.trainer.accelerator.reduce = reduce
    flight.complete(ROWS[:2])
    assert seen == [[1, 1], [1, 1], [1, 1]]

    def stop():
        raise RunStopped(15)

    others.append([0, 0])  # a signal has come there
    flight.trainer._sync_weights = lambda: setattr(flight.trainer, "_stop_if_asked", stop)
    with pytest.raises(RunStopped):
        flight.complete(ROWS[:2])

"""What is in flight while the policy trains (`max_staleness`): conversations of this step and of later ones."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from mt_grpo.base.event_loop import gather_all, start_in_background
from mt_grpo.base.ranks import RunError
from mt_grpo.base.rows import prompts_of
from mt_grpo.rollout import Rollout
from mt_grpo.run.next_prompts import (
    EpochPrompts,
    Kind,
    LookAhead,
    PassPrompts,
    choose_groups,
    epoch_order,
    read_in_flight,
    slot_kinds,
    write_in_flight,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupInFlight:
    """The conversations of one prompt, of which this rank has all, some or none."""

    prompt: int  # row of the dataset
    kind: Kind
    rows: list[dict[str, Any]]  # of this rank's conversations
    batch: RolloutBatch | None  # None: this rank has none of them

    @property
    def over(self) -> bool:
        """Whether this rank's conversations of the group have ended or failed."""
        return self.batch is None or self.batch.over

    def cancel(self) -> None:
        if self.batch is not None:
            self.batch.cancel()


class AwaitedGroups:
    """All groups in flight, while a step waits for some of them: what the run's progress is read from."""

    over = False

    def __init__(self, groups: list[GroupInFlight]):
        self.batches = [group.batch for group in groups if group.batch is not None]
        self.rollouts = [rollout for batch in self.batches for rollout in batch.rollouts]

    def cancel(self) -> None:
        for batch in self.batches:
            batch.cancel()


class ChosenGroups(AwaitedGroups):
    """The groups that a step takes, with the interface of `RolloutBatch`.

    Args:
        groups: In the order of the batch's slots.
        places: The index of each of this rank's rollouts in the batch.
        waited: Seconds that training waited for them.
    """

    over = True

    def __init__(self, groups: list[GroupInFlight], places: Iterable[int], waited: float):
        super().__init__(groups)
        self.waited = waited
        self.rows = [row for group in groups for row in group.rows]
        for index, rollout in zip(places, self.rollouts):
            rollout.place(index)
        self.seconds = max((batch.seconds for batch in self.batches), default=0.0)

    def wait(self) -> list[Rollout | None]:
        """Wait for the rollouts and return them in order, None for each that is not proven."""
        return [rollout for batch in self.batches for rollout in batch.wait()]


class BetweenBatches(TrainerCallback):
    """Notes what is in flight at the end of each step. A stop in the next step must not change it."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """Let TRL's count of passes begin where the data begins. In a resumed run that may be inside a batch.

        TRL then rolls the batch out again, and trains it for the passes that are left of it.
        """
        steps_per_epoch = max(math.ceil(len(train_dataloader) / args.gradient_accumulation_steps), 1)
        skipped = 0 if args.ignore_data_skip else state.global_step % steps_per_epoch
        self.trainer._step = skipped * args.gradient_accumulation_steps
        self.trainer._buffered_inputs = None
        self.trainer.in_flight.epoch = int(state.epoch or 0) - 1

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.in_flight.epoch += 1

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.in_flight.note()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.trainer.in_flight.end_epoch()


class InFlight:
    """The conversations of a run: those of this step, and with `max_staleness` those of later batches.

    With `late_groups: wait` batches are trained in the order in which they were begun. With `admit` a step takes the
    groups that are complete, oldest first, of any batch.

    For each batch a trainer calls `rows_of_step`, then `complete`, then `start_next`. Its `_start_rollouts` starts
    conversations, and its `_sync_weights` pushes the weights.

    Args:
        trainer: Of the run. It saves what is in flight by `save`.

    Attributes:
        current: The conversations of this step; None where there are none. Progress is read from it.
        groups: What is in flight beside it, oldest first: batches with `wait`, groups with `admit`.
        epoch: The number of the epoch, by which prompts are ordered. A callback may end one early
            (`should_epoch_stop`), and `state.epoch` then counts a part of it until the next step.
        told_in_vain: Whether it was said that no group of a batch has a signal, whatever is asked for.
    """

    POLL_SECONDS = 0.02  # between two looks at what is complete
    MAX_RESTARTS = 3  # of the server, in one batch of rollouts

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.current: RolloutBatch | AwaitedGroups | None = None
        self.groups: deque[RolloutBatch | GroupInFlight] = deque()
        self.told_in_vain, self.epoch = False, 0
        self._epoch: LookAhead | None = None  # `wait`
        self._next: list[list[dict[str, Any]]] = []  # `wait`: of the batches to start after this one
        self._prompts: EpochPrompts | None = None  # `admit`, and `refill_groups`
        self._taken: ChosenGroups | None = None  # `admit`: what this step trains
        self._batch_prompts: list[int] = []  # of the batch that is trained, as rows of the dataset; as `_prompts`
        self._to_save: dict[str, Any] | None = None  # of the end of the last batch's training; as `_prompts`

    def begin(self, checkpoint: str | None) -> None:
        """Begin a run, or go on from a checkpoint. Raises `RunError` if it cannot train that one's prompts in flight.

        Args:
            checkpoint: Its folder; None: a new run.
        """
        args = self.trainer.args
        per_batch = args.generation_batch_size // args.num_generations
        goes_on = checkpoint and not args.ignore_data_skip  # which begins the epoch anew
        saved = read_in_flight(Path(checkpoint), args.late_groups, per_batch, self._refills) if goes_on else None
        self._to_save = saved if args.late_groups == "admit" or self._refills else None
        self._prompts = None

    def cancel(self) -> None:
        """Cancel all running conversations."""
        for batch in filter(None, (self.current, self._taken, *self.groups)):
            batch.cancel()
        self.groups.clear()
        self.current = self._taken = None

    def end_epoch(self) -> None:
        """Give up what is in flight. Only an epoch that a callback ended (`should_epoch_stop`) has something left."""
        if self.groups and not self._refills:
            self.cancel()
        if self._prompts is not None:
            self._prompts.end()

    @property
    def _refills(self) -> bool:
        return self.trainer.args.refill_groups > 0

    @property
    def data_passes(self) -> float:
        """With `refill_groups`: passes through the data so far."""
        return self._prompts.passes

    @property
    def num_passes(self) -> int:
        """Forward passes that one batch of rollouts serves."""
        return self.trainer.args.steps_per_generation * self.trainer.num_iterations

    @property
    def _batches_left(self) -> int:
        """Batches of rollouts up to the last step, this one included."""
        state, args = self.trainer.state, self.trainer.args
        passes = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
        return math.ceil((self.trainer._step % self.num_passes + passes) / self.num_passes)

    def rows_of_step(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows that this rank trains next. Collective.

        Those given, or with `admit` those of complete groups; with `refill_groups` the next ones of the run's own
        passes through the data.
        """
        args = self.trainer.args
        if not self.trainer.model.training:
            return rows
        if args.max_staleness and args.late_groups == "admit":
            return self._admit(rows)
        if self._refills:
            return self._next_rows(rows)
        if args.max_staleness:
            self._look_ahead()
        return rows

    def refill(
        self, rows: list[dict[str, Any]], slots: list[int]
    ) -> tuple[list[dict[str, Any]], list[Rollout], dict[str, float]]:
        """(rows, rollouts, metrics) of further prompts for these slots of a batch. Collective.

        Args:
            rows: The B rows of the batch.
            slots: Numbers of groups of the batch, the same on all ranks.
        """
        kinds, slot_of_row, first = self._slots(len(rows))
        own = [i for i, slot in enumerate(slot_of_row) if slot in slots]
        if self.trainer.args.max_staleness:
            taken = self._choose(slots, kinds, slot_of_row, [first + i for i in own])
            prompts, further = [group.prompt for group in taken], self._taken.rows
        else:
            prompts = [self._prompts.take() for _ in slots]
            data = self.trainer.train_dataset
            further = [data[prompts[slots.index(slot_of_row[i])]] for i in own]
        for slot, prompt in zip(slots, prompts):
            self._batch_prompts[slot] = prompt
        placed = list(rows)
        for i, row in zip(own, further, strict=True):
            placed[i] = row
        rollouts, metrics = self.complete(placed, own)
        return further, rollouts, metrics

    def _take_prefetched(self, rows: list[dict[str, Any]]) -> RolloutBatch | ChosenGroups | None:
        """The conversations that were started ahead of this batch, if there are any."""
        if not self.trainer.model.training:
            return None
        if self._taken is not None:
            taken, self._taken = self._taken, None
            return taken
        if not self.groups:
            return None
        if self.groups[0].prompts != prompts_of(rows):
            raise RuntimeError("The rollouts in flight have other prompts: the order of the data has changed.")
        return self.groups.popleft()

    def complete(
        self, rows: list[dict[str, Any]], places: list[int] | None = None
    ) -> tuple[list[Rollout], dict[str, float]]:
        """Wait for all conversations of this rank, and restart those that a lost server leaves. Collective.

        Args:
            rows: The B rows of the batch.
            places: Of the rows that are meant. None: all.

        Returns the rollouts in the order of the rows, and the metrics `rollout/*`. Raises `RunError` on all ranks.
        """
        trainer = self.trainer
        places = list(range(len(rows))) if places is None else places
        found: dict[int, Rollout] = {}  # place -> rollout
        num_restarted, num_retries, num_pushes, waited = 0, 0, 0, 0.0

        def begin() -> None:
            missing = [i for i in places if i not in found]
            started = None if num_restarted else self._take_prefetched(rows)
            self.current = started or trainer._start_rollouts(rows, missing)

        def finish() -> tuple[int, int, int]:
            for rollout in self.current.wait():
                if rollout is not None:
                    found[rollout.index - trainer.accelerator.process_index * len(rows)] = rollout
            kept = {id(rollout) for rollout in found.values()}
            trainer.env.close([lost for lost in self.current.rollouts if id(lost) not in kept])
            retries, trainer.llm.retries = getattr(trainer.llm, "retries", 0), 0
            no_other_server = not getattr(trainer.llm, "joined", ())
            return len(places) - len(found), retries, int(no_other_server)

        while num_pushes < self.MAX_RESTARTS:
            if num_restarted or not self.groups or not trainer.model.training:
                trainer._stop_if_asked()  # before the push: the server may be gone as well
                trainer._sync_weights()
            trainer._on_all_ranks(begin, "Rollouts")
            began = time.perf_counter()
            if getattr(trainer, "client", None) is not None:
                self._meet_until_over()
            num_missing, retries, num_without = trainer._on_all_ranks(finish, "Rollouts")
            waited += time.perf_counter() - began + self.current.waited
            num_retries += retries
            if not num_missing:
                break
            logger.warning(
                f"Step {trainer.state.global_step}: a vLLM server was lost during rollouts. {num_missing} unfinished "
                f"conversations are restarted{', after the weights are pushed again' if num_without else ''}."
            )
            num_restarted += num_missing
            if num_without:
                num_pushes += 1
                if trainer.weight_sync is not None:
                    trainer.weight_sync.doubted = True
        else:
            raise RunError(f"The vLLM server restarted {self.MAX_RESTARTS} times during one batch. See its log.")
        return [found[i] for i in places], {
            "rollout/restarted": num_restarted,
            "rollout/retries": num_retries,
            "rollout/seconds": self.current.seconds,
            "rollout/wait_seconds": waited,
        }

    # -- late_groups: wait --

    def shown(self, epoch_iterator: Iterator) -> Iterator:
        """An epoch's batches for `Trainer`; with `max_staleness` they can also be seen before they are trained."""
        if not self.trainer.args.max_staleness or self.trainer.args.late_groups == "admit":
            return epoch_iterator
        if self._epoch is None or self._epoch.source is not epoch_iterator:
            self._epoch = LookAhead(epoch_iterator, self.num_passes)
        return self._epoch

    def _look_ahead(self) -> None:
        """Note the prompts of the batches to start after this one: up to `max_staleness` are in flight.

        None is of another epoch, and none would be trained after the last step.
        """
        upcoming = self._epoch.next_rollouts(self.trainer.args.max_staleness)
        started = max(len(self.groups) - 1, 0)  # the first one in flight is this step's
        self._next = upcoming[started : self._batches_left - 1]

    def start_next(self) -> None:
        """Push the weights, and start later batches' conversations. Raises `RunError` on all ranks.

        Earlier ones are still in flight. Their requests go on with the new weights, and keep the logprobs of the old;
        those that name an adapter end with it.
        """
        if not self.trainer.model.training or not self._next:
            return
        self.trainer._sync_weights()
        batches, self._next = self._next, []

        def start() -> None:
            for rows in batches:
                self.groups.append(self.trainer._start_rollouts(rows, list(range(len(rows)))))
                self.groups[-1].prompts = prompts_of(rows)

        self.trainer._on_all_ranks(start, "Rollouts")

    # -- prompts of the run's own --

    def _slots(self, count: int) -> tuple[list[Kind], list[int], int]:
        """(the kind of each group of a batch, the group of each of this rank's rows, the number of its first row)."""
        trainer = self.trainer
        kinds = slot_kinds(count, trainer.num_generations, trainer.accelerator.num_processes)
        first = trainer.accelerator.process_index * count
        return kinds, [index // trainer.num_generations for index in range(first, first + count)], first

    def _order(self, number: int) -> list[int]:
        """The prompts of a pass through the data, in the order of the epoch of that number."""
        trainer = self.trainer
        sampler = trainer._get_train_sampler(trainer.train_dataset)
        sampler.epoch = lambda: number
        num_prompts = trainer.args.generation_batch_size // trainer.num_generations
        return epoch_order(sampler, num_prompts, trainer.num_generations, self.num_passes)

    def _next_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of the next prompts, in the place of those given."""
        trainer = self.trainer
        kinds, slot_of_row, _ = self._slots(len(rows))
        if self._prompts is None:
            trainer._on_all_ranks(lambda: self._begin_epoch(rows, slot_of_row, len(kinds)), "Rollouts")
        self._batch_prompts = [self._prompts.take() for _ in kinds]
        return [trainer.train_dataset[self._batch_prompts[slot]] for slot in slot_of_row]

    # -- late_groups: admit --

    def _admit(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Push the weights, ask for new groups, and take a batch of complete ones. Collective.

        INVARIANT: `groups` has the same groups on all ranks, in the same order.
        """
        trainer = self.trainer
        slots, slot_of_row, first = self._slots(len(rows))
        if self._prompts is None or not (self._prompts.left or self.groups):
            trainer._on_all_ranks(lambda: self._begin_epoch(rows, slot_of_row, len(slots)), "Rollouts")
        trainer._stop_if_asked()
        trainer._sync_weights()
        wanted = min(trainer.args.max_staleness + 1, self._batches_left) * len(slots)
        trainer._on_all_ranks(lambda: self._ask_for_groups(wanted, slots, slot_of_row), "Rollouts")
        # A checkpoint in the middle of a batch: this batch is trained further.
        oldest = len(slots) if trainer._step % self.num_passes else None
        taken = self._choose(list(range(len(slots))), slots, slot_of_row, range(first, first + len(rows)), oldest)
        self._batch_prompts = [group.prompt for group in taken]
        return self._taken.rows

    def _choose(
        self,
        chosen_slots: list[int],
        slots: list[Kind],
        slot_of_row: list[int],
        places: Iterable[int],
        oldest: int | None = None,
    ) -> list[GroupInFlight]:
        """Wait for complete groups for these slots, of the `oldest` ones alone if given, and take them. Collective.

        INVARIANT: what is in flight can fill the slots. A refill takes groups of some kinds, which are asked for here.
        """
        trainer, kinds = self.trainer, [slots[slot] for slot in chosen_slots]
        trainer._stop_if_asked()
        missing = (Counter(kinds) - Counter(group.kind for group in self.groups)).elements()
        if self._refills and (missing := list(missing)):

            def ask() -> None:
                for kind in missing:
                    self._start_group(slots.index(kind), slots, slot_of_row)

            trainer._on_all_ranks(ask, "Rollouts")
        began = time.perf_counter()
        chosen = self._wait_for_groups(kinds, oldest)
        waited, groups = time.perf_counter() - began, list(self.groups)
        self.groups = deque(group for i, group in enumerate(groups) if i not in chosen)
        taken = [groups[i] for i in chosen]
        self._taken = ChosenGroups(taken, places, waited)
        return taken

    def _meet_until_over(self) -> None:
        """Wait until the conversations of all ranks are over. Collective.

        INVARIANT: no rank waits for conversations of another one in one call. It would end after `ddp_timeout`, though
        nothing is wrong. For servers alone: in this process `wait` itself samples.
        """
        trainer, num_ranks = self.trainer, self.trainer.accelerator.num_processes
        while num_ranks > 1:
            flags = torch.tensor(
                [self.current.over, trainer._stop_signal is None], dtype=torch.int32, device=trainer.accelerator.device
            )
            over, go_on = (trainer.accelerator.reduce(flags, "sum") == num_ranks).tolist()
            if not go_on:
                trainer._stop_if_asked()
            if over:
                return
            time.sleep(self.POLL_SECONDS)

    def _begin_epoch(self, rows: list[dict[str, Any]], slot_of_row: list[int], num_prompts: int) -> None:
        """Read the order of the epoch's prompts; a resumed run first asks again for those that were in flight.

        INVARIANT: an epoch has as many prompts left as its batches of data that are left have slots. With
        `refill_groups` it has no end.
        """
        trainer = self.trainer
        epoch, saved, trained = self.epoch, self._to_save, 0
        order = self._order(epoch)
        if self._prompts is None and not trainer.args.ignore_data_skip:  # the run's first batch
            batches = trainer.state.global_step * trainer.args.gradient_accumulation_steps // self.num_passes
            trained = batches * num_prompts - epoch * len(order)
        if self._refills and saved and saved.get("passes"):
            again = [*saved.get("batch", []), *saved["prompts"]]
            self._prompts = PassPrompts(saved["epoch"], self._order, saved["place"], again)
            return
        if self._prompts is None and saved and (saved["prompts"] or "batch" in saved):
            found = saved["epoch"], saved["place"] - len(saved["prompts"])
            if found != (epoch, trained):
                raise RunError(
                    f"the checkpoint is of epoch {found[0]}, {found[1]} prompts trained, got epoch {epoch}, {trained} "
                    "prompts. Use the data, the batch sizes and num_iterations of the run that saved it, or set "
                    "ignore_data_skip: true to restart the epoch."
                )
            self._prompts = EpochPrompts.resumed(order, saved)
            if self._refills:
                self._prompts = PassPrompts(epoch, self._order, self._prompts.place, self._prompts.again)
            return
        self._prompts = (
            PassPrompts(epoch, self._order, trained) if self._refills else EpochPrompts(epoch, order, trained)
        )
        expected = [order[trained + slot] for slot in slot_of_row] if trained + num_prompts <= len(order) else []
        prompts = prompts_of(trainer.train_dataset[k] for k in expected)
        if expected and prompts != prompts_of(rows):
            raise RunError("late_groups: admit: the batch has other prompts than the trainer's own sampler returns.")
        self._to_save = self._prompts.state([], num_prompts)

    def _ask_for_groups(self, wanted: int, slots: list[Kind], slot_of_row: list[int]) -> None:
        """Start whole batches until `wanted` groups are in flight, or all of the epoch's are."""
        while len(self.groups) < wanted and self._prompts.left >= len(slots):
            for slot in range(len(slots)):
                self._start_group(slot, slots, slot_of_row)

    def _start_group(self, slot: int, slots: list[Kind], slot_of_row: list[int]) -> None:
        """Start the conversations of the next prompt, as the group of this slot of a batch."""
        prompt, own = self._prompts.take(), [i for i, of in enumerate(slot_of_row) if of == slot]
        row = self.trainer.train_dataset[prompt]
        batch = self.trainer._start_rollouts([row] * len(slot_of_row), own) if own else None
        self.groups.append(GroupInFlight(prompt, slots[slot], [row] * len(own), batch))

    def _wait_for_groups(self, slots: list[Kind], oldest: int | None = None) -> list[int]:
        """The indices in `groups` of the groups to train, one per slot; the same on all ranks. Collective.

        Args:
            slots: The kind of each slot's group.
            oldest: Choose among this many of the oldest groups in flight. None: among all.
        """
        trainer = self.trainer
        groups, num_ranks = list(self.groups), trainer.accelerator.num_processes
        if Counter(slots) - Counter(group.kind for group in groups):
            raise RunError(
                f"The epoch has {len(groups)} groups left, expected {len(slots)} of the kinds of its slots. "
                "Its batches have changed."
            )
        groups = groups[:oldest]
        self.current = AwaitedGroups(groups)
        while True:
            flags = [*(group.over for group in groups), trainer._stop_signal is None]
            flags = torch.tensor(flags, dtype=torch.int32, device=trainer.accelerator.device)
            *complete, go_on = (trainer.accelerator.reduce(flags, "sum") == num_ranks).tolist()
            if not go_on:
                trainer._stop_if_asked()
            chosen = choose_groups(complete, [group.kind for group in groups], slots)
            if chosen is not None:
                return chosen
            time.sleep(self.POLL_SECONDS)

    # -- checkpoints --

    def note(self) -> None:
        """Keep what a checkpoint must hold. Of a batch that is to be trained further this is the batch itself."""
        over = self.trainer._step % self.num_passes == 0
        if self._prompts is not None and (over or self._refills):
            num_prompts = self.trainer.args.generation_batch_size // self.trainer.args.num_generations
            self._to_save = self._prompts.state([group.prompt for group in self.groups], num_prompts)
        if self._to_save is not None and not over:
            self._to_save["batch"] = self._batch_prompts

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs into a checkpoint."""
        write_in_flight(folder, self._to_save)


class RolloutBatch:
    """The running conversations of this rank, which all started with the same weights.

    Args:
        rollouts: They are filled by the conversations.
        converse: Creates a rollout's conversation with its backend.
        llm: The backend, a `ServerPool` or an `InProcessBackend`. `routes` of a pool gives each conversation a backend
            of its own, and its `start_conversations` proves which weights sampled. `InProcessBackend` generates in
            the thread that waits. Any other backend needs only `generate`.
        version: The version of the weights that the server holds at the start. Later ones may be pushed meanwhile.
        group_size: Rollouts per prompt. Rollouts with indices in the same block of so many are a group.

    Attributes:
        prompts: The prompts of a batch that was started before its step. None for any other batch.
        seconds: Time from the start to the end of the last conversation.
        waited: Seconds that training waited before it took these conversations.
    """

    def __init__(
        self,
        rollouts: list[Rollout],
        converse: Callable[[Rollout, Any], Coroutine],
        llm: Any,
        version: str | None,
        group_size: int,
    ):
        self.rollouts, self.prompts = rollouts, None
        self.seconds = self.waited = 0.0
        self._began, self._ended = time.perf_counter(), threading.Event()
        groups = [rollout.index // group_size for rollout in rollouts]
        backends = llm.routes(groups) if hasattr(llm, "routes") else [llm] * len(rollouts)
        conversations = [converse(rollout, backend) for rollout, backend in zip(rollouts, backends)]
        if hasattr(llm, "start_conversations"):
            self._future = llm.start_conversations(conversations, version, backends)
        else:
            self._future = start_in_background(gather_all(conversations))
        self._future.add_done_callback(self._note_end)

    @property
    def over(self) -> bool:
        """Whether the last conversation has ended."""
        return self._ended.is_set()

    def _note_end(self, _: concurrent.futures.Future) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()

    def wait(self) -> list[Rollout | None]:
        """Wait for the rollouts and return them in order, None for each that is not proven to come from `version`.

        Call it in the thread that may run collectives. Raises the first error of a conversation.
        """
        try:
            rollouts = self._future.result()
            self._ended.wait()  # `result` may return before `_note_end` has run
            return rollouts
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        self._future.cancel()

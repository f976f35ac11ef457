"""The conversations of a step, the queue of groups in flight for later steps, and which prompts are asked for next."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

from mt_grpo.base.errors import RunError
from mt_grpo.base.event_loop import gather_all, start_in_background
from mt_grpo.base.rows import prompts_of
from mt_grpo.rollout import Rollout
from mt_grpo.run.checkpoints import get_rng_state

logger = logging.getLogger(__name__)

RowList = list[dict[str, Any]]  # of the dataset
Kind = tuple[int, ...]  # of a group: its rollouts on each rank


def slot_kinds(per_rank: int, group_size: int, num_ranks: int) -> list[Kind]:
    """For each group of a batch the rollouts on each rank. A group can only replace one with the same numbers.

    >>> slot_kinds(per_rank=8, group_size=4, num_ranks=1), slot_kinds(per_rank=6, group_size=4, num_ranks=2)
    ([(4,), (4,)], [(4, 0), (2, 2), (0, 4)])
    """
    ranks = [index // per_rank for index in range(per_rank * num_ranks)]
    groups = [ranks[first : first + group_size] for first in range(0, len(ranks), group_size)]
    return [tuple(group.count(rank) for rank in range(num_ranks)) for group in groups]


def choose_groups(complete: list[bool], kinds: list[Kind], slots: list[Kind]) -> list[int] | None:
    """For each slot of a batch the index of a complete group of its kind, oldest first; None if there are too few."""
    waiting = {kind: deque(i for i, own in enumerate(kinds) if own == kind and complete[i]) for kind in slots}
    chosen = [waiting[kind].popleft() if waiting[kind] else None for kind in slots]
    return None if None in chosen else chosen


class EpochOrder(Sampler):
    """TRL's sampler, with an order that depends on the number of the epoch, not on the epochs of this process."""

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        return self.of_epoch(self.epoch())

    def of_epoch(self, number: int) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + number)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class Prompts:
    """The prompts of an epoch that are still to be asked for.

    `order_of` returns the order of an epoch, `place` of its prompts were asked for, and `prompts` are asked for again,
    before all others. If it is `endless` (`refill_groups`), the next epoch follows.

    >>> prompts = Prompts([[3, 1, 0, 2], [0, 3, 1, 2]].__getitem__, 0, place=2, prompts=[1], endless=True)
    >>> [prompts.take() for _ in range(5)], prompts.state([3])
    ([1, 0, 2, 0, 3], {'epoch': 1, 'place': 2, 'prompts': [3], 'endless': True})
    """

    def __init__(self, order_of: Callable, epoch: int, place: int, prompts: Iterable[int] = (), endless: bool = False):
        self.order_of, self.epoch, self.place, self.endless = order_of, epoch, place, endless
        self.order, self.again = order_of(epoch), deque(prompts)

    @property
    def left(self) -> int:
        return sys.maxsize if self.endless else len(self.again) + max(len(self.order) - self.place, 0)

    def take(self) -> int:
        """Return the index of the next prompt."""
        if self.again:
            return self.again.popleft()
        if self.endless and self.place >= len(self.order):
            self.epoch, self.order, self.place = self.epoch + 1, self.order_of(self.epoch + 1), 0
        self.place += 1
        return self.order[self.place - 1]

    def state(self, not_trained: Iterable[int]) -> dict[str, Any]:
        """What a resumed run needs, as JSON data: the position, and the prompts asked for and not trained."""
        prompts = [*not_trained, *self.again]
        return {"epoch": self.epoch, "place": self.place, "prompts": prompts, "endless": self.endless}


class RolloutBatch:
    """Conversations of this rank that were started together, with the weights `version` of the server."""

    def __init__(self, rollouts: list[Rollout], converse: Callable, llm: Any, version: str | None, group_size: int):
        self.rollouts, self.seconds = rollouts, 0.0  # from the start to the end of the last conversation
        began, groups = time.perf_counter(), [rollout.index // group_size for rollout in rollouts]

        async def timed(rollout: Rollout, backend: Any) -> Rollout:
            try:
                return await converse(rollout, backend)
            finally:
                self.seconds = time.perf_counter() - began

        backends = llm.routes(groups) if hasattr(llm, "routes") else [llm] * len(rollouts)
        conversations = [timed(rollout, backend) for rollout, backend in zip(rollouts, backends)]
        if hasattr(llm, "start_conversations"):
            future = llm.start_conversations(conversations, version, backends)
        else:
            future = start_in_background(gather_all(conversations))
        self.over, self.cancel = future.done, future.cancel
        # Returns the rollouts in order, None for each that is not proven to come from `version`. An `InProcessBackend`
        # generates in the thread that waits.
        self.wait: Callable[[], list[Rollout | None]] = future.result


@dataclass(frozen=True)
class GroupInFlight:
    """The conversations of one prompt."""

    prompt: int  # index of its row in the dataset
    row: dict[str, Any]
    kind: Kind
    batches: list[RolloutBatch]  # this rank's conversations: one batch, or none


class InFlight(TrainerCallback):
    """The conversations of a run: those of this step, and with `max_staleness` a queue of groups for later steps.

    With `late_groups: wait` a step waits for the oldest groups: batches are trained in the order in which they were
    begun. With `admit` it takes the groups that are complete, oldest first.
    """

    POLL_SECONDS = 0.02  # between two looks at what is complete
    MAX_RESTARTS = 3  # of the server, in one batch of rollouts

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.current: list[RolloutBatch] = []  # the conversations of this step, which progress reads
        self.groups: deque[GroupInFlight] = deque()  # the queue, INVARIANT: the same on all ranks, in the same order
        self.epoch = 0  # orders prompts. `state.epoch` is fractional after one that a callback ended early
        self.state: dict[str, Any] | None = None  # `Prompts.state` at the end of the last step, for checkpoints
        self._resumed: dict[str, Any] | None = None  # `state` of the checkpoint, until the first batch
        self.prompts: Prompts | None = None  # of the epoch, once its first batch is asked for
        self._batch_prompts: dict[int, int] = {}  # slot -> prompt of the batch that is trained
        self._taken: list[RolloutBatch] | None = None  # what this step trains, until `complete` is called
        self._waited = 0.0  # seconds that this step has waited for what it trains
        self.step_end: tuple[tuple, int] | None = None  # random numbers and token count, at the end of the last step

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Begin a run, or go on from the `state` of a checkpoint."""
        self.state = self._resumed = saved if saved and (saved["prompts"] or saved["endless"]) else None
        self.prompts = None

    def cancel(self) -> None:
        """Cancel all running conversations."""
        for batch in [*self.current, *(self._taken or []), *(each for group in self.groups for each in group.batches)]:
            batch.cancel()
        self.groups.clear()
        self.current, self._taken = [], None

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """In a run that is resumed inside a batch, let TRL roll it out again, for its remaining passes."""
        steps_per_epoch = max(math.ceil(len(train_dataloader) / args.gradient_accumulation_steps), 1)
        skipped = 0 if args.ignore_data_skip else state.global_step % steps_per_epoch
        self.trainer._step = skipped * args.gradient_accumulation_steps
        if (passes := (self._resumed or {}).get("passes")) is not None:  # an epoch may have ended inside a batch
            self.trainer._step += (passes - self.trainer._step) % self.num_micro_batches
        self.trainer._buffered_inputs = None
        self.epoch = int(state.epoch or 0) - 1

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Give up what is left of an epoch that a callback ended, the further passes of its last batch included."""
        self.epoch += 1
        if self.trainer._buffered_inputs is not None:  # otherwise the run begins, maybe inside an epoch
            self.trainer._step = 0
        if self.prompts is not None and not self.prompts.endless:
            self.cancel()
            self.prompts = None

    def on_step_end(self, args, state, control, **kwargs):
        # A stop in the next step must not change what a checkpoint holds. A new epoch draws a random number before its
        # first batch, and a resumed run draws this number again.
        self.step_end = get_rng_state(), state.num_input_tokens_seen
        if self.prompts is not None:
            passes = self.trainer._step % self.num_micro_batches  # not 0: the batch is to be trained further
            own = self._batch_prompts.values() if passes else []
            self.state = self.prompts.state([*own, *(group.prompt for group in self.groups)])
            self.state |= {"passes": passes} if self.prompts.endless else {}

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one batch of rollouts serves, each of which may be several forward passes."""
        return self.trainer.args.steps_per_generation * self.trainer.num_iterations

    @property
    def _batches_left(self) -> int:
        """Batches of rollouts up to the last step, this one included."""
        state, args = self.trainer.state, self.trainer.args
        passes = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
        return math.ceil((self.trainer._step % self.num_micro_batches + passes) / self.num_micro_batches)

    @property
    def _slots(self) -> tuple[list[Kind], list[int]]:
        """(the kind of each group of a batch, the group of each of this rank's rows)."""
        trainer = self.trainer
        num_ranks, group_size = trainer.accelerator.num_processes, trainer.num_generations
        count = trainer.args.generation_batch_size // num_ranks
        first = trainer.accelerator.process_index * count
        return slot_kinds(count, group_size, num_ranks), [index // group_size for index in range(first, first + count)]

    def rows_of_step(self, rows: RowList) -> RowList:
        """The rows that this rank trains next: the given ones, or those of the run's own order. Collective."""
        trainer, args = self.trainer, self.trainer.args
        if not trainer.model.training or not (args.max_staleness or args.refill_groups or self.state):
            return rows
        num_slots, num_oldest = len(self._slots[0]), None
        if self.prompts is None:
            trainer._on_all_ranks(lambda: self._begin_epoch(rows), "Rollouts")
        if args.max_staleness:
            admits = args.late_groups == "admit"
            if admits or len(self.groups) < num_slots:
                self._ask(args.max_staleness + 1 if admits else 1)
            # Resumed in the middle of a batch: the same groups are taken.
            num_oldest = None if admits and trainer._step % self.num_micro_batches == 0 else num_slots
        self._batch_prompts = {}
        return self._take(list(range(num_slots)), num_oldest)

    def start_next(self) -> None:
        """With `late_groups: wait`, push the weights and start later batches, which run while this one is trained."""
        args = self.trainer.args
        if self.trainer.model.training and args.max_staleness and args.late_groups == "wait":
            count = min(args.max_staleness, self._batches_left - 1)
            if len(self.groups) < count * len(self._slots[0]) and self.prompts.left:
                self._ask(count)

    def refill(self, rows: RowList, slots: list[int]) -> tuple[RowList, list[Rollout], dict[str, float]]:
        """(rows, rollouts, metrics) of further prompts for these slots of a batch of B rows. Collective."""
        further, placed = self._take(slots), list(rows)
        places = [i for i, slot in enumerate(self._slots[1]) if slot in slots]
        for i, row in zip(places, further, strict=True):
            placed[i] = row
        return further, *self.complete(placed, places)

    def complete(self, rows: RowList, places: list[int] | None = None) -> tuple[list[Rollout], dict[str, float]]:
        """Wait for the conversations of the rows (or those at `places`). Returns them and metrics. Collective."""
        trainer = self.trainer
        places = list(range(len(rows))) if places is None else places
        found: dict[int, Rollout] = {}  # place -> rollout
        num_restarted = num_retries = num_pushes = 0
        waited, self._waited = self._waited, 0.0

        def begin() -> None:
            if self._taken is None:
                self._taken = [trainer._start_rollouts(rows, [i for i in places if i not in found])]
            self.current, self._taken = self._taken, None

        def finish() -> tuple[int, int, int]:
            for rollout in [rollout for batch in self.current for rollout in batch.wait()]:
                if rollout is not None:
                    found[rollout.index - trainer.accelerator.process_index * len(rows)] = rollout
            kept = {id(rollout) for rollout in found.values()}
            trainer.env.close([lost for batch in self.current for lost in batch.rollouts if id(lost) not in kept])
            retries, trainer.llm.retries = getattr(trainer.llm, "retries", 0), 0
            return len(places) - len(found), retries, int(not getattr(trainer.llm, "joined", ()))

        while num_pushes < self.MAX_RESTARTS:
            if self._taken is None:
                trainer._stop_if_asked()  # before the push: the server may be gone as well
                trainer._sync_weights()
            trainer._on_all_ranks(begin, "Rollouts")
            began = time.perf_counter()
            if getattr(trainer, "client", None) is not None and trainer.accelerator.num_processes > 1:
                # INVARIANT: no rank waits for conversations of another one in one call. It would end after
                # `ddp_timeout`, though nothing is wrong. Without a server `wait` itself samples.
                while not self._on_every_rank([all(batch.over() for batch in self.current)])[0]:
                    time.sleep(self.POLL_SECONDS)
            num_missing, retries, num_without = trainer._on_all_ranks(finish, "Rollouts")
            waited += time.perf_counter() - began
            num_retries += retries
            if not num_missing:
                break
            what = f"a server was lost during rollouts. {num_missing} conversations are restarted"
            logger.warning(f"Step {trainer.state.global_step}: {what}.")
            num_restarted += num_missing
            if num_without:
                num_pushes += 1
                if trainer.weight_sync is not None:
                    trainer.weight_sync.doubted = True
        else:
            raise RunError(f"The server restarted {self.MAX_RESTARTS} times during one batch. See its log.")
        return [found[i] for i in places], {
            "rollout/restarted": num_restarted,
            "rollout/retries": num_retries,
            "rollout/seconds": max((batch.seconds for batch in self.current), default=0.0),
            "rollout/wait_seconds": waited,
        }

    def _begin_epoch(self, rows: RowList) -> None:
        """Read the order of the epoch's prompts; a resumed run first asks again for those that were not trained."""
        trainer, (kinds, slot_of_row) = self.trainer, self._slots
        sampler, resumed, self._resumed = trainer._get_train_sampler(trainer.train_dataset), self._resumed, None
        trained = trainer._step // self.num_micro_batches * len(kinds)
        begin = {"epoch": self.epoch, "place": trained, "prompts": [], **(resumed or {})}
        begin.pop("passes", None)
        self.prompts = Prompts(lambda number: list(dict.fromkeys(sampler.of_epoch(number))), **begin)
        found = begin["epoch"], begin["place"] - len(begin["prompts"])
        if not self.prompts.endless and found != (self.epoch, trained):
            got = f"epoch {found[0]}, {found[1]} prompts trained, got epoch {self.epoch}, {trained} prompts"
            hint = "Resume with the batch sizes and num_iterations of its run, or restart the epoch (ignore_data_skip)"
            raise RunError(f"The checkpoint is of {got}. {hint}.")
        self.prompts.endless |= bool(trainer.args.refill_groups)
        if resumed is None and (upcoming := self.prompts.order[trained : trained + len(kinds)]):
            if prompts_of(trainer.train_dataset[upcoming[slot]] for slot in slot_of_row) != prompts_of(rows):
                raise RunError("The batch has other prompts than the trainer's own sampler returns.")

    def _ask(self, count: int) -> None:
        """Push the weights, and start groups until `count` batches are in flight, or all of the epoch. Collective."""
        num_slots = len(self._slots[0])
        missing = math.ceil(min(count, self._batches_left) - len(self.groups) / num_slots)
        self.trainer._stop_if_asked()
        self.trainer._sync_weights()
        self._start([*range(num_slots)] * min(missing, self.prompts.left // num_slots))

    def _start(self, slots: list[int]) -> None:
        """Start a group of the next prompt for each of these slots of a batch. Collective."""
        trainer, (kinds, slot_of_row) = self.trainer, self._slots

        def start() -> None:
            for slot in slots:
                prompt, places = self.prompts.take(), [i for i, each in enumerate(slot_of_row) if each == slot]
                row = trainer.train_dataset[prompt]
                batches = [trainer._start_rollouts([row] * len(slot_of_row), places)] if places else []
                self.groups.append(GroupInFlight(prompt, row, kinds[slot], batches))

        trainer._on_all_ranks(start, "Rollouts")

    def _take(self, slots: list[int], num_oldest: int | None = None) -> RowList:
        """Take the next prompts, or complete groups among the oldest, for these slots. Returns this rank's rows."""
        if self.trainer.args.max_staleness:
            groups = dict(zip(slots, self._wait_for(slots, num_oldest)))
            prompts, rows = {k: v.prompt for k, v in groups.items()}, {k: v.row for k, v in groups.items()}
        else:
            prompts = {slot: self.prompts.take() for slot in slots}
            rows = {slot: self.trainer.train_dataset[prompt] for slot, prompt in prompts.items()}
        self._batch_prompts |= prompts
        return [rows[slot] for slot in self._slots[1] if slot in rows]

    def _wait_for(self, slots: list[int], num_oldest: int | None) -> list[GroupInFlight]:
        """Wait for complete groups for these slots, among the oldest, and take their conversations."""
        kinds, slot_of_row = self._slots
        wanted = [kinds[slot] for slot in slots]
        # A refill takes groups of some kinds only. What then is missing for the next batch is started here.
        if missing := Counter(wanted) - Counter(group.kind for group in self.groups):
            self._start([kinds.index(kind) for kind in missing.elements()])
        began, groups, chosen = time.perf_counter(), list(self.groups)[:num_oldest], None
        self.current = [batch for group in groups for batch in group.batches]
        while chosen is None:
            complete = self._on_every_rank([all(batch.over() for batch in group.batches) for group in groups])
            chosen = choose_groups(complete, [group.kind for group in groups], wanted)
            time.sleep(self.POLL_SECONDS if chosen is None else 0)
        taken = [groups[i] for i in chosen]
        self.groups = deque(group for group in self.groups if not any(group is each for each in taken))
        self._taken, self._waited = [batch for group in taken for batch in group.batches], time.perf_counter() - began
        first = self.trainer.accelerator.process_index * len(slot_of_row)
        places = [first + i for i, slot in enumerate(slot_of_row) if slot in slots]
        for place, rollout in zip(places, [rollout for batch in self._taken for rollout in batch.rollouts]):
            rollout.place(place)
        return taken

    def _on_every_rank(self, flags: list[bool]) -> list[bool]:
        """Which of these flags are set on all ranks. Raises `RunStopped` if any rank got a signal. Collective."""
        trainer, num_ranks = self.trainer, self.trainer.accelerator.num_processes
        tensor = torch.tensor([*flags, trainer._stop_signal is None], dtype=torch.int32)
        sums = trainer.accelerator.reduce(tensor.to(trainer.accelerator.device), "sum")
        *common, go_on = (sums == num_ranks).tolist()
        if not go_on:
            trainer._stop_if_asked()
        return common

"""The conversations of a step, and the queue of groups in flight for later steps (`max_staleness`)."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from mt_grpo.base.event_loop import gather_all, start_in_background
from mt_grpo.base.ranks import RunError
from mt_grpo.base.rows import prompts_of
from mt_grpo.rollout import Rollout
from mt_grpo.run.checkpoints import get_rng_state, set_rng_state
from mt_grpo.run.next_prompts import Kind, Prompts, choose_groups, slot_kinds

logger = logging.getLogger(__name__)

RowList = list[dict[str, Any]]  # of the dataset


class RolloutBatch:
    """The running conversations of this rank, which all started with the weights `version` of the server.

    A `ServerPool` gives each conversation a backend of its own, one for each block of `group_size` indices, and proves
    which weights sampled. An `InProcessBackend` generates in the thread that waits.
    """

    waited = 0.0  # seconds that training waited before it took these conversations

    def __init__(self, rollouts: list[Rollout], converse: Callable, llm: Any, version: str | None, group_size: int):
        self.rollouts, self.seconds = rollouts, 0.0  # from the start to the end of the last conversation
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
        return self._ended.is_set()

    def _note_end(self, _: concurrent.futures.Future) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()

    def wait(self) -> list[Rollout | None]:
        """Return the rollouts in order, None for each that is not proven to come from `version`. May be collective."""
        try:
            rollouts = self._future.result()
            self._ended.wait()  # `result` may return before `_note_end` has run
            return rollouts
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        self._future.cancel()


@dataclass(frozen=True)
class GroupInFlight:
    """The conversations of one prompt."""

    prompt: int  # row of the dataset
    kind: Kind
    rows: RowList  # of this rank's conversations
    batch: RolloutBatch | Groups  # this rank's of them: all, some or none


class Groups:
    """Groups that a step waits for, or that it has taken, with the interface of `RolloutBatch`."""

    def __init__(self, groups: Iterable[GroupInFlight] = (), waited: float = 0.0):
        self.groups, self.waited = list(groups), waited
        self.batches = [group.batch for group in self.groups]
        self.rollouts = [rollout for batch in self.batches for rollout in batch.rollouts]
        self.rows = [row for group in self.groups for row in group.rows]

    @property
    def over(self) -> bool:
        return all(batch.over for batch in self.batches)

    @property
    def seconds(self) -> float:
        return max((batch.seconds for batch in self.batches), default=0.0)

    def wait(self) -> list[Rollout | None]:
        return [rollout for batch in self.batches for rollout in batch.wait()]

    def cancel(self) -> None:
        for batch in self.batches:
            batch.cancel()


class InFlight(TrainerCallback):
    """The conversations of a run: those of this step, and with `max_staleness` a queue of groups for later steps.

    There are two ways to take from the queue. With `late_groups: wait` a step waits for the oldest groups: batches are
    trained in the order in which they were begun. With `admit` it takes the groups that are complete, oldest first.
    For each batch a trainer calls `rows_of_step`, then `complete`, then `start_next`.
    """

    POLL_SECONDS = 0.02  # between two looks at what is complete
    MAX_RESTARTS = 3  # of the server, in one batch of rollouts

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.current: RolloutBatch | Groups | None = None  # the conversations of this step, which progress reads
        self.groups: deque[GroupInFlight] = deque()  # the queue, INVARIANT: the same on all ranks, in the same order
        self.epoch = 0  # orders prompts. In `state.epoch` one that a callback ends early is a part
        self.told_in_vain = False  # whether it was said that no group of a batch has a signal
        self.state: dict[str, Any] | None = None  # `Prompts.state` at the end of the last step, for checkpoints
        self._resumed: dict[str, Any] | None = None  # `state` of the checkpoint, until the first batch
        self._prompts: Prompts | None = None  # of the epoch, once its first batch is asked for
        self._num_trained = 0  # batches of the epoch that a resumed run finds trained
        self._batch_prompts: list[int] = []  # of the batch that is trained
        self._taken: Groups | None = None  # what this step trains, until `complete` is called
        self._step_end: tuple[tuple, int] | None = None  # random numbers and token count, at the end of the last step

    # -- the run's beginning, its epochs, and its checkpoints --

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Begin a run, or go on from the `state` of a checkpoint."""
        self.state = self._resumed = saved if saved and (saved["prompts"] or saved["endless"]) else None
        self._prompts = None

    def cancel(self) -> None:
        """Cancel all running conversations."""
        for batch in filter(None, (self.current, self._taken, Groups(self.groups))):
            batch.cancel()
        self.groups.clear()
        self.current = self._taken = None

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """In a run that is resumed inside a batch, let TRL roll it out again, for its remaining passes."""
        steps_per_epoch = max(math.ceil(len(train_dataloader) / args.gradient_accumulation_steps), 1)
        skipped = 0 if args.ignore_data_skip else state.global_step % steps_per_epoch
        self.trainer._step = skipped * args.gradient_accumulation_steps
        self.trainer._buffered_inputs = None
        self._num_trained = self.trainer._step // self.num_passes
        self.epoch = int(state.epoch or 0) - 1

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epoch += 1
        if self._prompts is not None and not self._prompts.endless:
            self.cancel()  # of an epoch that a callback ended, what is left
            self._prompts = None

    def on_step_end(self, args, state, control, **kwargs):
        # A stop in the next step must not change what a checkpoint holds. A new epoch draws a random number before its
        # first batch, and a resumed run draws this number again.
        self._step_end = get_rng_state(), state.num_input_tokens_seen
        if self._prompts is not None:
            is_over = self.trainer._step % self.num_passes == 0  # otherwise the batch is to be trained further
            own = [] if is_over else self._batch_prompts
            self.state = self._prompts.state([*own, *(group.prompt for group in self.groups)])

    def restore(self, state: TrainerState) -> None:
        """Restore the random numbers and the token count of the end of the last step."""
        rng, state.num_input_tokens_seen = self._step_end
        set_rng_state(rng)

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

    @property
    def _slots(self) -> tuple[list[Kind], list[int]]:
        """(the kind of each group of a batch, the group of each of this rank's rows)."""
        trainer = self.trainer
        num_ranks, group_size = trainer.accelerator.num_processes, trainer.num_generations
        count = trainer.args.generation_batch_size // num_ranks
        first = trainer.accelerator.process_index * count
        kinds = slot_kinds(count, group_size, num_ranks)
        return kinds, [index // group_size for index in range(first, first + count)]

    # -- what a step trains --

    def rows_of_step(self, rows: RowList) -> RowList:
        """The rows that this rank trains next: the given ones, or those of the run's own order. Collective."""
        trainer, args = self.trainer, self.trainer.args
        if not trainer.model.training or not (args.max_staleness or args.refill_groups or self.state):
            return rows
        kinds, slot_of_row = self._slots
        if self._prompts is None:
            trainer._on_all_ranks(lambda: self._begin_epoch(rows), "Rollouts")
        if not args.max_staleness:
            self._batch_prompts = [self._prompts.take() for _ in kinds]
            return [trainer.train_dataset[self._batch_prompts[slot]] for slot in slot_of_row]
        admits = args.late_groups == "admit"
        if admits:
            self._ask(args.max_staleness + 1)
        elif len(self.groups) < len(kinds):
            self._ask(1)
        # A checkpoint in the middle of a batch: this batch is trained further.
        any_of_all = admits and trainer._step % self.num_passes == 0
        taken = self._take(list(range(len(kinds))), None if any_of_all else len(kinds))
        self._batch_prompts = [group.prompt for group in taken.groups]
        return taken.rows

    def start_next(self) -> None:
        """With `late_groups: wait`, push the weights and start later batches, while earlier ones are in flight."""
        args = self.trainer.args
        if self.trainer.model.training and args.max_staleness and args.late_groups == "wait":
            count = min(args.max_staleness, self._batches_left - 1)
            if len(self.groups) < count * len(self._slots[0]) and self._prompts.left:
                self._ask(count)

    def refill(self, rows: RowList, slots: list[int]) -> tuple[RowList, list[Rollout], dict[str, float]]:
        """(rows, rollouts, metrics) of further prompts for these slots of a batch of B rows. Collective."""
        slot_of_row = self._slots[1]
        places = [i for i, slot in enumerate(slot_of_row) if slot in slots]
        if self.trainer.args.max_staleness:
            taken = self._take(slots, None)
            prompts, further = [group.prompt for group in taken.groups], taken.rows
        else:
            prompts = [self._prompts.take() for _ in slots]
            further = [self.trainer.train_dataset[prompts[slots.index(slot_of_row[i])]] for i in places]
        for slot, prompt in zip(slots, prompts):
            self._batch_prompts[slot] = prompt
        placed = list(rows)
        for i, row in zip(places, further, strict=True):
            placed[i] = row
        rollouts, metrics = self.complete(placed, places)
        return further, rollouts, metrics

    def complete(self, rows: RowList, places: list[int] | None = None) -> tuple[list[Rollout], dict[str, float]]:
        """Wait for the conversations of a batch's rows (or those at `places`), restarting what a lost server leaves.

        Collective. Returns the rollouts in the order of the rows, and the metrics `rollout/*`.
        """
        trainer = self.trainer
        places = list(range(len(rows))) if places is None else places
        found: dict[int, Rollout] = {}  # place -> rollout
        num_restarted, num_retries, num_pushes, waited = 0, 0, 0, 0.0

        def begin() -> None:
            missing = [i for i in places if i not in found]
            self.current, self._taken = self._taken or trainer._start_rollouts(rows, missing), None

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
            if self._taken is None:
                trainer._stop_if_asked()  # before the push: the server may be gone as well
                trainer._sync_weights()
            trainer._on_all_ranks(begin, "Rollouts")
            began = time.perf_counter()
            if getattr(trainer, "client", None) is not None and trainer.accelerator.num_processes > 1:
                # INVARIANT: no rank waits for conversations of another one in one call. It would end after
                # `ddp_timeout`, though nothing is wrong. Without a server `wait` itself samples.
                while not self._on_every_rank([self.current.over])[0]:
                    time.sleep(self.POLL_SECONDS)
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

    # -- the queue --

    def _order(self, number: int) -> list[int]:
        """The prompts of the epoch of a number, each one once, in the order of TRL's sampler."""
        sampler = self.trainer._get_train_sampler(self.trainer.train_dataset)
        sampler.epoch = lambda: number
        return list(dict.fromkeys(sampler))

    def _begin_epoch(self, rows: RowList) -> None:
        """Read the order of the epoch's prompts; a resumed run first asks again for those that were not trained."""
        kinds, slot_of_row = self._slots
        trained, self._num_trained = self._num_trained * len(kinds), 0
        saved, self._resumed = self._resumed, None
        endless = bool(self.trainer.args.refill_groups or (self.state and self.state["endless"]))
        if saved is None:
            self._prompts = Prompts(self._order, self.epoch, trained, endless=endless)
            upcoming = self._prompts.order[trained : trained + len(kinds)]
            expected = [self.trainer.train_dataset[upcoming[slot]] for slot in slot_of_row] if upcoming else rows
            if prompts_of(expected) != prompts_of(rows):
                raise RunError("The batch has other prompts than the trainer's own sampler returns.")
            return
        found = saved["epoch"], saved["place"] - len(saved["prompts"])
        if not saved["endless"] and found != (self.epoch, trained):
            raise RunError(
                f"The checkpoint is of epoch {found[0]}, {found[1]} prompts trained, got epoch {self.epoch}, {trained}"
                " prompts. Use the data, the batch sizes and num_iterations of the run that saved it, or set "
                "ignore_data_skip: true to restart the epoch."
            )
        self._prompts = Prompts(self._order, saved["epoch"], saved["place"], saved["prompts"], endless)

    def _ask(self, count: int) -> None:
        """Push the weights, and start groups until `count` batches are in flight, or all of the epoch. Collective."""
        trainer, num_slots = self.trainer, len(self._slots[0])
        wanted = min(count, self._batches_left) * num_slots

        def start() -> None:
            while len(self.groups) < wanted and self._prompts.left >= num_slots:
                for slot in range(num_slots):
                    self._start_group(slot)

        trainer._stop_if_asked()
        trainer._sync_weights()
        trainer._on_all_ranks(start, "Rollouts")

    def _start_group(self, slot: int) -> None:
        kinds, slot_of_row = self._slots
        prompt, own = self._prompts.take(), [i for i, of in enumerate(slot_of_row) if of == slot]
        row = self.trainer.train_dataset[prompt]
        batch = self.trainer._start_rollouts([row] * len(slot_of_row), own) if own else Groups()
        self.groups.append(GroupInFlight(prompt, kinds[slot], [row] * len(own), batch))

    def _take(self, slots: list[int], oldest: int | None) -> Groups:
        """Wait for complete groups for these slots of a batch, among the `oldest` ones, and take them. Collective."""
        kinds, slot_of_row = self._slots
        wanted = [kinds[slot] for slot in slots]
        # A refill takes groups of some kinds only. What then is missing for the next batch is started here.
        missing = list((Counter(wanted) - Counter(group.kind for group in self.groups)).elements())
        if missing and not self._prompts.endless:
            raise RunError(
                f"The epoch has {len(self.groups)} groups left, expected {len(slots)}: its batches changed."
            )

        def start() -> None:
            for kind in missing:
                self._start_group(kinds.index(kind))

        if missing:
            self.trainer._on_all_ranks(start, "Rollouts")
        began, groups, chosen = time.perf_counter(), list(self.groups), None
        self.current = Groups(groups[:oldest])
        while chosen is None:
            complete = self._on_every_rank([group.batch.over for group in groups[:oldest]])
            chosen = choose_groups(complete, [group.kind for group in groups[:oldest]], wanted)
            time.sleep(self.POLL_SECONDS if chosen is None else 0)
        self.groups = deque(group for i, group in enumerate(groups) if i not in chosen)
        self._taken = Groups([groups[i] for i in chosen], time.perf_counter() - began)
        first = self.trainer.accelerator.process_index * len(slot_of_row)
        places = [first + i for i, slot in enumerate(slot_of_row) if slot in slots]
        for place, rollout in zip(places, self._taken.rollouts):
            rollout.place(place)
        return self._taken

    def _on_every_rank(self, flags: list[bool]) -> list[bool]:
        """Which of these flags are set on all ranks. Raises `RunStopped` if any rank got a signal. Collective."""
        trainer, num_ranks = self.trainer, self.trainer.accelerator.num_processes
        tensor = torch.tensor([*flags, trainer._stop_signal is None], dtype=torch.int32)
        sums = trainer.accelerator.reduce(tensor.to(trainer.accelerator.device), "sum")
        *common, go_on = (sums == num_ranks).tolist()
        if not go_on:
            trainer._stop_if_asked()
        return common

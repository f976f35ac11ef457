"""Trees of rollouts: some go on from a state of another one (`credit_assignment: tree`).

Of the G rollouts of a prompt every `tree_size`-th is a trunk, and those behind it are its branches. A branch waits
until its trunk has passed a state, and goes on from there: it has the trunk's turns so far as copies, which are read
and not trained, and then turns of its own. Which states these are is drawn before the trunk begins. A branch whose
trunk ended before its state begins anew with the prompt.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from mt_grpo.base.errors import NoServerLeft, error_line
from mt_grpo.base.files import read_json
from mt_grpo.base.json_types import fits_type
from mt_grpo.base.ranks import RunError
from mt_grpo.conversation.environments import EnvironmentFailure, Environments, failures_end, tools_of
from mt_grpo.rollout import Rollout, Turn

BRANCH_POINTS = "branch_points.json"


def tree_size(args: Any) -> int:
    """Rollouts of a tree, a trunk and its branches; 1 where the estimator reads no trees (`check_config`)."""
    return 1 + args.num_branches * args.branch_states if "num_branches" in getattr(args, "read_of_credit", ()) else 1


@dataclasses.dataclass(eq=False)
class Fork:
    """A branch, and what its trunk and it tell each other. Both run in one event loop.

    Attributes:
        branch: The rollout that waits.
        at: The trunk's turns before the state.
        decided: Set once the trunk has passed the state, or has ended before, or is lost.
        left: Set once the branch waits no longer.
        lost: Whether the trunk failed or was cancelled: then the branch ends as well.
    """

    branch: Rollout
    at: int
    decided: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    lost: bool = False

    def __deepcopy__(self, memo: dict) -> Fork:
        return self  # an environment may hold its rollout, and copy itself


def plant(rollouts: list[Rollout], size: int, num_branches: int, draw: Callable[[Rollout], Iterable[int]]) -> None:
    """Make trees of rollouts: set `forks` of each trunk, and `fork` of its branches.

    Args:
        rollouts: Whole trees, `size` rollouts each, by their `index`.
        size: `tree_size`.
        num_branches: From each state.
        draw: The states of a trunk, each as a number of turns.
    """
    for first in range(0, len(rollouts), size):
        trunk, *branches = rollouts[first : first + size]
        if [each.index for each in rollouts[first : first + size]] != list(range(trunk.index, trunk.index + size)):
            raise RuntimeError(f"A tree begins with rollout {trunk.index} and is not whole: expected {size} in a row.")
        states = [at for at in draw(trunk) for _ in range(num_branches)]
        trunk.forks = [Fork(branch, at) for branch, at in zip(branches, states, strict=True)]
        for fork in trunk.forks:
            fork.branch.fork = fork


async def pass_state(trunk: Rollout, environments: Environments | None, over: bool = False) -> None:
    """Let the branches begin that go on from where a trunk is now; once it has ended, also those that waited in vain.

    INVARIANT: a trunk asks for no tokens before its branches have left their waiting. Else the batch in which a branch
    samples, and with it what it samples, would depend on how long the tool of another conversation took.
    INVARIANT: a fork stays in `forks` until it is decided, so that `release` finds it where this is cancelled.
    """
    over = over or trunk.stop_reason is not None
    for fork in [fork for fork in trunk.forks if over or fork.at == len(trunk.turns)]:
        if not over and trunk.error is None:
            await copy_state(trunk, fork.branch, environments)
        fork.decided.set()
        trunk.forks.remove(fork)
        await fork.left.wait()


def release(trunk: Rollout) -> None:
    """Let all branches end that still wait for a trunk, which is not coming: it failed, or was cancelled."""
    for fork in trunk.forks:
        fork.lost = True
        fork.decided.set()
    trunk.forks = []


async def wait_for_trunk(branch: Rollout, aside: Callable[[Awaitable], Awaitable]) -> None:
    """Wait until the trunk has passed the state of a branch, or has ended. `aside` awaits (`Conversations.aside`).

    Raises `NoServerLeft` where the trunk is lost: the tree is rolled out again as a whole.
    """
    fork, branch.fork = branch.fork, None
    try:
        await aside(fork.decided.wait())
    finally:
        fork.left.set()
    if fork.lost:
        raise NoServerLeft(f"Rollout {branch.index} goes on from a state of another one, which is lost.")


async def copy_state(trunk: Rollout, branch: Rollout, environments: Environments | None) -> None:
    """Bring a branch to where its trunk is: the turns as copies, what is read next, a fork of the environment.

    Where the environment cannot be copied, that ends the branch. It ends the trunk, too, where its instance may still
    be busy with the copy, or with a call that was given up before.
    """
    with failures_end(branch):
        tools = trunk.tools
        if environments is not None:
            with failures_end(trunk):
                try:
                    await environments.idle(trunk)
                except EnvironmentFailure as error:
                    branch.stop_reason, branch.error = error.reason, error
                    raise
            if trunk.error is not None:
                return
            await environments.fork(trunk, branch)
            tools = tools_of(branch.environment, environments.tools)
            if shared := [
                name for name, tool in tools.items() if getattr(tool, "__self__", None) is trunk.environment
            ]:
                raise EnvironmentFailure(f"After fork the tool {shared[0]!r} is still of the one that was copied.")
        try:
            turns = [copied_turn(turn) for turn in trunk.turns]
            edited, first, prompt = copy.deepcopy((trunk.edited, trunk.first_messages, trunk.prompt_messages))
            own = {name: copy.deepcopy(value) for name, value in vars(trunk).items() if name not in OF_A_ROLLOUT}
        except Exception as error:  # `info` of a reply may hold anything
            raise EnvironmentFailure(f"The turns before a branch cannot be copied: {error_line(error)}") from error
        vars(branch).update(own)
        branch.prompt_messages, branch.prompt_ids, branch.first_messages = prompt, list(trunk.prompt_ids), first
        branch.turns, branch.tools, branch.edited, branch.num_copied = turns, tools, edited, len(turns)
        branch.pictures = list(trunk.pictures)


OF_A_ROLLOUT = {each.name for each in dataclasses.fields(Rollout)}  # others are a subclass's of `MultiTurnToolEnv`


def copied_turn(turn: Turn) -> Turn:
    """A turn that is read and not trained. Lists of numbers are copied as they are: a deep copy takes a hundred times
    as long, in the event loop of all conversations."""
    flat = {name: list(value) for name, value in vars(turn).items() if isinstance(value, list) and name != "messages"}
    deep = {name: copy.deepcopy(getattr(turn, name)) for name in ("messages", "info", "tools")}
    context = turn.context and turn.context._replace(
        messages=copy.deepcopy(turn.context.messages), ids=list(turn.context.ids)
    )
    return dataclasses.replace(turn, **{**flat, **deep}, context=context, trained=False)


class BranchPoints:
    """Draws the states of trunks by how many turns the rollouts of the last batch had.

    INVARIANT: a state is drawn before its trunk begins, and depends on nothing of it. Else the states of rollouts that
    go on would be drawn more often where going on is worth something, and the credit of turns would be biased.

    Attributes:
        turns: How many rollouts of the last batch, over all ranks, had how many turns. Copies of trunks are left out.
    """

    def __init__(self):
        self.turns: Counter[int] = Counter()

    def learn(self, batch: Any) -> None:
        """Note the turns of a batch's rollouts: its `num_turns`, and `num_copied` of them."""
        self.turns = Counter(turns for turns, copied in zip(batch.num_turns, batch.num_copied) if not copied)

    def draw(self, key: str, most: int, count: int) -> list[int]:
        """`count` different states, each as a number of turns from 1 to `most`.

        The chance of a state is the number of rollouts of the last batch that passed it, plus one in all for all
        states together, so that none is ruled out.

        Args:
            key: The same key gives the same states, whatever was drawn before: a resumed run draws them again.
            most: `max_env_steps`: a rollout has at most one turn more.
            count: At most `most`.

        >>> points = BranchPoints()
        >>> points.turns = Counter({3: 3})
        >>> drawn = Counter(points.draw(str(number), 4, 1)[0] for number in range(1000))
        >>> [round(drawn[at] / 1000, 1) for at in (1, 2, 3, 4)]  # (3 + 1/4) / 7 twice, (1/4) / 7 twice
        [0.5, 0.5, 0.0, 0.0]
        >>> points.draw("any", 4, 4)
        [1, 2, 3, 4]
        """
        generator, states = random.Random(key), list(range(1, most + 1))
        passed = {at: sum(n for turns, n in self.turns.items() if turns > at) + 1 / most for at in states}
        drawn: list[int] = []
        for _ in range(count):
            left = [at for at in states if at not in drawn]
            drawn += generator.choices(left, [passed[at] for at in left])
        return sorted(drawn)

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs into a checkpoint."""
        if self.turns:
            (folder / BRANCH_POINTS).write_text(json.dumps({"turns": sorted(self.turns.items())}), encoding="utf-8")

    @classmethod
    def saved_in(cls, checkpoint: Path) -> BranchPoints:
        """Those of a checkpoint; new ones where it has none. Raises `RunError` for a damaged file."""
        points, path = cls(), checkpoint / BRANCH_POINTS
        if path.exists():
            pairs = (read_json(path) or {}).get("turns")
            if not fits_type(pairs, list[list[int]]) or any(len(pair) != 2 for pair in pairs):
                raise RunError(f"{path} is damaged. Expected pairs of numbers: use another checkpoint.")
            points.turns = Counter(dict(pairs))
        return points

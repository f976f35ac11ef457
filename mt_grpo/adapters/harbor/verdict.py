"""What tests say: the reward files of a verifier, and what is made of the rewards of several steps."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.conversation.environments import is_number

MOST_KEYS = 100


@dataclass(frozen=True)
class TestsSaid:
    """What the tests of a step said.

    Attributes:
        rewards: By key; empty where they said nothing that can be read.
        problem: Why they said nothing.
        output: The end of what they printed.
    """

    __test__ = False  # pytest takes its name for that of a class of tests

    rewards: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    output: str = ""

    def reward(self, name: str) -> float:
        """The reward of this key, or the only one. 0 where the tests said nothing.

        Raises:
            ValueError: there are several, and none has this name.
        """
        if not self.rewards:
            return 0.0
        if name in self.rewards:
            return self.rewards[name]
        if len(self.rewards) == 1:
            return next(iter(self.rewards.values()))
        raise ValueError(
            f"the tests gave the rewards {', '.join(sorted(self.rewards))[:200]}, and none is called {name!r}. "
            "Set harbor_reward to one of them."
        )

    def misses(self, least: float | dict[str, float] | None, name: str) -> bool:
        """Whether a reward is below what a step must reach. `name` is the reward's that counts, for a number.

        Tests that said nothing have missed whatever there is to reach.
        """
        if isinstance(least, dict):
            return any(self.rewards.get(key, float("-inf")) < value for key, value in least.items())
        return least is not None and (not self.rewards or self.reward(name) < least)


def read_reward_files(control: bytes) -> dict[str, tuple[int, bytes]]:
    """The files that a verifier's sandbox has handed over: name -> (their size, at most their first 64 KiB)."""
    lines = [line.decode(errors="replace") for line in control.splitlines()]
    found = {}
    for name, content in zip(lines, lines[1:]):
        words = name.split(" ")
        if len(words) == 2 and words[0] in ("reward.json", "reward.txt") and words[1].isdigit():
            try:
                found[words[0]] = (int(words[1]), base64.b64decode(content, validate=True))
            except (binascii.Error, ValueError):
                continue
    return found


def rewards_of(files: dict[str, tuple[int, bytes]]) -> tuple[dict[str, float], str]:
    """(rewards, what is wrong). `reward.json` counts first, as in Harbor; its keys that are no numbers are left out.

    >>> rewards_of({"reward.txt": (2, b"1\\n")}), rewards_of({})
    (({'reward': 1.0}, ''), ({}, 'they wrote neither /logs/verifier/reward.txt nor reward.json'))
    """
    if not files:
        return {}, "they wrote neither /logs/verifier/reward.txt nor reward.json"
    if too_long := [name for name, (size, content) in files.items() if size > len(content)]:
        return {}, f"{too_long[0]} has {files[too_long[0]][0]} bytes"
    rewards: dict[str, float] = {}
    if "reward.json" in files:
        content = files["reward.json"][1]
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            return {}, f"reward.json is no JSON: {error}"
        if not isinstance(found, dict):
            return {}, f"reward.json is {content[:60]!r}, expected an object"
        rewards = {key: float(value) for key, value in found.items() if is_reward(value)}
        if "reward" in rewards or "reward.txt" not in files:
            return (rewards, "") if rewards else ({}, f"reward.json is {content[:60]!r}, and has no number")
    text = files["reward.txt"][1].decode(errors="replace").strip()
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if is_number(value):
        return {**rewards, "reward": value}, ""
    return (rewards, "") if rewards else ({}, f"reward.txt is {text[:60]!r}, expected a number")


def is_reward(value: Any) -> bool:
    """Whether a value of `reward.json` is a reward."""
    return not isinstance(value, bool) and is_number(value)


def outcome_of_steps(rewards: Sequence[float], num_steps: int, strategy: str) -> float:
    """One reward of the steps that were reached, in their order.

    `mean` is over all steps of the task: one that was not reached counts as 0. (Harbor leaves it out. A policy that
    stays in a first step it has solved would then be paid as one that has solved them all.) `final` is the last
    step's, and 0 where that one was not reached.

    >>> outcome_of_steps([1.0], 2, "mean"), outcome_of_steps([1.0], 2, "final"), outcome_of_steps([0, 1.0], 2, "final")
    (0.5, 0.0, 1.0)
    """
    if strategy == "final":
        return rewards[-1] if len(rewards) == num_steps else 0.0
    return sum(rewards) / num_steps

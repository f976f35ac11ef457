"""The names of pushed weights: which of them a server reports, and whether it restarted meanwhile."""

from __future__ import annotations

from typing import Any


def tagged(version: str, lineage: int) -> str:
    """The name of a weight version on one server, with the number of times that this server restarted before.

    Without it, a server that restarts and gets its weights between two questions would pass for one that never did.

    >>> tagged("3f2a-7", 0), tagged("3f2a-7", 2)
    ('3f2a-7', '3f2a-7+2')
    """
    return f"{version}+{lineage}" if lineage else version


def continues(held: str | None, version: str, lineage: int) -> bool | None:
    """Whether a server that reports `held` had only weights of this run since `version` was pushed to it.

    None: it cannot be told now. The server does not answer (`held` is None), a push is under way, or rank 0 knows of a
    restart that this rank will hear of at the end of the push.

    >>> continues("3f2a-7", "3f2a-7", 0), continues("3f2a-9", "3f2a-7", 0), continues("3f2a-6", "3f2a-7", 0)
    (True, True, False)
    >>> continues("default", "3f2a-7", 0), continues("77c1-9", "3f2a-7", 0), continues("3f2a-8", "3f2a-7", 1)
    (False, False, False)
    >>> continues("loading-3f2a-8", "3f2a-7", 0), continues("3f2a-8+1", "3f2a-7", 0), continues(None, "3f2a-7", 0)
    (None, None, None)
    """
    if held is None:
        return None
    name, _, restarts = held.removeprefix("loading-").partition("+")
    run, _, number = name.rpartition("-")
    own_run, _, own_number = version.rpartition("-")
    later = run == own_run and number.isdecimal() and own_number.isdecimal() and int(number) >= int(own_number)
    if not (name == version or later):
        return False
    known = int(restarts) if restarts.isdecimal() else 0
    if held.startswith("loading-") or known > lineage:
        return None
    return known == lineage


def versions_of(turn: Any) -> list[int] | None:
    """The oldest and the newest weight version that may have sampled a turn, as numbers of weight changes.

    None if the backend does not report them: nothing is pushed while it generates.
    """
    if not turn.generations or turn.generations[0].policy_versions is None:
        return None
    return [turn.generations[0].policy_versions[0], turn.generations[-1].policy_versions[1]]

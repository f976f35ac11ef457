"""A recipe's key as a field of a dataclass, which says once all that is known of the key."""

from __future__ import annotations

import dataclasses
from typing import Any


class KeyFacts(dict):
    """The facts about a recipe key in its field. transformers' parser gives a copy to argparse, which reads `help`."""

    def copy(self) -> dict[str, str]:
        return {"help": self["help"]}


def key(
    default: Any,
    help: str,
    *,
    within: str | None = None,
    one_of: Any = None,
    path: bool | str = False,
    trained: bool = True,
    needs: str | None = None,
    of_tools: bool = False,
    opens: bool = False,
) -> Any:
    """A field of a dataclass of settings, which is a key of a recipe. Its default is always allowed.

    Args:
        within: The interval of its numbers: `[` includes the bound, `(` does not, and infinity is never included.
        one_of: The values that it may have.
        path: Whether it names a file or a folder, or a list of them. `":"` or `".py:"`: if it holds this, `path:Name`.
        trained: Whether it changes what is trained. A checkpoint's record of its run leaves others out.
        needs: What else must be in the recipe for the key to have an effect, as an error names it.
        of_tools: Whether it is about the trainer's own running of tools.
        opens: Whether it says, alone, what takes part in the conversation. A recipe needs one such key.
    """
    facts = KeyFacts(locals())
    return dataclasses.field(default=facts.pop("default"), metadata=facts)


def keys_that(settings: Any, fact: str) -> list[str]:
    """The names of the keys of a dataclass whose fields state a fact, such as `of_tools` or `needs`."""
    return [each.name for each in dataclasses.fields(settings) if each.metadata.get(fact)]

"""What a recipe says of an OpenEnv server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key
from mt_grpo.recipe.integrations import Integration

OPENENV = "the line environment: openenv"


@dataclass
class OpenEnvKeys:
    """An environment behind OpenEnv servers, with `environment: openenv`."""

    openenv_url: list[str] | str | None = key(
        None, "Address of the OpenEnv server; a list of several that serve the same",
        needs=OPENENV, opens=True, trained=False,
    )  # fmt: skip
    openenv_headers: dict[str, Any] | str | None = key(
        None, "Headers of all requests to the server, a mapping; $NAME is filled in", needs=OPENENV, trained=False
    )
    openenv_reset: dict[str, Any] | str | None = key(
        None, "Arguments of each reset, a mapping. Those of a row go before them", needs=OPENENV
    )
    openenv_text: str | None = key(
        None, "path.py:Class, an OpenEnvText: how observations read, and what is an action", path=".py:", needs=OPENENV
    )
    openenv_images: bool = key(False, "The model reads images of observations that are data URIs", needs=OPENENV)
    openenv_sessions: int | None = key(
        None, "Sessions of each server at the same time, per rank. None: as many as it opens at the start",
        within="[1, inf)", needs=OPENENV, trained=False,
    )  # fmt: skip
    openenv_unfinished_reward: float = key(
        0.0, "Added to the return of an episode that the conversation ended, not the server",
        within="(-inf, inf)", needs=OPENENV,
    )  # fmt: skip


class OpenEnvIntegration(Integration):
    """A session of a server is the environment of a conversation of the trainer's class."""

    keys, line = OpenEnvKeys, OPENENV.removeprefix("the line ")

    def runs(self, script_args: Any) -> bool:
        """Whether the recipe's environment is behind an OpenEnv server."""
        return script_args.environment == "openenv"

    def conversation(self, script_args: Any, args: Any, base: type) -> tuple[type, Any]:
        """The trainer's own, with the sessions of the servers."""
        from mt_grpo.integrations.openenv.load import load_openenv_conversation

        return load_openenv_conversation(script_args, args, base)

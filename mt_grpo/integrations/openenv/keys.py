"""Recipe keys of OpenEnv servers."""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.base.fields import key
from mt_grpo.recipe.plugins import Integration


@dataclass
class OpenEnvKeys:
    """An environment on OpenEnv servers, with `environment: openenv`."""

    openenv_url: list[str] | str | None = key(
        None, "OpenEnv server's address, or a list", needs="the line environment: openenv", opens=True, trained=False
    )


class OpenEnvIntegration(Integration):
    """The trainer's own conversations, each with a session of a server as its environment."""

    keys, line = OpenEnvKeys, "environment: openenv"
    loads = "mt_grpo.integrations.openenv.environment:load_openenv_conversation"

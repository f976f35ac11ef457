"""The errors of a generation server."""

from __future__ import annotations


class ServerError(RuntimeError):
    """The generation server failed. The message holds the URL, the status and what to do."""


class ServerLost(ServerError):
    """The server does not answer, answers with 5xx, or lost the pushed weights. It may come back."""


class NoServerLeft(ServerLost):
    """None of several servers holds the weights now. A push may bring some back."""

"""Errors of a generation server and of a run, formatting of errors, and warnings that are logged once."""

from __future__ import annotations

import logging
import signal
from contextlib import suppress

logger = logging.getLogger(__name__)
_told: set[str] = set()


def tell_once(text: str, about: str | None = None) -> None:
    """Log a warning once per process. `about` is its key, if other texts are about the same thing."""
    if (about or text) not in _told:
        _told.add(about or text)
        logger.warning(text)


def error_line(error: BaseException) -> str:
    """Format an error on one line: its class and its message without the dot at the end. A group is its first error.

    >>> error_line(ValueError("of two\\n  lines.")), error_line(TimeoutError()), error_line(KeyError("a"))
    ('ValueError: of two lines', 'TimeoutError', "KeyError: 'a'")
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name, text = type(error).__name__, ""
    with suppress(Exception):  # an exception whose own __str__ fails
        text = str(error)
        if callable(getattr(error, "errors", None)) and hasattr(error, "title"):
            fields = [f"{'.'.join(map(str, each['loc'])) or 'all of it'}: {each['msg']}" for each in error.errors()]
            text = f"{error.title} does not fit: {'; '.join(fields[:3])}"
    text = " ".join(text.split()).removesuffix(".")
    return f"{name}: {text}" if text and text != name else name


def sentence(error: BaseException | str) -> str:
    """An error's message as a sentence, with a full stop unless it ends with a mark already."""
    text = str(error).rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


class ServerError(RuntimeError):
    """The generation server failed. The message holds the URL, the status and what to do."""


class ServerLost(ServerError):
    """The generation server does not answer, answers with 5xx, or lost the pushed weights. It may come back."""


class NoServerLeft(ServerLost):
    """None of several generation servers holds the weights now. A push may bring some back."""


class RunError(RuntimeError):
    """An error that ends the run. All ranks raise it together, between two optimizer steps."""


class RunStopped(RunError):
    """A signal asked the run to stop. `signum` is the number of the signal."""

    def __init__(self, signum: int, where: str = ""):
        super().__init__(f"stopped by {signal.Signals(signum).name}{where}")
        self.signum = signum

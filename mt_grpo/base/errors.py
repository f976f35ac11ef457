"""The errors of a generation server, how an error reads, and what is told once."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MOST_TOLD = 1000  # lines: what they are about comes from programs, which may send anything
_told: set[str] = set()


def tell_once(text: str, about: str | None = None) -> None:
    """Log a line, once per process: a program sends the same parameters with each request.

    Args:
        text: The line.
        about: What it is about: of lines about the same only the first is logged. None: about what it says.
    """
    about = about or text
    if about not in _told and len(_told) < MOST_TOLD:
        _told.add(about)
        logger.warning(text)


def error_line(error: BaseException) -> str:
    """An error on one line for people: its class and what it says, without the dot at the end.

    Of pydantic's, each field with what is wrong: their text begins with a line that says only how many there are. The
    class alone stands where an error says nothing else, and the first error of a group for the group.

    >>> error_line(ValueError("of two\\n  lines.")), error_line(TimeoutError()), error_line(KeyError("a"))
    ('ValueError: of two lines', 'TimeoutError', "KeyError: 'a'")
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name = type(error).__name__
    try:
        if callable(getattr(error, "errors", None)) and hasattr(error, "title"):
            found = error.errors()
            fields = [f"{'.'.join(map(str, each['loc'])) or 'all of it'}: {each['msg']}" for each in found[:3]]
            more = f"; {len(found) - 3} more" if len(found) > 3 else ""
            text = f"{error.title} does not fit: {'; '.join(fields)}{more}"
        else:
            text = str(error)
    except Exception:  # an exception whose own __str__ fails
        text = ""
    text = " ".join(text.split()).removesuffix(".")
    return f"{name}: {text}" if text and text != name else name


def sentence(error: BaseException | str) -> str:
    """What an error says, with one mark at its end, whichever it has.

    >>> sentence("it failed"), sentence(ValueError("it failed.")), sentence("Is it running?")
    ('it failed.', 'it failed.', 'Is it running?')
    """
    text = str(error).rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def root_cause(error: BaseException) -> BaseException | None:
    """The error that an error was raised from, and that one, to the first; None where it was raised from none.

    Its traceback is what is worth reading: where a reward function raised, and not how the run then ended.

    >>> root_cause(ValueError("a")) is None
    True
    """
    if error.__cause__ is None:
        return None
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class ServerError(RuntimeError):
    """The generation server failed. The message holds the URL, the status and what to do."""


class ServerLost(ServerError):
    """The server does not answer, answers with 5xx, or lost the pushed weights. It may come back."""


class NoServerLeft(ServerLost):
    """None of several servers holds the weights now. A push may bring some back."""

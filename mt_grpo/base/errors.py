"""The errors of a generation server, formatting of errors, and warnings that are logged once."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MOST_TOLD = 1000  # lines: their texts come from programs, which may send anything
_told: set[str] = set()


def tell_once(text: str, about: str | None = None) -> None:
    """Log a warning once per process: a program sends the same parameters with each request.

    Args:
        text: The warning.
        about: A key; only the first warning with this key is logged. None: the text itself.
    """
    about = about or text
    if about not in _told and len(_told) < MOST_TOLD:
        _told.add(about)
        logger.warning(text)


def error_line(error: BaseException) -> str:
    """Format an error on one line: its class and its message, without the dot at the end.

    Errors of pydantic are listed by field. An error without a message is only its class, and a group is its first
    error.

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
    """An error's message as a sentence, with a full stop unless it ends with a mark already.

    >>> sentence("it failed"), sentence(ValueError("it failed.")), sentence("Is it running?")
    ('it failed.', 'it failed.', 'Is it running?')
    """
    text = str(error).rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def root_cause(error: BaseException) -> BaseException | None:
    """The first error in the chain of causes (`raise ... from`) of an error, None without a cause.

    Its traceback is worth reading: it shows where a reward function raised, and not how the run then ended.

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
    """The generation server does not answer, answers with 5xx, or lost the pushed weights. It may come back."""


class NoServerLeft(ServerLost):
    """None of several generation servers holds the weights now. A push may bring some back."""

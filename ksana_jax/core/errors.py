"""Errors that a user can act on. A leaf that every module may import."""

from __future__ import annotations

import os

MAX_MESSAGE_CHARS = 2000


class ConfigError(ValueError):
    """A configuration is invalid; the message lists every problem found."""


class LoadError(ValueError):
    """Files of a model cannot be used; one line names the file, the problem and what is supported."""


class ContextLengthError(ValueError):
    """A prompt and its output are longer than a sequence may be, or need more KV blocks than the pool has."""


class JobError(RuntimeError):
    """A job of several processes has ended because one of them failed; the message says which and why."""


def system_reason(error: OSError) -> str:
    """Returns the system's message of an error, such as "Address already in use", without libraries' additions."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def one_line(message: object) -> str:
    """Makes a message safe to print and to send, which may quote names from files: control characters are escaped, and
    it is truncated."""
    text = str(message)
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:MAX_MESSAGE_CHARS])
    return shown if len(text) <= MAX_MESSAGE_CHARS else shown + "..."

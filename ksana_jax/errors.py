"""Errors that a user can act on. A leaf that every module may import."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration is invalid; the message lists every problem found."""


class ContextLengthError(ValueError):
    """A prompt and its output are longer than a sequence may be, or need more KV blocks than the pool has."""


class JobError(RuntimeError):
    """A job of several processes has ended because one of them failed; the message says which and why."""

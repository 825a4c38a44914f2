"""Forked children of a process that uses jax: they may end normally, but cannot compute.

A child inherits engines, locks, connections and jax's clients, but none of the threads that serve them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_here = os.getpid()
# The process whose jax this one has inherited by a fork; None if jax starts here.
_jax_of: int | None = None


def check_process(what: str, process: int) -> None:
    """Checks that the current process is the one that made something.

    Args:
      what: subject and verb of the message: "this engine was created".

    Raises:
      RuntimeError: it is a forked child.
    """
    if process != (here := os.getpid()):
        raise RuntimeError(
            f"{what} in process {process} and cannot be used in its forked child {here}, because jax does not survive "
            'a fork: start processes by the method "spawn", or fork before jax starts'
        )


def check_jax() -> None:
    """Checks that this process was not forked from one where jax had started.

    Raises:
      RuntimeError: it has.
    """
    if _jax_of is not None:
        check_process("jax was started", _jax_of)


def outlives_python(thing: Any) -> Any:
    """Returns an object that is never destroyed.

    A client of jax waits for its threads when it is destroyed, at Python's end. A forked child does not have them, and
    Python's end also ends a thread that comes back from a plugin written in Python.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def _in_child() -> None:
    """Keeps jax's objects that wait for threads alive, so that the child ends with its own exit status."""
    global _here, _jax_of
    parent, _here = _here, os.getpid()
    bridge, mlir = (sys.modules.get(f"jax._src.{name}") for name in ("xla_bridge", "interpreters.mlir"))
    if mlir is not None:
        outlives_python(mlir.global_thread_pool)
    if bridge is not None and (clients := bridge._backends):  # its lock may be held for ever
        _jax_of = _jax_of or parent
        for client in clients.values():
            outlives_python(client)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

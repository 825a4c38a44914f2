"""Failpoints: named places where a test can kill the process or make an operation fail.

    arm("disk.before_rename", "oserror", nth=3)                              in this process
    KSANA_FAILPOINTS=disk.before_rename=kill:3,disk.before_read=oserror      in a new process

Each armed point acts once, at its n-th call; n is 1 by default. An unarmed point costs a lookup in an empty dict.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from collections.abc import Callable

# Where `failpoint` is called.
POINTS = (
    "disk.before_write",
    "disk.half_written",
    "disk.before_rename",
    "disk.after_rename",
    "disk.before_remove",
    "disk.before_read",
)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _oserror() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: dict[str, Callable[[], None]] = {"kill": _kill, "oserror": _oserror}


@dataclasses.dataclass
class Armed:
    """An armed failpoint. calls_left: calls until it acts; 0 once it has acted."""

    action: Callable[[], None]
    calls_left: int


_armed: dict[str, Armed] = {}


def failpoint(name: str) -> None:
    """Does nothing unless this failpoint is armed."""
    if not _armed:
        return
    point = _armed.get(name)
    if point is not None and point.calls_left:
        point.calls_left -= 1
        if not point.calls_left:
            point.action()


def arm(name: str, action: str | Callable[[], None], nth: int = 1) -> Armed:
    """Arms a failpoint to act at its n-th call from now.

    Args:
      name: one of POINTS. action: a key of ACTIONS, or a function to call.
    """
    if name not in POINTS:
        raise ValueError(f"failpoint is {name!r}, must be one of {', '.join(POINTS)}")
    if isinstance(action, str):
        if action not in ACTIONS:
            raise ValueError(f"action of failpoint {name} is {action!r}, must be one of {', '.join(ACTIONS)}")
        action = ACTIONS[action]
    if nth < 1:
        raise ValueError(f"nth of failpoint {name} is {nth}, must be at least 1")
    _armed[name] = Armed(action, nth)
    return _armed[name]


def disarm() -> None:
    """Disarms all failpoints."""
    _armed.clear()


def arm_from(text: str) -> None:
    """Arms failpoints from the text of KSANA_FAILPOINTS: `name=action[:nth]`, separated by commas."""
    for part in filter(None, text.split(",")):
        name, _, what = part.partition("=")
        action, _, nth = what.partition(":")
        if nth and not nth.isdecimal():
            raise ValueError(f"KSANA_FAILPOINTS has {part!r}, must be name=action or name=action:nth")
        arm(name.strip(), action.strip(), int(nth or 1))


arm_from(os.environ.get("KSANA_FAILPOINTS", ""))

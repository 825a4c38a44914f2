"""Named places where a test makes the process die or an operation fail. Off, each costs a look into an empty dict.

    arm("disk.before_rename", "oserror", nth=3)                 in this process
    KSANA_FAILPOINTS=disk.before_rename=kill:3,disk.before_read=oserror      for one that is started

Each armed point acts once: at its n-th call, 1 unless told otherwise.
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
    """What a point does at a call. calls_left: until then; 0 once it has acted."""

    action: Callable[[], None]
    calls_left: int


_armed: dict[str, Armed] = {}


def failpoint(name: str) -> None:
    """Does nothing, unless this point is armed."""
    if not _armed:
        return
    point = _armed.get(name)
    if point is not None and point.calls_left:
        point.calls_left -= 1
        if not point.calls_left:
            point.action()


def arm(name: str, action: str | Callable[[], None], nth: int = 1) -> Armed:
    """Has a point act at its n-th call from now.

    Args:
      name: one of POINTS. action: a key of ACTIONS, or what is to be called.
    """
    if name not in POINTS:
        raise ValueError(f"failpoint is {name!r}, must be one of {', '.join(POINTS)}")
    if isinstance(action, str):
        if action not in ACTIONS:
            raise ValueError(f"action of failpoint {name} is {action!r}, must be one of {', '.join(ACTIONS)}")
        action = ACTIONS[action]
    if nth < 1:
        raise ValueError(f"failpoint {name} is to act at call {nth}, must be at least 1")
    _armed[name] = Armed(action, nth)
    return _armed[name]


def disarm() -> None:
    """Turns all points off."""
    _armed.clear()


def arm_from(text: str) -> None:
    """Arms what KSANA_FAILPOINTS says: `name=action[:nth]`, separated by commas."""
    for part in filter(None, text.split(",")):
        name, _, what = part.partition("=")
        action, _, nth = what.partition(":")
        if nth and not nth.isdecimal():
            raise ValueError(f"KSANA_FAILPOINTS has {part!r}, must be name=action or name=action:nth")
        arm(name.strip(), action.strip(), int(nth or 1))


arm_from(os.environ.get("KSANA_FAILPOINTS", ""))

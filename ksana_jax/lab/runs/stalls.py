"""Warns when no step of a run ends: a device, or a method's code, may wait for good."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator

from ksana_jax.engine import build


@contextlib.contextmanager
def stalls_logged(after_s: float = 60.0) -> Iterator[None]:
    """Logs a warning after each `after_s` seconds in which no step ended of the engines that are built meanwhile."""
    steps, begun, ended = itertools.count(), threading.Event(), threading.Event()

    def observe(engine: build.Engine) -> None:
        engine.observers.append(lambda engine: next(steps))
        begun.set()

    def watch() -> None:
        begun.wait()
        seen, used_s = next(steps), time.process_time()
        while not ended.wait(after_s):
            last, before_s = seen, used_s
            seen, used_s = next(steps), time.process_time()
            if seen == last + 1:
                text = "no step has ended for %g s (%.1f s of CPU used meanwhile); Ctrl-C, twice, ends a run that hangs"
                logging.getLogger("ksana_jax").warning(text, after_s, used_s - before_s)

    build.observers.append(observe)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        build.observers.remove(observe)
        ended.set()
        begun.set()

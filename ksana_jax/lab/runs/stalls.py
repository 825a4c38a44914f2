"""Warns when no step of a run ends: a device, or a method's code, may wait for good."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from ksana_jax.engine import build


@contextlib.contextmanager
def stalls_logged(after_s: float = 60.0) -> Iterator[None]:
    """Logs a warning after each `after_s` seconds in which no step ended of the engines that are built meanwhile."""
    stepped, begun, ended = (threading.Event() for _ in range(3))

    def observe(engine: build.Engine) -> None:
        engine.observers.append(lambda engine: stepped.set())
        begun.set()

    def watch() -> None:
        begun.wait()
        used_s = time.process_time()
        while not ended.wait(after_s):
            before_s, used_s = used_s, time.process_time()
            if not stepped.is_set():
                text = "no step has ended for %g s (%.1f s of CPU used meanwhile); Ctrl-C, twice, ends a run that hangs"
                logging.getLogger("ksana_jax").warning(text, after_s, used_s - before_s)
            stepped.clear()

    build.observers.append(observe)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        build.observers.remove(observe)
        ended.set()
        begun.set()

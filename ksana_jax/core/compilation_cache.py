"""Keeps compiled steps on disk between processes, in jax's persistent compilation cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ksana_jax.core.files import write_atomic
from ksana_jax.core.processor import machine

MAX_CACHE_BYTES = 2 * 2**30
# When this process imported the package.
started_s = time.time()
UNREAD = object()

# Everything is cached, however small or quick to compile: a step consists of a dozen small functions.
WRITES_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def keep_compiled_steps(folder: Path | None = None) -> None:
    """Points jax's compilation cache at a folder, unless the user has chosen one or turned the cache off.

    Once jax is imported, entries are also written atomically: processes that start together share a folder, and by
    default jax writes an entry under its final name, where another process may read half of it.

    If jax is not imported yet, the settings go to environment variables, so that child processes inherit them. Users
    choose by `JAX_COMPILATION_CACHE_DIR`, `JAX_ENABLE_COMPILATION_CACHE=false` or their `jax.config` forms.

    If the folder cannot be made, a warning says why, and each process compiles its steps.

    Args:
      folder: parent of the cache's folder; None takes `ksana_jax/compiled` in the user's cache directory. A cache
        beyond MAX_CACHE_BYTES is cleared, because every change of a step leaves an old entry behind.
    """
    jax = sys.modules.get("jax")
    if jax is not None:
        watch_cache()
    if _is_settled(jax):
        return
    try:
        folder = (folder or cache_folder("compiled")) / machine()
        with contextlib.suppress(OSError):  # another process is clearing it
            if folder.is_dir() and sum(entry.stat().st_size for entry in folder.iterdir()) > MAX_CACHE_BYTES:
                shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled steps are not kept for other processes: {error}", stacklevel=2)
        return
    settings = {"jax_compilation_cache_dir": str(folder), **WRITES_ALL}
    if jax is None:
        for name, value in settings.items():
            os.environ.setdefault(name.upper(), str(value))
        return
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # a compilation before this one may have found that there is no cache


class _LastRead(threading.local):
    """The entry that this thread has last read from jax's cache; None if it was missing, UNREAD without a read."""

    value: Any = UNREAD


_last_read = _LastRead()


def last_read() -> Any:
    """Returns the entry that this thread has read from jax's cache since the last call, None if it is missing, and
    UNREAD if the cache was not asked; see `watch_cache`."""
    value, _last_read.value = _last_read.value, UNREAD
    return value


def watch_cache() -> None:
    """Has jax's cache in a local folder rename its entries into place, and remember for `last_read` what it reads."""
    from jax._src.lru_cache import LRUCache

    put, get = LRUCache.put, LRUCache.get
    if hasattr(put, "whole"):
        return

    def put_whole(cache: Any, key: str, value: bytes) -> None:
        entry = cache.path / f"{key}-cache"
        if cache.eviction_enabled or "://" in str(entry):
            put(cache, key, value)  # under a lock, or in an object store, which has no half of an entry
        elif not entry.exists():
            write_atomic(Path(entry), value)

    def get_noted(cache: Any, key: str) -> bytes | None:
        _last_read.value = get(cache, key)
        return _last_read.value

    put_whole.whole = put  # jax's own
    LRUCache.put, LRUCache.get = put_whole, get_noted  # pyright: ignore[reportAttributeAccessIssue]


class CacheUse:
    """Counts jax's requests to its compilation cache, and its hits. Both are 0 if the cache is turned off."""

    def __init__(self):
        self.asked = self.found = 0

    @property
    def compiled(self) -> int:
        return self.asked - self.found

    def hear(self, event: str, **_: object) -> None:
        self.asked += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.found += event == "/jax/compilation_cache/cache_hits"


@contextlib.contextmanager
def cache_use() -> Iterator[CacheUse]:
    """Yields counts of the functions that are compiled, or found in the cache, while the context is open."""
    import jax

    use = CacheUse()
    jax.monitoring.register_event_listener(use.hear)
    try:
        yield use
    finally:
        jax.monitoring.unregister_event_listener(use.hear)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Returns a context for compiling programs for absent devices without jax's cache on disk, which can
    write them but not read them."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    kept = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


def _is_settled(jax: Any) -> bool:
    """True if the user has set a cache folder or turned the cache off; jax: None where it is not imported yet."""
    if jax is None:
        turned_off = os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in ("n", "no", "f", "false", "off", "0")
        return turned_off or bool(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    return jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache


def cache_folder(name: str) -> Path:
    """Returns a folder of this project in the user's cache directory.

    Raises:
      OSError: the user has no home directory.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ksana_jax" / name
    except RuntimeError as error:
        raise FileNotFoundError("the user has no home directory; XDG_CACHE_HOME names a folder for caches") from error

"""The disk tier: one file per KV block, within a byte budget, reusable after a restart. Knows files; no jax.

The engine's thread submits reads and writes; one worker executes them in order, so that a read finds what was written
before it. No error is raised into the engine, and only `flush` and `close` wait for files:

    a damaged or incomplete block                      is a miss, and is removed with a warning
    a disk error (full, broken, folder removed), a link
    or FIFO instead of a file, or a lost lock         turns the tier off with one warning
    a file with another name                           is left alone
    more writes than the disk can take                 are dropped and counted

Blocks of each format (model, leaves, codec) have a separate folder, so caches of other models are left alone; the
budget is per format. A process locks that folder. A block's file is named by the 64 hex digits of its key; in a folder
named by a format's digest, files with such names belong to the tier.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import threading
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import UnsafeFile
from ksana_jax.core.folder_lock import FolderInUse, FolderLock
from ksana_jax.kv.disk.block_file import (
    BadBlockFile,
    BlockFacts,
    BlockFormat,
    file_bytes,
    read_block,
    read_facts,
    write_block,
)
from ksana_jax.kv.disk.failpoints import failpoint
from ksana_jax.kv.disk.index import BlockFile, BlockFiles

__all__ = ["BlockFacts", "BlockFormat", "DiskCounters", "DiskTier"]

MAX_PENDING_BYTES = 64 * 2**20
_NAME = re.compile(r"([0-9a-f]{64})\.(kv|tmp)")
_LOCK = "lock"


@dataclasses.dataclass
class DiskCounters:
    """Counts events since the tier was opened, in blocks unless stated otherwise.

    written, read: blocks, and their bytes of keys and values. misses: requested blocks that the tier no longer had.
    misses_corrupt: misses because of damaged or foreign files. removed: such files.
    replaced: removed to make room. dropped: not written, for lack of room or time.
    errors: disk errors; the first one turns the tier off.
    """

    written: int = 0
    read: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    misses: int = 0
    misses_corrupt: int = 0
    removed: int = 0
    replaced: int = 0
    dropped: int = 0
    errors: int = 0


class DiskTier:
    """Stores blocks of one format in one folder.

    Args:
      folder: created if it does not exist; the blocks are in a subfolder.
      format: format of every block.
      budget_bytes: maximum bytes of block files, including the one being written.
      executor: runs the worker's tasks, one at a time and in order; None starts a thread.
      warn: called with one line for each file that is removed unread, and when the tier turns itself off.
      max_pending_bytes: maximum bytes of blocks waiting to be written; at least one block may always wait.

    Raises:
      ConfigError: another process, or another engine of this one, uses the same blocks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        format: BlockFormat,
        budget_bytes: int,
        *,
        executor: concurrent.futures.Executor | None = None,
        warn: Callable[[str], Any] = warnings.warn,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ):
        self.format, self.budget_bytes = format, budget_bytes
        self.folder = Path(folder) / format.fingerprint
        self.counters = DiskCounters()
        self._warn, self._max_pending_bytes = warn, max_pending_bytes
        self._lock = threading.Lock()  # guards everything below; never held during file access
        self._files = BlockFiles()
        self._pending_bytes = 0
        self._enabled = True
        self._too_small = False
        self._folder_lock: FolderLock | None = None
        self._owns_executor = executor is None
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="disk")
        try:
            for made in (self.folder.parent, self.folder):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.is_symlink():
                raise UnsafeFile(f"{self.folder} is a link, must be a folder")
            with contextlib.suppress(PermissionError):  # another user's
                self.folder.chmod(0o700)  # an older version has made it readable
            self._folder_lock = FolderLock(self.folder / _LOCK, mode=0o600)
            self._files = self._find_files()
        except FolderInUse as holder:
            raise ConfigError(
                f"disk_cache_dir {folder} is in use for this model by process {holder} (this is {os.getpid()}): "
                "close that engine or use another folder"
            ) from None
        except OSError as error:
            self._turn_off(error)
        if self._files.num_bytes > budget_bytes:
            self._submit(self._make_room, 0)

    @property
    def enabled(self) -> bool:
        """True if the tier stores and finds blocks; False after a disk error, and once closed."""
        return self._enabled

    @property
    def num_bytes(self) -> int:
        """Total size of the block files in bytes."""
        with self._lock:
            return self._files.num_bytes

    def __contains__(self, key: bytes) -> bool:
        """True if a file of this key exists or is about to be written; its content is known once it is read."""
        with self._lock:
            return key in self._files.by_key

    def keys(self) -> list[bytes]:
        """Keys of all blocks, including those still to be written."""
        with self._lock:
            return list(self._files.by_key)

    def facts(self, key: bytes) -> BlockFacts | None:
        """Returns a block's content according to its header; None if it does not exist or cannot be read."""
        with self._lock:
            file = self._files.by_key.get(key)
        if file is None or file.facts is not None:
            return file and file.facts
        try:
            return read_facts(self._path(key), self.format)
        except (OSError, BadBlockFile):
            return None

    def write(self, facts: BlockFacts, data: np.ndarray) -> None:
        """Stores a block, unless its key is already stored.

        Args:
          data: a block's bytes; the caller may change them when this returns.
        """
        assert data.nbytes == self.format.nbytes
        with self._lock:
            if not self._enabled or facts.key in self._files.by_key:
                return
            pending = self._pending_bytes + data.nbytes
            if self._too_small or (self._pending_bytes and pending > self._max_pending_bytes):
                self.counters.dropped += 1
                return
            self._pending_bytes = pending
            file = self._files.add(facts.key, facts)
        self._submit(self._write, file, data.copy())

    def read(self, key: bytes, expected: BlockFacts, out: np.ndarray) -> concurrent.futures.Future[bool]:
        """Reads a block into an array.

        Args:
          expected: facts that the block must have.
          out: an array of a block's bytes, owned by the reader until the future is done.

        Returns:
          True if `out` has the block; it is untouched otherwise. The future never raises.
        """
        assert out.nbytes == self.format.nbytes
        with self._lock:
            file = self._files.by_key.get(key)
            if file is not None:
                self._files.use(file)
            else:
                self.counters.misses += 1
        return _done(False) if file is None else self._submit(self._read, file, expected, out)

    def wait(self, reads: Collection[concurrent.futures.Future[bool]], timeout_s: float) -> None:
        """Waits until one of some reads is done, for at most timeout_s."""
        concurrent.futures.wait(reads, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)

    def flush(self) -> None:
        """Waits until all reads and writes submitted so far are done."""
        self._submit(lambda: True).result()

    def close(self) -> None:
        """Finishes all submitted reads and writes, and unlocks the folder. Later reads are misses."""
        self.flush()
        with self._lock:
            self._enabled = False
            self._files = BlockFiles()
        if self._owns_executor:
            self._executor.shutdown()
        if self._folder_lock is not None:
            self._folder_lock.release()

    def reset(self) -> None:
        """Rebuilds the index from the files in the folder, after an exception that may have left it inconsistent."""
        if not self._enabled:
            return
        self.flush()
        try:
            files = self._find_files()
        except OSError as error:
            self._turn_off(error)
            return
        with self._lock:
            self._files, self._pending_bytes = files, 0

    # ------------------------------------------------------------------ at the start

    def _find_files(self) -> BlockFiles:
        files, found = BlockFiles(), []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                if name is None or not entry.is_file(follow_symlinks=False):
                    continue
                if name[2] == "tmp":
                    os.remove(entry.path)
                else:
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime_ns, name[1], stat.st_size))
        for _, name, size in sorted(found):
            files.store(files.add(bytes.fromhex(name), None), size)
        return files

    # ------------------------------------------------------------------ the worker

    def _submit(self, task: Callable[..., bool], *args: Any) -> concurrent.futures.Future[bool]:
        if self._enabled:
            try:
                return self._executor.submit(self._guarded, task, *args)
            except RuntimeError as error:  # the interpreter is shutting down
                self._turn_off(error)
        return _done(False)

    def _guarded(self, task: Callable[..., bool], *args: Any) -> bool:
        try:
            if not self._enabled:
                return False
            assert self._folder_lock is not None
            self._folder_lock.check()
            return task(*args)
        except Exception as error:
            self._turn_off(error)
            return False

    def _write(self, file: BlockFile, data: np.ndarray) -> bool:
        assert file.facts is not None
        try:
            size = file_bytes(self.format, file.facts)
            if not self._make_room(size):
                with self._lock:
                    self.counters.dropped += 1
                    self._files.remove(file)
                return False
            write_block(self._path(file.key), self._path(file.key, "tmp"), self.format, file.facts, data)
        finally:
            with self._lock:
                self._pending_bytes -= data.nbytes
        with self._lock:
            self.counters.written += 1
            self.counters.written_bytes += data.nbytes
            self._files.store(file, size)
        return True

    def _read(self, file: BlockFile, expected: BlockFacts, out: np.ndarray) -> bool:
        found = False
        if self._is_known(file):
            try:
                found = read_block(self._path(file.key), self.format, expected, out)
            except (BadBlockFile, FileNotFoundError) as error:
                self._remove_bad(file, error)
        with self._lock:
            self.counters.misses += not found
            self.counters.read += found
            self.counters.read_bytes += found * out.nbytes
            if found:
                self._files.learn(file, expected)
        if found:
            with contextlib.suppress(OSError):  # if it fails, only the order of use after a restart is lost
                os.utime(self._path(file.key), follow_symlinks=False)
        return found

    def _make_room(self, size: int) -> bool:
        """Removes blocks until a file of `size` bytes fits; False if that is impossible."""
        if size > self.budget_bytes:
            if not self._too_small:
                self._tell(f"disk_cache_bytes is {self.budget_bytes:,}, one block takes {size:,}: none is kept on disk")
            self._too_small = True
            return False
        if self._files.num_bytes + size > self.budget_bytes:
            self._learn_parents()
        while self._files.num_bytes + size > self.budget_bytes:
            with self._lock:
                file = self._files.victim()
                if file is None:
                    return False
                self._files.remove(file)
                self.counters.replaced += 1
            self._remove(file.key)
        return True

    def _learn_parents(self) -> None:
        """Reads unread headers to learn which blocks continue which."""
        with self._lock:
            unknown, self._files.unknown = self._files.unknown, {}
        for file in unknown.values():
            try:
                facts = read_facts(self._path(file.key), self.format)
            except (BadBlockFile, FileNotFoundError) as error:
                self._remove_bad(file, error)
            else:
                with self._lock:
                    self._files.learn(file, facts)

    def _remove_bad(self, file: BlockFile, error: BadBlockFile | FileNotFoundError) -> None:
        if not self.folder.is_dir():
            raise error
        with self._lock:
            self._files.remove(file)
            self.counters.misses_corrupt += 1
            self.counters.removed += 1
        self._remove(file.key)
        why = "it has gone" if isinstance(error, FileNotFoundError) else error
        self._tell(f"{self._path(file.key)} is not a block of this cache and was removed: {why}")

    def _remove(self, key: bytes) -> None:
        failpoint("disk.before_remove")
        self._path(key).unlink(missing_ok=True)

    def _is_known(self, file: BlockFile) -> bool:
        with self._lock:
            return self._files.by_key.get(file.key) is file

    def _path(self, key: bytes, suffix: str = "kv") -> Path:
        return self.folder / f"{key.hex()}.{suffix}"

    def _turn_off(self, error: Exception) -> None:
        with self._lock:
            was_enabled, self._enabled = self._enabled, False
            self.counters.errors += 1
            self._files = BlockFiles()
        if was_enabled:
            self._tell(
                f"the disk cache in {self.folder} is off, requests continue without it: {type(error).__name__}: {error}"
            )

    def _tell(self, message: str) -> None:
        # A warning filter may turn it into an exception, which nothing could catch here.
        with contextlib.suppress(Warning):
            self._warn(message)


def _done(result: bool) -> concurrent.futures.Future[bool]:
    future: concurrent.futures.Future[bool] = concurrent.futures.Future()
    future.set_result(result)
    return future

"""Adapters of an engine in host memory: read when a request names one, and kept while they are used."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.errors import LoadError, system_reason
from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.sources.resolve import adapter_path
from ksana_jax.loading.adapter import CONFIG, WEIGHTS, HostAdapter, read_adapter
from ksana_jax.runner.adapted import AdaptedRunner
from ksana_jax.scheduler.adapters import AdapterSlots, AdapterUse

if TYPE_CHECKING:
    from ksana_jax.scheduler.step.executor import Executor


# Digests remembered for `digest_of`.
MAX_DIGESTS = 4096


class _Kept(NamedTuple):
    """stamp: size and time of the files that the adapter was read from."""

    stamp: tuple[tuple[int, int], ...]
    use: AdapterUse


class Adapters:
    """The adapters of an engine.

    Host memory holds the `max_cpu_loras` that were asked for last, and adapters of unfinished requests. A folder whose
    files have changed is read again: requests that began with the old contents end with them.

    Args:
      model: that they adapt.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, executor: Executor):
        if not isinstance(executor, AdaptedRunner):
            raise ConfigError("enable_lora needs an engine that computes a model; this one does not")
        self.slots = AdapterSlots(config.max_loras, functools.partial(_write, executor))
        self._of_file = functools.partial(read_adapter, config=model, dtype=config.dtype, max_rank=config.max_lora_rank)
        self._with_lengths = executor.with_lengths
        self._most = config.max_cpu_loras or config.max_loras
        self._kept: dict[Path, _Kept] = {}  # the last one was asked for last
        self._digests: dict[str, str] = {}  # by path as requests give it, the last MAX_DIGESTS
        self._lock = threading.Lock()

    def use(self, request: LoRARequest) -> AdapterUse:
        """Returns a request's adapter; reads it if it is not in host memory.

        Raises:
          ValueError: it cannot be used; the message says which and why.
        """
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request is a {type(request).__name__}, must be a LoRARequest")
        try:
            folder = adapter_path(request.lora_path)
        except LoadError as error:
            raise ValueError(f"adapter {request.lora_name!r}: {error}") from None
        with self._lock:
            try:
                found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
            except OSError as error:
                raise ValueError(f"adapter {request.lora_name!r}: {error.filename}: {system_reason(error)}") from None
            stamp = tuple((file.st_size, file.st_mtime_ns) for file in found)
            kept = self._kept.pop(folder, None)
            if kept is None or kept.stamp != stamp:
                try:
                    adapter = self._read(folder)
                except ValueError as error:
                    raise ValueError(f"adapter {request.lora_name!r}: {error}") from None
                kept = _Kept(stamp, AdapterUse(adapter.digest, adapter, self.slots))
            self._kept[folder] = kept
            self._digests[request.lora_path] = kept.use.digest
            if len(self._digests) > MAX_DIGESTS:
                del self._digests[next(iter(self._digests))]
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
            return kept.use

    def digest_of(self, request: LoRARequest) -> str | None:
        """Returns the digest of the adapter that was last read for a request's path, if it is known; reads nothing."""
        return self._digests.get(request.lora_path)

    def forget(self) -> None:
        """Forgets all adapters: other weights of the model have taken the place of those that they were read for."""
        with self._lock:
            self._kept.clear()
            self.slots.clear()

    def _read(self, folder: Path) -> HostAdapter:
        adapter: HostAdapter = self._of_file(folder)
        if adapter.lengths is None:
            return adapter
        return adapter._replace(layers=self._with_lengths(adapter.layers, adapter.lengths), lengths=None)


def _write(runner: AdaptedRunner, slot: int, adapter: HostAdapter) -> None:
    runner.write_adapter(slot, adapter.layers)

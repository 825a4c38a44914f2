"""Models that share the memory of a device: to wake a model, the least recently used idle ones sleep.

Only models without requests sleep; but when another one has waited for TURN_S, new requests to the others wait, so that
they end those they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import display_name
from ksana_jax.core.units import byte_size
from ksana_jax.devices.capabilities import capabilities

if TYPE_CHECKING:
    from ksana_jax.engine.llm import LLM

# Seconds for which a model with requests takes new ones while another waits for its place; seconds that a request waits
# for room; and seconds between looks whether a model has become idle.
TURN_S = 5.0
TIMEOUT_S = 120.0
LOOK_S = 0.02


class ModelMemoryFull(RuntimeError):
    """Others did not make room for a model in time; the message has the numbers."""


class Footprint(NamedTuple):
    """Bytes of a model on the device, or on each of several: awake, and asleep."""

    awake: int
    asleep: int


def footprint(llm: LLM, level: int) -> Footprint:
    """Returns the bytes of weights, adapters and pool, and of a step if it was measured.

    Args:
      level: of `LLM.sleep`.
    """
    plan, shared = llm.memory_plan, capabilities().shares_host_memory
    replicas = len(llm.replicas.replicas) if shared else 1
    pool = (plan.pool_bytes + plan.state_bytes) * plan.pool_copies
    rest = plan.weights_bytes + (plan.step_bytes or 0)
    asleep = plan.weights_bytes if shared and level == 1 else 0
    return Footprint(replicas * (rest + pool), replicas * asleep)


def resident_bytes(llm: LLM) -> dict[str, int]:
    """Returns the bytes of "weights", adapters included, and "pool" now, on the device or on each of several; and of
    "weights_on_host" while it sleeps."""
    plan, asleep = llm.memory_plan, llm.engine.asleep
    kept, shared = asleep is not None and asleep.kept is not None, capabilities().shares_host_memory
    weights = plan.weights_bytes * (asleep is None or (kept and shared))
    on_host = plan.weights_bytes * llm.config.tensor_parallel_size * (kept and not shared)
    pool = (plan.pool_bytes + plan.state_bytes) * (asleep is None)
    return {"weights": weights, "pool": pool, "weights_on_host": on_host}


def check_room(llms: Sequence[LLM], num_bytes: int, level: int) -> None:
    """Checks that a budget holds each of the models while the others sleep.

    Raises:
      ConfigError: it does not.
    """
    sizes = [footprint(llm, level) for llm in llms]
    asleep = sum(size.asleep for size in sizes)
    for llm, size in zip(llms, sizes, strict=True):
        if (needed := size.awake + asleep - size.asleep) > num_bytes:
            rest = asleep - size.asleep
            others = f", and the others, asleep, {byte_size(rest)}" if rest else ""
            raise ConfigError(
                f"device_memory_bytes is {num_bytes:,} ({byte_size(num_bytes)}), model {display_name(llm.name)!r} "
                f"takes {byte_size(size.awake)}{others}: {needed:,} bytes"
            )


def wake_first(llms: Sequence[LLM], num_bytes: int, level: int) -> None:
    """Wakes sleeping models in their order, as far as a budget holds them."""
    sizes = [footprint(llm, level) for llm in llms]
    free = num_bytes - sum(size.asleep for size in sizes)
    for llm, size in zip(llms, sizes, strict=True):
        if (taken := size.awake - size.asleep) <= free:
            llm.wake_up()
            free -= taken


class ManagedModel(Protocol):
    """A model in a budget; `idle_sleep.IdleSleep` is one.

    name: for messages. size: its bytes. is_idle: no request uses it or waits for it. has_ended: its server ends.
    moves_s: seconds in which it fell asleep and woke up.
    """

    name: str
    size: Footprint
    has_ended: bool
    moves_s: float

    @property
    def is_asleep(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    async def rest(self) -> bool:
        """Sleeps, unless it is not idle; returns whether it sleeps."""
        ...


class ModelMemoryManager:
    """One budget for several models. For the tasks of one event loop.

    Args:
      num_bytes: of the device's memory, for all of them.
      turn_s, timeout_s: see TURN_S and TIMEOUT_S.
    """

    def __init__(self, num_bytes: int, *, turn_s: float = TURN_S, timeout_s: float = TIMEOUT_S):
        self.num_bytes, self._turn_s, self._timeout_s = num_bytes, turn_s, timeout_s
        self._by_use: dict[ManagedModel, None] = {}  # the least recently used first
        self._moving = asyncio.Lock()
        self._yielding: Sequence[ManagedModel] = ()
        self._has_moved = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        return sum(map(_bytes, self._by_use))

    @property
    def moves_s(self) -> float:
        return sum(model.moves_s for model in self._by_use)

    def used(self, model: ManagedModel) -> None:
        """Records that a model is new, or that a request has asked for it."""
        self._by_use.pop(model, None)
        self._by_use[model] = None

    async def turn(self, model: ManagedModel) -> None:
        """Waits while a model must become idle to make room for another one."""
        while model in self._yielding:
            await self._has_moved.wait()

    @contextlib.asynccontextmanager
    async def room(self, model: ManagedModel) -> AsyncIterator[None]:
        """Makes room for a sleeping model, which has to wake up inside.

        Raises:
          ModelMemoryFull: the others were busy for too long, or the server ends.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await stack.enter_async_context(self._moving)
                    stack.callback(self._move)
                    await self._make_room(model)
            except TimeoutError:
                busy = ", ".join(r.name for r in self._by_use if not (r.is_asleep or r.is_idle))
                needed = model.size.awake - _bytes(model)
                raise ModelMemoryFull(
                    f"it needs {byte_size(needed)} more, {byte_size(self.used_bytes)} of "
                    f"{byte_size(self.num_bytes)} are in use, and {busy or 'others'} had requests for "
                    f"{self._timeout_s:g} seconds"
                ) from None
            yield

    def _move(self) -> None:
        self._yielding = ()
        self._has_moved.set()
        self._has_moved = asyncio.Event()

    async def _make_room(self, model: ManagedModel) -> None:
        began = time.monotonic()
        while (short := self.used_bytes + model.size.awake - _bytes(model) - self.num_bytes) > 0:
            if model.has_ended:
                raise ModelMemoryFull("the server is shutting down")
            awake = [r for r in self._by_use if not r.is_asleep]
            if time.monotonic() - began >= self._turn_s:
                self._yielding = _first(awake, short)
            rested = [await r.rest() for r in _first([r for r in awake if r.is_idle], short)]
            if not any(rested):
                await asyncio.sleep(LOOK_S)


def _bytes(model: ManagedModel) -> int:
    """Returns the bytes that a model has now."""
    return model.size.asleep if model.is_asleep else model.size.awake


def _first(models: Sequence[ManagedModel], num_bytes: int) -> Sequence[ManagedModel]:
    """Returns the first models that free so many bytes; none if all of them do not."""
    freed = [r.size.awake - r.size.asleep for r in models]
    count = next((at for at, total in enumerate(itertools.accumulate(freed), 1) if total >= num_bytes), 0)
    return [r for r, some in zip(models[:count], freed, strict=False) if some]

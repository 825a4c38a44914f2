"""Models that share the memory of a device: a model that is asked for takes the place of idle ones, which sleep.

Those go first whose waking costs the fewest seconds per byte, by their last use (GreedyDual-Size). With pools of two
sizes, they move to the smaller one instead if that makes enough room. Both happen to models without requests; but when
another one has waited for TURN_S, new requests wait until the model has ended the others. In the same order sleeping
models drop the weights that they keep in host memory, if that has a budget too.

Source: Cao and Irani, Cost-Aware WWW Proxy Caching Algorithms, USITS 1997, section 4.
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


class NoRoom(RuntimeError):
    """Others did not make room for a model in time; the message has the numbers."""


class Footprint(NamedTuple):
    """Bytes of a model on the device, or on each of several: awake, asleep, and awake with its smaller pool.

    host: of its weights in host memory, where it keeps them asleep.
    """

    awake: int
    asleep: int
    small: int
    host: int = 0


def small_pool(llm: LLM, share: float) -> int:
    """Returns the blocks of a share of an LLM's pool, at least its longest text's."""
    scheduler = llm.engine.scheduler
    longest = scheduler.layout.blocks_to_finish(scheduler.max_model_len, scheduler.max_model_len)
    return min(max(int(share * llm.num_blocks), longest), llm.num_blocks)


def footprint(llm: LLM, level: int, share: float = 1.0) -> Footprint:
    """Returns the bytes of weights, adapters and pool, and of a step if it was measured.

    Args:
      level: of `LLM.sleep`. share: of its present pool that is the smaller one.
    """
    plan, shared = llm.memory_plan, capabilities().shares_host_memory
    replicas = len(llm.replicas.replicas) if shared else 1
    pool, rest = plan.pool_bytes * plan.pool_copies, plan.weights_bytes + (plan.step_bytes or 0)
    small = pool // llm.num_blocks * small_pool(llm, share)
    asleep = plan.weights_bytes if shared and level == 1 else 0
    host = 0 if shared or level > 1 else plan.weights_bytes * llm.config.tensor_parallel_size
    return Footprint(replicas * (rest + pool), replicas * asleep, replicas * (rest + small), host)


def resident_bytes(llm: LLM) -> dict[str, int]:
    """Returns the bytes of "weights", adapters included, and "pool" now, on the device or on each of several; and of
    "weights_on_host" while it sleeps."""
    plan, asleep = llm.memory_plan, llm.engine.asleep
    kept, shared = asleep is not None and asleep.kept is not None, capabilities().shares_host_memory
    weights = plan.weights_bytes * (asleep is None or (kept and shared))
    on_host = plan.weights_bytes * llm.config.tensor_parallel_size * (kept and not shared)
    return {"weights": weights, "pool": plan.pool_bytes * (asleep is None), "weights_on_host": on_host}


def host_room(llms: Sequence[LLM], host_bytes: int) -> int:
    """Returns the bytes of host memory that the tiers of models leave for weights.

    Raises:
      ConfigError: the tiers take more.
    """
    tiers = sum(llm.config.host_cache_bytes for llm in llms)
    if tiers > host_bytes:
        raise ConfigError(
            f"host_memory_bytes is {host_bytes:,} ({byte_size(host_bytes)}), host_cache_bytes of {len(llms)} models "
            f"take {byte_size(tiers)}"
        )
    return host_bytes - tiers


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


class Resident(Protocol):
    """A model in a budget; `idle_sleep.IdleSleep` is one.

    name: for messages. size: its bytes. wake_s: seconds that it took to wake up the last time, 0 if it never has.
    is_idle: no request uses it or waits for it. is_small: its pool is the smaller one. has_ended: its server ends.
    moves_s: seconds in which it fell asleep, woke up and changed its pool. kept_bytes: its weights in host memory.
    """

    name: str
    size: Footprint
    has_ended: bool
    is_small: bool
    moves_s: float

    @property
    def wake_s(self) -> float: ...
    @property
    def is_asleep(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def kept_bytes(self) -> int: ...
    def drop(self) -> bool:
        """Drops its weights in host memory, unless it wakes up; returns whether they are gone."""
        ...

    async def rest(self) -> bool:
        """Sleeps, unless it is not idle; returns whether it sleeps."""
        ...

    async def shrink(self) -> bool:
        """Takes its smaller pool, unless it is not idle; returns whether it has it."""
        ...


class Residents:
    """One budget for several models. For the tasks of one event loop.

    Args:
      num_bytes: of the device's memory, for all of them.
      pool_share: of its pool that a model keeps while others need the rest; 1 for pools of one size.
      host_bytes: of host memory, for the weights of sleeping models; None for all of them.
      turn_s, timeout_s: see TURN_S and TIMEOUT_S.
    """

    def __init__(
        self,
        num_bytes: int,
        pool_share: float = 1.0,
        *,
        host_bytes: int | None = None,
        turn_s: float = TURN_S,
        timeout_s: float = TIMEOUT_S,
    ):
        self.num_bytes, self.pool_share, self._turn_s, self._timeout_s = num_bytes, pool_share, turn_s, timeout_s
        self._host_bytes = host_bytes
        self._age, self._uses = 0.0, itertools.count()
        self._priority: dict[Resident, tuple[float, int]] = {}
        self._moving = asyncio.Lock()
        self._yielding: Sequence[Resident] = ()
        self._has_moved = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        return sum(map(_bytes, self._priority))

    @property
    def moves_s(self) -> float:
        return sum(resident.moves_s for resident in self._priority)

    def used(self, resident: Resident) -> None:
        """Records that a model is new, or that a request has asked for it."""
        cost = resident.wake_s / max(resident.size.awake - resident.size.asleep, 1)
        self._priority[resident] = (self._age + cost, next(self._uses))

    def keeps_weights(self, resident: Resident) -> bool:
        """Tells whether host memory has room for the weights of a model that falls asleep, once others that go before
        it have dropped theirs."""
        if self._host_bytes is None:
            return True
        before = [r for r in self._priority if r.kept_bytes and self._priority[r] < self._priority[resident]]
        before.sort(key=self._priority.__getitem__)
        short = sum(r.kept_bytes for r in self._priority) + resident.size.host - self._host_bytes
        if short > sum(r.kept_bytes for r in before):
            return False
        for one in before:
            if short > 0:
                num_bytes = one.kept_bytes
                short -= num_bytes * one.drop()
        return short <= 0

    async def turn(self, resident: Resident) -> None:
        """Waits while a model must become idle to make room for another one."""
        while resident in self._yielding:
            await self._has_moved.wait()

    @contextlib.asynccontextmanager
    async def room_to_grow(self, resident: Resident) -> AsyncIterator[bool]:
        """Tells whether there is room for the larger pool of a model, and keeps it free inside."""
        if self._moving.locked():  # others need room
            yield False
            return
        async with self._moving:
            yield self.used_bytes + resident.size.awake - resident.size.small <= self.num_bytes

    @contextlib.asynccontextmanager
    async def room(self, resident: Resident) -> AsyncIterator[bool]:
        """Makes room for a sleeping model, which has to wake up inside; tells whether it has to be small.

        Raises:
          NoRoom: the others were busy for too long, or the server ends.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await stack.enter_async_context(self._moving)
                    stack.callback(self._move)
                    await self._make_room(resident)
            except TimeoutError:
                busy = ", ".join(r.name for r in self._priority if not (r.is_asleep or r.is_idle))
                needed = resident.size.small - _bytes(resident)
                raise NoRoom(
                    f"it needs {byte_size(needed)} more, {byte_size(self.used_bytes)} of "
                    f"{byte_size(self.num_bytes)} are in use, and {busy or 'others'} had requests for "
                    f"{self._timeout_s:g} seconds"
                ) from None
            yield self.used_bytes + resident.size.awake - _bytes(resident) > self.num_bytes

    def _move(self) -> None:
        self._yielding = ()
        self._has_moved.set()
        self._has_moved = asyncio.Event()

    async def _make_room(self, resident: Resident) -> None:
        began = time.monotonic()
        while (short := self.used_bytes + resident.size.small - _bytes(resident) - self.num_bytes) > 0:
            if resident.has_ended:
                raise NoRoom("the server is shutting down")
            awake = sorted((r for r in self._priority if not r.is_asleep), key=self._priority.__getitem__)
            if time.monotonic() - began >= self._turn_s:
                self._yielding = _first(awake, short, shrinks=True) or _first(awake, short)
            idle = [r for r in awake if r.is_idle]
            if smaller := _first(idle, short, shrinks=True):
                moved = [await r.shrink() for r in smaller]
            else:
                victims = _first(idle, short)
                moved = [await r.rest() for r in victims]
                for victim in itertools.compress(victims, moved):
                    self._age = max(self._age, self._priority[victim][0])
            if not any(moved):
                await asyncio.sleep(LOOK_S)


def _bytes(resident: Resident) -> int:
    """Returns the bytes that a model has now."""
    size = resident.size
    return size.asleep if resident.is_asleep else size.small if resident.is_small else size.awake


def _first(residents: Sequence[Resident], num_bytes: int, shrinks: bool = False) -> Sequence[Resident]:
    """Returns the first residents that free so many bytes; none if all of them do not. shrinks: with their pools."""
    freed = [_bytes(r) - (r.size.small if shrinks else r.size.asleep) for r in residents]
    count = next((at for at, sum in enumerate(itertools.accumulate(freed), 1) if sum >= num_bytes), 0)
    return [r for r, some in zip(residents[:count], freed, strict=False) if some]

"""Devices of the loopback plugin, and what is in their memories."""

from __future__ import annotations

import itertools

from ksana_jax.devices.loopback.marshal import Handles, Kept, Refused

DEVICE, PINNED = "device", "pinned_host"


class Memory(Kept):
    """A memory of a device. kind: DEVICE or PINNED."""

    def __init__(self, device: Device, kind: str, handles: Handles):
        super().__init__()
        self.device, self.kind = device, kind
        self.id = 2 * device.index + (kind != DEVICE)
        self.handle = handles.add(self)


class Description(Kept):
    """What a device is, also before there is a client."""

    def __init__(self, index: int, handles: Handles):
        super().__init__()
        self.index = index
        self.handle = handles.add(self)


class Topology(Kept):
    """All devices of a client."""

    def __init__(self, descriptions: list[Description], handles: Handles):
        super().__init__()
        self.descriptions = descriptions
        self.handle = handles.add(self)


class Device(Kept):
    """A device whose memory is counted: arrays, and while a program runs, its results and temporary buffers."""

    def __init__(self, platform: str, index: int, limit: int, pinned: bool, handles: Handles):
        super().__init__()
        self.name, self.index, self.limit = f"{platform}:{index}", index, limit
        self.peak = self.largest = 0
        # Bytes by claim, added up when asked for: a sum that is kept would need a lock, which a collection of garbage
        # in the thread that has it could ask for again.
        self._claims: dict[int, int] = {}
        self._numbers = itertools.count()
        self.handle = handles.add(self)
        self.description = Description(index, handles)
        self.memory = Memory(self, DEVICE, handles)
        self.memories = [self.memory, *([Memory(self, PINNED, handles)] if pinned else [])]

    @property
    def in_use(self) -> int:
        return sum(self._claims.values())

    def claim(self, size: int, what: str) -> int:
        """Takes bytes of the memory; returns a number to release them by.

        Raises:
          Refused: they are not free.
        """
        before = self.in_use
        if before + size > self.limit:
            free = self.limit - before
            message = f"Out of memory on {self.name}: {what} takes {size} bytes, {free} of {self.limit} are free"
            raise Refused("RESOURCE_EXHAUSTED", message)
        number = next(self._numbers)
        self._claims[number] = size
        self.peak, self.largest = max(self.peak, before + size), max(self.largest, size)
        return number

    def release(self, number: int) -> None:
        """Gives back what was claimed; once more does nothing."""
        self._claims.pop(number, None)

"""What passes between Python and the caller in C: handles, strings, arrays, named values and errors."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ksana_jax.devices.loopback import abi


class Refused(Exception):
    """A function's error, as a PJRT_Error. code: a name in `abi.CODES`."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message

    @classmethod
    def of(cls, error: Exception) -> Refused:
        """Returns the error that another exception becomes; messages of XLA begin with their code."""
        if isinstance(error, cls):
            return error
        code, colon, message = str(error).partition(": ")
        return (
            cls(code, message) if colon and code in abi.CODES else cls("INTERNAL", f"{type(error).__name__}: {error}")
        )


class Kept:
    """An object whose strings and arrays are handed out by pointer, and live as long as it does."""

    def __init__(self):
        self._kept: dict[str, Any] = {}

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned when first called under this name; several threads get the same."""
        if name not in self._kept:
            self._kept.setdefault(name, make())
        return self._kept[name]

    def text(self, name: str, value: str) -> tuple[int, int]:
        """Returns address and bytes of a string."""
        buffer = self.keep(name, lambda: ctypes.create_string_buffer(value.encode()))
        return ctypes.addressof(buffer), len(buffer) - 1

    def c_array(self, name: str, kind: Any, values: Sequence[Any]) -> tuple[int, int]:
        """Returns address and length of an array of a ctypes type."""
        array = self.keep(name, lambda: (kind * max(1, len(values)))(*values))
        return ctypes.addressof(array), len(values)

    def handle_array(self, name: str, things: Sequence[Any]) -> tuple[int, int]:
        """Returns address and length of an array of the handles of things."""
        return self.c_array(name, ctypes.c_void_p, [thing.handle for thing in things])

    def named(self, name: str, values: Mapping[str, Any]) -> tuple[int, int]:
        """Returns address and length of an array of PJRT_NamedValue."""
        array, _ = self.keep(name, lambda: _named_values(values))
        return ctypes.addressof(array), len(values)


class Handles:
    """Gives objects numbers, by which the caller names them, and keeps them until they are destroyed."""

    def __init__(self):
        self._objects: dict[int, Any] = {}
        self._numbers = itertools.count(0x1000, 16)

    def add(self, thing: Any) -> int:
        number = next(self._numbers)
        self._objects[number] = thing
        return number

    def __getitem__(self, number: int) -> Any:
        return self._objects[number]

    def __len__(self) -> int:
        return len(self._objects)

    def drop(self, number: int) -> Any:
        """Forgets a handle; returns what it named, None if there was nothing."""
        return self._objects.pop(number, None)


def read_array(address: int | None, count: int, kind: Any = ctypes.c_void_p) -> list[Any]:
    """Returns the elements of the caller's array."""
    return list((kind * count).from_address(address)) if count and address else []


def read_named_values(address: int | None, count: int) -> dict[str, Any]:
    """Returns the caller's array of PJRT_NamedValue as a dict."""
    found = {}
    for slot in read_array(address, count, abi.NamedValue):
        name, value = ctypes.string_at(slot.name, slot.name_size).decode(), slot.value
        if slot.type == 0:
            found[name] = ctypes.string_at(value.text, slot.value_size).decode()
        elif slot.type == 2:
            found[name] = read_array(value.integers, slot.value_size, ctypes.c_int64)
        else:
            found[name] = {1: value.integer, 3: value.number, 4: value.truth}[slot.type]
    return found


def _named_values(values: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Returns an array of PJRT_NamedValue, and what it points at."""
    array, kept = (abi.NamedValue * max(1, len(values)))(), []
    for slot, (name, value) in zip(array, values.items()):
        kept.append(text := ctypes.create_string_buffer(name.encode()))
        slot.struct_size, slot.name, slot.name_size = ctypes.sizeof(slot), ctypes.addressof(text), len(text) - 1
        slot.value_size = 1
        if isinstance(value, str):
            kept.append(text := ctypes.create_string_buffer(value.encode()))
            slot.type, slot.value.text, slot.value_size = 0, ctypes.addressof(text), len(text) - 1
        elif isinstance(value, (list, tuple)):
            kept.append(numbers := (ctypes.c_int64 * len(value))(*value))
            slot.type, slot.value.integers, slot.value_size = 2, ctypes.addressof(numbers), len(numbers)
        elif isinstance(value, float):
            slot.type, slot.value.number = 3, value
        else:  # of a bool jaxlib aborts the process
            slot.type, slot.value.integer = 1, int(value)
    return array, kept

"""The work budget of a chat template, which bounds its time and memory. Knows values, not Jinja's syntax.

Producing one character costs one unit of work; a call, a filter or an iteration of a loop costs STEP units, reading a
character a quarter. WORK units take about a second on one core and produce at most 80 MB of text.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

WORK = 20_000_000
STEP = 50
# Characters of one value written out, an item of a list or mapping counting as ITEM.
MAX_VALUE = 2**22
ITEM = 16
MAX_DEPTH = 32
MAX_INTEGER_BITS = 4096


class Budget:
    """Counts the work of one rendering."""

    def __init__(self):
        self._left = WORK
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id; the value is kept so that its id is not reused

    def charge(self, units: int) -> None:
        """Deducts units of work.

        Raises:
          SecurityError: fewer units are left.
        """
        self._left -= units
        if self._left < 0:
            raise SecurityError(f"it takes more than {WORK:,} units of work: characters made, {STEP} for each step")

    def size(self, value: Any) -> int:
        """Returns roughly the number of characters of a value when written out; repeated items count each time.

        Raises:
          SecurityError: more than MAX_VALUE, or nested deeper than MAX_DEPTH.
        """
        size, _ = self._size(value, MAX_DEPTH)
        return size

    def _size(self, value: Any, depth: int) -> tuple[int, bool]:
        """Returns the size, and whether it is final; the size of a namespace is not."""
        if isinstance(value, str):
            return len(value), True
        if isinstance(value, int):
            return 1 + value.bit_length() // 3, True
        if (known := self._sizes.get(id(value))) is not None:
            return known[1], True
        stays = not isinstance(value, Namespace)
        if isinstance(value, Mapping):
            parts: Iterable[Any] = (part for item in value.items() for part in item)
        elif isinstance(value, Namespace):
            parts = object.__getattribute__(value, "_Namespace__attrs").values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = value
        else:
            return ITEM, True
        if not depth:
            raise SecurityError(f"its values are nested deeper than {MAX_DEPTH} levels")
        total = ITEM
        for part in parts:
            size, part_stays = self._size(part, depth - 1)
            total, stays = total + size + ITEM, stays and part_stays
            if total > MAX_VALUE:
                raise SecurityError(f"a value of more than {MAX_VALUE:,} characters")
        if stays:
            self._sizes[id(value)] = value, total
        return total, stays

    def read(self, value: Any) -> int:
        """Returns the units of work for reading a value once."""
        return self.size(value) // 4

    def made(self, value: Any) -> Any:
        """Charges for a new value and returns it. Items count by their lengths; their contents were charged before."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise SecurityError(f"an integer of more than {MAX_INTEGER_BITS:,} bits")
        elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
            inner = value.values() if isinstance(value, Mapping) else value
            # The number of items first, because iterating over them is work as well.
            self.charge(ITEM * len(value))
            self.charge(sum(len(part) for part in inner if isinstance(part, (str, list, tuple))))
        return value


_current: contextvars.ContextVar[Budget] = contextvars.ContextVar("chat_template_budget")


def start() -> contextvars.Token[Budget]:
    """Starts the budget of a rendering in this thread."""
    return _current.set(Budget())


def end(token: contextvars.Token[Budget]) -> None:
    _current.reset(token)


def current() -> Budget:
    """Returns the budget of the current rendering."""
    return _current.get()

"""Rates over a sliding window: of one thing, and of the most frequent ones of very many."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class WindowedRate:
    """Amount per second over the last window_s or so: the running half of the window and the one before it."""

    __slots__ = ("_before", "_half_s", "_now", "_start")

    def __init__(self, window_s: float, now: float):
        self._half_s, self._start, self._now = window_s / 2, now, 0.0
        self._before: float | None = None

    def add(self, amount: float, now: float) -> None:
        self._turn(now)
        self._now += amount

    def rate(self, now: float) -> float:
        """Returns the amount per second, over a window of which at least a twelfth has passed."""
        self._turn(now)
        if self._before is None:
            return self._now / max(now - self._start, self._half_s / 6)
        return (self._before + self._now) / (self._half_s + now - self._start)

    def _turn(self, now: float) -> None:
        if now >= self._start + self._half_s:
            halves = int((now - self._start) / self._half_s)
            self._before = self._now if halves == 1 else 0.0
            self._now, self._start = 0.0, self._start + halves * self._half_s


class SpaceSaving:
    """Counts of the most frequent keys, with a fixed number of counters.

    A key without a counter takes over the smallest one, and its count: a count is too high by at most that, and a key
    that occurred more than total / capacity times is always there.

    Source: Metwally, Agrawal and El Abbadi, Efficient Computation of Frequent and Top-k Elements in Data Streams, 2005.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._counts: dict[Hashable, int] = {}
        self._heap: list[tuple[int, int, Hashable]] = []  # of earlier counts: counts only grow
        self._serial = 0

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, key: Hashable) -> int:
        """Returns how often a key occurred, or more; 0 if it has no counter."""
        return self._counts.get(key, 0)

    def add(self, key: Hashable) -> int:
        """Counts an occurrence; returns the count."""
        counts = self._counts
        if key in counts:
            counts[key] += 1
            return counts[key]
        count = 1
        if len(counts) >= self.capacity:
            count += self._take_smallest()
        counts[key] = count
        self._serial += 1  # keys themselves need not be comparable
        heapq.heappush(self._heap, (count, self._serial, key))
        return count

    def _take_smallest(self) -> int:
        while True:
            count, serial, key = self._heap[0]
            actual = self._counts[key]
            if actual == count:
                heapq.heappop(self._heap)
                del self._counts[key]
                return count
            heapq.heapreplace(self._heap, (actual, serial, key))


class FrequentKeys:
    """Arrivals of the most frequent keys in a sliding window, by two sketches of half a window each."""

    def __init__(self, capacity: int, window_s: float):
        self._capacity, self._half_s = capacity, window_s / 2
        self._start: float | None = None
        self._now, self._before = SpaceSaving(capacity), SpaceSaving(capacity)

    def add(self, key: Hashable) -> int:
        """Counts an arrival at the time of the last `turn`; returns how many there were in the window, or more."""
        return self._now.add(key) + self._before.count(key)

    def turn(self, now: float) -> None:
        """Moves the window on."""
        if self._start is None:
            self._start = now
        if now >= self._start + self._half_s:
            one = now < self._start + 2 * self._half_s
            self._before = self._now if one else SpaceSaving(self._capacity)
            self._now = SpaceSaving(self._capacity)
            self._start += self._half_s * int((now - self._start) / self._half_s)

    def span_s(self, now: float) -> float:
        """Returns the seconds that the window covers; at the start, half of it."""
        passed_s = now - (self._start or 0.0)
        return self._half_s + passed_s if len(self._before) else self._half_s

"""Slots for adapters: replaced by last use, kept while a row runs, and consistent after a failed write."""

import types
from typing import Any, cast

import numpy as np
import pytest

from ksana_jax.scheduler.adapters import AdapterSlots, AdapterUse
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.per_token import adapter_slots


class Slots:
    """Adapters a, b, c, ... in slots; running ones are rows."""

    def __init__(self, num_slots: int):
        self.written: list[tuple[int, str]] = []
        self.slots = AdapterSlots(num_slots, lambda slot, adapter: self.written.append((slot, adapter)))
        self.running: list[Any] = [None] * 8

    def use(self, name: str) -> AdapterUse:
        return AdapterUse(name, name, self.slots)

    def ready(self, name: str) -> bool:
        return self.use(name).ready(cast(Rows, types.SimpleNamespace(seqs=self.running)))

    def run(self, row: int, name: str | None) -> None:
        self.running[row] = name and types.SimpleNamespace(adapter=self.use(name))


def test_an_adapter_is_written_once():
    found = Slots(2)
    assert all(map(found.ready, "abab"))
    assert found.written == [(0, "a"), (1, "b")]


def test_the_adapter_whose_last_step_is_the_longest_ago_is_replaced():
    found = Slots(3)
    assert all(map(found.ready, "abc"))
    for name in "bac":
        found.slots.used(name)
    found.slots.used("b")
    assert found.ready("d") and found.ready("e")
    assert found.written[3:] == [(0, "d"), (2, "e")]


def test_an_adapter_stays_while_a_row_runs_with_it():
    found = Slots(2)
    assert found.ready("a") and found.ready("b")
    found.run(0, "a")
    found.run(1, None)
    assert found.ready("c") and found.ready("a")
    found.run(2, "c")
    assert not found.ready("b") and found.ready("a") and found.ready("c")
    found.run(0, None)
    assert found.ready("b")
    assert found.written == [(0, "a"), (1, "b"), (1, "c"), (0, "b")]


def test_a_slot_whose_write_failed_is_free():
    found, failing = Slots(1), [True]

    def write(slot, adapter):
        if failing:
            failing.pop()
            raise MemoryError
        found.written.append((slot, adapter))

    assert found.ready("a")
    found.slots._write = write
    with pytest.raises(MemoryError):
        found.ready("b")
    assert found.ready("a") and found.written == [(0, "a"), (0, "a")]


def test_tokens_have_the_slots_of_their_rows_and_padding_has_none():
    found = Slots(2)
    assert found.ready("a") and found.ready("b")
    found.run(1, "b")
    found.running[3] = types.SimpleNamespace(adapter=None)
    found.run(4, "a")
    batch = types.SimpleNamespace(rows=np.array([3, 1, 4]), num_per_row=np.array([1, 1, 3]))
    shape = types.SimpleNamespace(num_tokens=9)
    rows = types.SimpleNamespace(seqs=found.running)
    slots = adapter_slots(cast(Any, shape), cast(Any, batch), cast(Any, rows), np.array([1, 0, 6]))
    assert slots.tolist() == [1, -1, -1, -1, 0, 0, 0, -1, -1]

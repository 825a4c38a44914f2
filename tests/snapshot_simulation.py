"""Random simulations of engines that keep snapshots of evicting rows."""

from __future__ import annotations

from typing import Any

from ksana_jax.kv.eviction import read_eviction
from tests.storing_simulation import StoringSimulation, plain


class SnapshotSimulation(StoringSimulation):
    """Random simulations of an engine that adds up attention and caches snapshots, with many chats."""

    def draws_eviction(self) -> bool:
        return True

    def draw_eviction(self) -> tuple[tuple[str, Any], ...]:
        while not read_eviction(plain(found := super().draw_eviction())).adds_up:  # type: ignore[union-attr]  # never None
            pass
        return found

    def draw_storage(self) -> None:
        super().draw_storage()
        self.settings |= {"caching": True, "host_slots": self.rng.choice([0, 0, 8])}
        self.settings["num_blocks"] += self.rng.choice([0, 20])

    def add(self) -> None:
        (self.next_turn if self.rng.random() < 0.5 else super().add)()

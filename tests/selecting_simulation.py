"""Lives of engines whose queries read only the blocks that they select; texts come from `tests.storing_simulation`."""

from __future__ import annotations

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.core.patterns import FULL
from ksana_jax.kv.layout import SUMMARY
from ksana_jax.kv.selection import SELECTION_METHODS
from ksana_jax.scheduler.step.types import StepArrays
from tests.counted_evictions import Storage
from tests.expected import LONGEST, PATTERNS
from tests.fake_pool import StoringExecutor
from tests.storing_simulation import DRAWN, StoringSimulation, block_queries

# Those that read any model.
METHODS = sorted(SELECTION_METHODS.keys() - {"lightning_indexer"})


class SelectingExecutor(StoringExecutor):
    """A `StoringExecutor` that keeps summaries of blocks, and whose queries read the blocks with the highest scores."""

    def _write_and_read(self, at: int, a: StepArrays, group: int, hidden, kv_slots: np.ndarray) -> np.ndarray:
        found = super()._write_and_read(at, a, group, hidden, kv_slots)
        method, slots = self.layout.selection, a.slots[group][a.positions >= 0]
        assert method is not None
        for block in np.unique(slots // self.block_size):
            last = slots[slots // self.block_size == block].max() % self.block_size
            with np.errstate(all="ignore"):  # there is noise in slots that nobody has written
                keys, _ = self._decoded(at, lambda leaf, layer, index, block=block: leaf[block, layer, index, 0])
                summary = method.summarise(keys[None, None], np.arange(self.block_size)[None] <= last, np)
            self.leaves[SUMMARY][block, at, 0] = summary[0]
        return found

    def _selected(self, layer: int, a: StepArrays, group: int, hidden, tile_of: np.ndarray) -> np.ndarray | bool:
        if (method := self.layout.selects_in[layer]) is None:
            return True
        tables, starts = a.block_tables[group][tile_of], a.block_starts[group][tile_of]
        at, position, size = self.layout.places[layer][1], a.cache_positions[group][:, None], self.block_size
        summaries = self.leaves[SUMMARY][tables, at, 0].swapaxes(1, 2)
        whole = starts <= position - size
        with np.errstate(all="ignore"):
            q = block_queries(hidden)[:, None, None]
            [scores] = method.scores(q, summaries.astype(np.float64), whole[:, None, None], np).transpose(1, 2, 0, 3)[0]
        scores = np.where(starts > position, -np.inf, np.where((starts == 0) | ~whole, np.inf, scores))
        chosen = np.zeros(starts.shape, bool)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : method.num_blocks(size)]
        np.put_along_axis(chosen, order, True, axis=1)
        if a.query_numbers is not None:
            chosen |= a.query_numbers[group][:, None] <= 0
        return chosen.repeat(size, axis=1)


class SelectingSimulation(StoringSimulation):
    """A `Simulation` whose queries select blocks."""

    executor = SelectingExecutor

    def draw_storage(self) -> None:
        rng, size = self.rng, self.block_size
        self.pattern = rng.choice([name for name in sorted(PATTERNS) if FULL in PATTERNS[name]])
        self.settings["shared_rows"] = 0
        if self.disk is None:
            self.settings["host_slots"] = rng.choice([0, 3, 8, 200])
        # A cached answer was computed as generated, a prompt is not: by chance short blocks of both are the same.
        only_streamed = self.settings["caching"] and size < 4
        drawn = {
            "method": rng.choice(METHODS),
            "budget": size * rng.choice([2, 2, 3, 5, 9]) + rng.choice([0, size - 1]),
            "full_layers": rng.choice([0, 0, 1]),
            "prompts": "streamed" if only_streamed else rng.choice(["streamed", "whole"]),
        }
        self.storage = Storage(self.pattern, size, rng.choice(DRAWN), selection=tuple(drawn.items()))
        most = self.storage.layout.blocks_of(LONGEST - 1)
        self.settings["num_blocks"] = max(most + rng.choice([-1, 0, 0, 1, 4, 20]), 1)

    def drawn(self) -> set[str]:
        return super().drawn() | {"selection"}

    def start(self) -> None:
        super().start()
        for name in ("method", "prompts"):
            self.seen[f"engines with {dict(self.storage.selection)[name]}"] += 1

    def next_turn(self) -> None:
        """A prompt that continues a cached answer gives the tokens of an engine without a cache only if it is read as
        the answer was."""
        whole = self.settings["caching"] and dict(self.storage.selection)["prompts"] == "whole"
        (self.add if whole else super().next_turn)()

    def change_pattern(self) -> None:
        before = self.engine.scheduler.layout
        if self.engine.has_work:
            return
        try:
            self.engine.set_patterns(PATTERNS["sink"])
        except ConfigError:
            assert self.engine.scheduler.layout is before
            self.seen["changes refused"] += 1
        else:
            raise AssertionError("an engine that selects took a window")

    def disk_trouble(self) -> None:
        """Where there is no disk, a row is preempted without need."""
        scheduler = self.engine.scheduler
        if self.disk is not None:
            super().disk_trouble()
        elif len(scheduler.order):
            scheduler._preempt(int(scheduler.order[-1]))

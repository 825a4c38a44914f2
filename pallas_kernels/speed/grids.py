"""Predicts kernels without the list of work of decode, or with its keys alone: prefill, mass, write.

`predict` has the terms that a time is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pallas_kernels.speed import lists
from pallas_kernels.speed.chip import Chip
from pallas_kernels.speed.predict import Machine, Prediction, limit_of, sum_of, walk


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Causal attention in tiles of rows, one block of threads for each tile and head.

    Args:
      kernel: its name. tile: queries of a tile. heads: blocks of threads of one tile.
      num_heads, head_dim: of the queries, for the operations.
      piece: keys of a turn. part: keys of a masked turn.
      rows: queries, the last ones of a row, and its length, by the name of the shape.
      longest_first: tiles with most keys run first; else in the order of their positions.
    """

    kernel: str
    tile: int
    heads: int
    num_heads: int
    head_dim: int
    piece: int
    part: int
    rows: Mapping[str, tuple[int, int]]
    longest_first: bool = True

    def predict(self, machines: Mapping[str, Machine], chip: Chip) -> list[Prediction]:
        """Predicts each row."""
        slow = dataclasses.replace(chip, clock_hz=chip.tensor_clock_hz)
        return [self._of_row(name, *row, machines[self.kernel], slow) for name, row in self.rows.items()]

    def _of_row(self, name: str, queries: int, length: int, machine: Machine, chip: Chip) -> Prediction:
        blocks = machine.resident
        timing, masked = machine.turn(chip, blocks), machine.simulated("masked", chip, blocks, chip.l1_latency)
        arrival = chip.dram_latency + chip.tma_latency
        start = machine.once("before", chip, blocks, chip.l2_latency) + arrival
        end = machine.once("after", chip, blocks, chip.l2_latency)
        tiles = [(begin, min(begin + self.tile, length)) for begin in range(length - queries, length, self.tile)]
        durations = []
        for begin, until in reversed(tiles) if self.longest_first else tiles:
            whole = (begin + 1) // self.piece  # pieces that all queries see
            pieces = -(-until // self.piece)
            turns = whole * timing.cycles + (pieces - whole) * (self.piece // self.part) * masked.cycles
            durations += [start + turns + end] * self.heads
        compute = lists.makespan(durations, blocks * chip.num_cores)
        # Keys and values of as many heads as a tile has, read once; rows of the queries and of the output.
        num_bytes = 4 * self.head_dim * (self.heads * length + self.num_heads * queries)
        terms = {
            "memory": num_bytes / chip.read_bytes_per_s * 1e6,
            "compute": chip.us(compute),
            "launches": chip.launch_us,
        }
        us = sum_of(terms)
        flops = 4 * self.num_heads * self.head_dim * queries * (2 * length - queries + 1) // 2
        return Prediction(name, us, limit_of(terms, timing), terms, tflops=flops / us / 1e6)


@dataclasses.dataclass(frozen=True)
class Mass:
    """Probability mass of each slot: keys alone are read, along the list of work of decode. Fields: of `Attention`."""

    num_kv_heads: int
    piece_bytes: float
    num_workers: int
    kernel: str = "hopper_mass"

    def predict(self, machines: Mapping[str, Machine], chip: Chip) -> list[Prediction]:
        """Predicts the shapes of decode."""
        return [self.of_shape(name, lengths, machines, chip) for name, lengths in lists.DECODE.items()]

    def num_bytes(self, lengths: Sequence[int]) -> float:
        """Returns the bytes of keys that rows of these lengths read."""
        return sum(lists.stretches(lengths, self.num_kv_heads, self.num_workers).pieces) * self.piece_bytes

    def of_shape(self, name: str, lengths: Sequence[int], machines: Mapping[str, Machine], chip: Chip) -> Prediction:
        """Predicts rows of these lengths."""
        work = lists.stretches(lengths, self.num_kv_heads, self.num_workers)
        timing, start, compute, end = walk(machines[self.kernel], work, chip)
        num_bytes = sum(work.pieces) * self.piece_bytes
        terms = {
            "memory": num_bytes / chip.read_bytes_per_s * 1e6,
            "compute": chip.us(compute),
            "start and end": chip.us(start + end),
            "launches": chip.launch_us,
        }
        us = sum_of(terms)
        share = num_bytes / (us * 1e-6) / chip.copy_bytes_per_s
        return Prediction(name, us, limit_of(terms, timing), terms, share)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A block of threads for each token, which is read and written once, without a loop.

    kernel: its name. token_bytes: read and written of a token.
    """

    kernel: str
    token_bytes: float

    def predict(self, machines: Mapping[str, Machine], chip: Chip) -> list[Prediction]:
        """Predicts writes of several sizes."""
        return [self.of_tokens(name, tokens, machines, chip) for name, tokens in lists.WRITES.items()]

    def of_tokens(self, name: str, tokens: int, machines: Mapping[str, Machine], chip: Chip) -> Prediction:
        """Predicts a write of as many tokens."""
        machine = machines[self.kernel]
        blocks = min(machine.resident, -(-tokens // chip.num_cores))
        timing = machine.simulated("before", chip, blocks, chip.dram_latency)
        waves = -(-tokens // (blocks * chip.num_cores))
        num_bytes = tokens * self.token_bytes
        terms = {
            "memory": num_bytes / chip.copy_bytes_per_s * 1e6,
            "compute": chip.us(waves * timing.cycles),
            "launches": chip.launch_us,
        }
        us = sum_of(terms)
        share = num_bytes / (us * 1e-6) / chip.copy_bytes_per_s
        return Prediction(name, us, limit_of(terms, timing), terms, share)

"""Predicts products of few rows with a matrix, `hopper.product`: a block of threads for some columns of the result.

Beside the weights, which come from memory once, each block of threads reads all rows from the L2, where the previous
launch has left them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallas_kernels.hopper.product import Plan
from pallas_kernels.speed.chip import Chip
from pallas_kernels.speed.predict import Machine, Prediction, limit_of, sum_of


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of `rows` rows [rows, depth] with `parts` matrices [width, depth] of 16 bits.

    kernel: its name. ahead_bytes: of a later kernel's weights, that it asks the L2 for at its end.
    """

    rows: int
    depth: int
    width: int
    parts: int = 1
    kernel: str = "hopper_product"
    ahead_bytes: int = 0

    @property
    def plan(self) -> Plan:
        """The kernel's plan."""
        return Plan.of(self.rows, self.depth, self.width, self.parts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices."""
        return 2 * self.parts * self.width * self.depth

    def predict(self, machines: Mapping[str, Machine], chip: Chip) -> list[Prediction]:
        """Predicts the product."""
        return [self.of_machine(machines[self.kernel], chip)]

    def of_machine(self, machine: Machine, chip: Chip, cached_bytes: float = 0.0) -> Prediction:
        """Predicts the product by its kernel's machine code. cached_bytes: of its weights that are in the L2."""
        plan = self.plan
        blocks = self.width // plan.columns
        resident = self._resident(machine, chip)
        turn = machine.turn(chip, resident)
        # A copy is asked for `stages` turns before its data is needed, when its place has been read.
        cycles = max(turn.cycles, (chip.loaded_latency + turn.held) / machine.parts.stages)
        waves = -(-blocks // (resident * chip.num_cores))
        row_bytes = 2 * self.rows * self.depth
        of_core = waves * resident * (row_bytes + self.weight_bytes / blocks)
        start, end = self.start_us(machine, chip), self.end_us(machine, chip)
        bounds = {
            "memory": (self.weight_bytes - cached_bytes) / chip.weight_bytes_per_s * 1e6,
            "L2": (self.weight_bytes + blocks * row_bytes) / chip.l2_bytes_per_s * 1e6,
            "multiprocessor": chip.us(of_core / chip.core_bytes_per_cycle),
        }
        terms = {
            "memory": max(bounds.values()),
            "compute": chip.us(waves * (self.depth // plan.piece) * cycles),
            "start and end": start + end,
            "launches": chip.launch_us,
        }
        us = sum_of(terms)
        limit = limit_of(terms, turn)
        if limit == "memory":
            limit = max(bounds, key=lambda name: bounds[name])
        share = self.weight_bytes / (us * 1e-6) / chip.copy_bytes_per_s
        return Prediction(f"{self.rows} rows", us, limit, terms, share)

    def start_us(self, machine: Machine, chip: Chip) -> float:
        """Returns the microseconds until the first bytes arrive."""
        before = machine.once("before", chip, self._resident(machine, chip), chip.l2_latency)
        return chip.us(before + chip.dram_latency + chip.tma_latency)

    def end_us(self, machine: Machine, chip: Chip) -> float:
        """Returns the microseconds after the last turn, at whose beginning the next product's weights are asked for."""
        return chip.us(machine.once("after", chip, self._resident(machine, chip), chip.l2_latency))

    def _resident(self, machine: Machine, chip: Chip) -> int:
        """Blocks of threads that a multiprocessor has at once."""
        return min(machine.resident, -(-(self.width // self.plan.columns) // chip.num_cores))


class Ahead:
    """Bytes of the next product's weights that a product prefetches into the L2, while memory would be idle.

    It assumes that they are kept, and that kernels do not wait at their end for their prefetches.
    """

    def __init__(self, chip: Chip):
        self.chip, self._asked, self._idle_us, self._read = chip, 0.0, 0.0, 0.0

    def ask(self, num_bytes: float, end_us: float) -> None:
        """A product has asked for bytes, some time before its end."""
        self._asked, self._idle_us, self._read = num_bytes, end_us, 0.0

    def start(self) -> None:
        """A launch follows, after a gap."""
        self._idle_us += self.chip.launch_us

    def run(self, us: float, num_bytes: float) -> None:
        """A launch other than a product has run, and has read bytes from memory."""
        self._idle_us += max(us - num_bytes / self._bytes_per_us, 0.0)
        self._read += num_bytes

    def take(self, start_us: float) -> float:
        """Returns the bytes that a product finds in the L2 when it has started: none if enough was read meanwhile to
        replace them."""
        came = (self._idle_us + start_us) * self._bytes_per_us
        found = min(self._asked, came) if self._read + self._asked <= self.chip.l2_kept_bytes else 0.0
        self._asked = 0.0
        return found

    @property
    def _bytes_per_us(self) -> float:
        return self.chip.weight_bytes_per_s / 1e6

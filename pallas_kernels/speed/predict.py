"""Predicts how long kernels take on shapes of the GPU script, from the machine code of their parts.

A multiprocessor's time is the longest of several terms, each in cycles: `compute`, turns of the inner loop as `warp`
simulates them; `memory`, bytes at the bandwidth of the chip. Time that does not overlap is added: the start of a
kernel, its end, other kernels, and the gaps between launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pallas_kernels.speed import lists, pipes
from pallas_kernels.speed.chip import Chip
from pallas_kernels.speed.parts import Parts, count_copies
from pallas_kernels.speed.warp import Timing, simulate


@dataclasses.dataclass(frozen=True)
class Machine:
    """A compiled kernel: its parts, how many of its blocks fit a multiprocessor, and warpgroups of a block that run the
    inner loop."""

    parts: Parts
    resident: int
    warpgroups: int
    seen: dict[Any, Timing] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def turn(self, chip: Chip, blocks: int) -> Timing:
        """Simulates the inner loop."""
        return self.simulated("turn", chip, blocks, chip.l1_latency)

    def once(self, part: str, chip: Chip, blocks: int, load_latency: float) -> float:
        """Cycles of a part that runs once, beside other blocks that run the same; 0 without it."""
        return self.simulated(part, chip, blocks, load_latency).cycles if getattr(self.parts, part) else 0.0

    def simulated(self, part: str, chip: Chip, blocks: int, load_latency: float) -> Timing:
        """Simulates a part in as many blocks."""
        key = part, blocks, load_latency
        if key not in self.seen:
            turns = 12 if part in ("turn", "masked") else 3
            self.seen[key] = simulate(
                getattr(self.parts, part),
                chip,
                warps=self.warpgroups,
                blocks=blocks,
                turns=turns,
                load_latency=load_latency,
                beside=self.parts.beside if part in ("turn", "masked") else (),
            )
        return self.seen[key]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted time of a call on one shape.

    Args:
      terms: microseconds by cause: memory and compute overlap, and only the longer one counts; the others are
        added.
      limit: the part to speed up first.
      share: of the bandwidth of a copy; 0 where arithmetic counts. tflops: rate of arithmetic, or 0.
    """

    shape: str
    us: float
    limit: str
    terms: dict[str, float]
    share: float = 0.0
    tflops: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Returns the numbers, rounded."""
        found = dataclasses.asdict(self) | {"us": round(self.us, 2)}
        found["share"], found["tflops"] = round(self.share, 3), round(self.tflops, 1)
        return found | {"terms": {name: round(us, 2) for name, us in self.terms.items()}}


def limit_of(terms: Mapping[str, float], timing: Timing) -> str:
    """Names the slowest part: memory, launches, or the inner loop's wait."""
    overlapping = max(terms["memory"], terms["compute"])
    rest = {name: us for name, us in terms.items() if name not in ("memory", "compute")}
    if sum(rest.values()) > overlapping:
        return "launches" if terms["launches"] >= max(rest.values()) else "latency"
    return "memory" if terms["memory"] >= terms["compute"] else limit_of_turn(timing)


def limit_of_turn(timing: Timing) -> str:
    """Names the pipe that the turns of a loop keep busy for more than 0.85 of their time, else latency."""
    names = {pipes.MEMORY: pipes.SHARED, pipes.MUFU: "issue", pipes.FMA: "issue", pipes.ALU: "issue"}
    pipe, busy = max(timing.busy.items(), key=lambda item: item[1])
    return names.get(pipe, pipe) if busy > 0.85 * timing.cycles else "latency"


def sum_of(terms: Mapping[str, float]) -> float:
    """Returns the time of terms together: memory and compute overlap."""
    rest = sum(us for name, us in terms.items() if name not in ("memory", "compute"))
    return max(terms["memory"], terms["compute"]) + rest


@dataclasses.dataclass(frozen=True)
class Merge:
    """How segments of pairs are merged.

    Args:
      segments: read by one turn of its loop. shares: blocks of threads that share a pair.
      idle_blocks: of the grid, if only split pairs are merged; 0 if all are, each by separate blocks.
      loops: how often a block of threads runs this loop for a pair.
    """

    segments: int
    shares: int
    idle_blocks: int
    loops: int = 1

    def cycles(self, machine: Machine, work: lists.Stretches, chip: Chip) -> float:
        """Cycles of the whole grid."""
        merged = [count for count in work.of_pair if count > 1 or not self.idle_blocks]
        count = max(len(merged) * self.shares, self.idle_blocks)
        blocks = min(machine.resident, -(-count // chip.num_cores))
        # The segments have just been written, and lie in the L2.
        turn = machine.simulated("turn", chip, blocks, chip.l2_latency)
        arrival = chip.l2_latency + chip.tma_latency if count_copies(machine.parts.turn) else 0
        cycles = max(turn.cycles, (arrival + turn.held) / machine.parts.stages)
        fixed = arrival + sum(machine.once(part, chip, blocks, chip.l2_latency) for part in ("before", "after"))
        durations = [fixed + cycles * self.loops * -(-n // self.segments) for n in merged for _ in range(self.shares)]
        idle = [fixed] * (count - len(durations))
        return lists.makespan(durations + idle, blocks * chip.num_cores)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of few queries per row over a list of work, and the merge of its segments.

    piece_bytes: of keys and values of TILE_KV tokens of one kv head, with scales. num_workers: that work is cut for.
    merge: of segments. kernels: names of both kernels.
    """

    num_kv_heads: int
    piece_bytes: float
    num_workers: int
    merge: Merge
    kernels: tuple[str, str]

    def predict(self, machines: Mapping[str, Machine], chip: Chip) -> list[Prediction]:
        return [self.of_shape(name, lengths, machines, chip) for name, lengths in lists.DECODE.items()]

    def num_bytes(self, lengths: Sequence[int]) -> float:
        """Returns the bytes of keys and values that rows of these lengths read."""
        return sum(lists.stretches(lengths, self.num_kv_heads, self.num_workers).pieces) * self.piece_bytes

    def of_shape(self, name: str, lengths: Sequence[int], machines: Mapping[str, Machine], chip: Chip) -> Prediction:
        """Predicts rows of these lengths."""
        work = lists.stretches(lengths, self.num_kv_heads, self.num_workers)
        machine, merge = (machines[kernel] for kernel in self.kernels)
        timing, start, compute, end = walk(machine, work, chip)
        num_bytes = sum(work.pieces) * self.piece_bytes
        terms = {
            "memory": num_bytes / chip.read_bytes_per_s * 1e6,
            "compute": chip.us(compute),
            "start and end": chip.us(start + end),
            "merge": chip.us(self.merge.cycles(merge, work, chip)),
            "launches": chip.launch_us * 2,
        }
        us = sum_of(terms)
        share = num_bytes / (us * 1e-6) / chip.copy_bytes_per_s
        return Prediction(name, us, limit_of(terms, timing), terms, share)


def walk(machine: Machine, work: lists.Stretches, chip: Chip) -> tuple[Timing, float, float, float]:
    """Cycles of the workers of a list: of a turn, before the first one, of all turns of the slowest worker, after."""
    blocks = min(machine.resident, -(-len(work.pieces) // chip.num_cores))
    parts, timing = machine.parts, machine.turn(chip, blocks)
    # A copy is asked for `stages` turns before its data is needed, when its place has been read.
    turn = max(timing.cycles, (chip.loaded_latency + timing.held) / parts.stages)
    start = machine.once("before", chip, blocks, chip.dram_latency) + chip.dram_latency + chip.tma_latency
    end = machine.once("after", chip, blocks, chip.l1_latency)
    # Without a loop around it, each segment has a separate block of threads.
    around = machine.once("around", chip, blocks, chip.l1_latency) - timing.cycles if parts.around else start + end
    each = (n * turn + segments * max(around, 0) for n, segments in zip(work.pieces, work.segments))
    return timing, start, lists.makespan(each, blocks * chip.num_cores), end


class Model(Protocol):
    """Predicts the shapes of one program from its kernels, by name."""

    def predict(self, machines: Mapping[str, Machine], chip: Chip) -> list[Prediction]: ...

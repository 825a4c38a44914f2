"""Runs the instructions of one turn over and over on a scheduler of a multiprocessor, in order, and counts cycles.

A warpgroup has one warp on each of the four schedulers, and all four do the same: so one scheduler is simulated, with a
warp of each warpgroup. Fixed latencies are the compiler's own stall counts. Variable ones are from `pipes`, awaited
by scoreboards as in the code. Data from memory is always ready: memory time is another term of the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pallas_kernels.speed import pipes
from pallas_kernels.speed.chip import Chip
from pallas_kernels.speed.meetings import Meetings, waits
from pallas_kernels.speed.sass import Instruction
from pallas_kernels.speed.supply import Supply


@dataclasses.dataclass(frozen=True)
class Timing:
    """Cycles of one turn of all warps of a scheduler.

    Args:
      held: from a wait for a copy to the request for the next copy into the same place, at most; 0 without.
      busy: cycles in which each pipe is in use, "issue" among them.
    """

    cycles: float
    held: float
    busy: dict[str, float]


@dataclasses.dataclass
class _Warp:
    """A warp on its way: its next instruction and turn, when it may go on, and its wait."""

    block: int
    number: int  # of the block's warps
    ready: float
    at: int = 0
    issued: float = -1.0  # when its last instruction was
    scoreboards: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 6)
    products: float = 0.0  # end of the last wgmma
    groups: list[float] = dataclasses.field(default_factory=list)  # ends of those that are committed together
    copies: list[float] = dataclasses.field(default_factory=list)  # the same of cp.async
    waited: float | None = None
    held: float = 0.0
    ends: list[float] = dataclasses.field(default_factory=list)  # of turns


def simulate(
    turn: Sequence[Instruction],
    chip: Chip,
    *,
    warps: int = 1,
    blocks: int = 1,
    turns: int = 12,
    load_latency: float | None = None,
    beside: Sequence[Instruction] = (),
) -> Timing:
    """Simulates turns until they are steady.

    Args:
      beside: turn of one more warp of each block, which makes operands for the others; none where a copy does.
      warps: of a block of threads on one scheduler. blocks: of threads on the multiprocessor.
      turns: number of simulated turns; the first third of them does not count.
      load_latency: of loads from global memory; by default as if found in the L1.
    """
    load = chip.l1_latency if load_latency is None else load_latency
    programs = [turn] * warps + ([beside] if beside else [])
    uses = [[pipes.use(i, chip, load) for i in program] for program in programs]
    supply = Supply(turn, beside) if beside else None
    # They start apart, as copies do not arrive for all of them at once.
    apart = sum(i.stall for i in turn) / (warps * blocks)
    size = len(programs)
    every = [_Warp(n // size, n % size, (n // size * warps + n % size % warps) * apart) for n in range(size * blocks)]
    meetings = [Meetings(turn, warps) for _ in range(blocks)]
    free: defaultdict[str, float] = defaultdict(float)
    busy: defaultdict[str, float] = defaultdict(float)
    gathered: dict[tuple[int, int, int], list[_Warp]] = {}
    now, running = 0.0, list(every)

    def earliest(w: _Warp) -> float:
        makes = w.number == warps
        if supply is not None:
            *others, maker = ((x.at, len(x.ends)) for x in every[w.block * size : (w.block + 1) * size])
            if not (supply.may_make(*maker, others) if makes else supply.may_read(w.at, len(w.ends), maker)):
                return float("inf")
        of_block = None if makes else meetings[w.block]
        return _earliest(w, programs[w.number][w.at], uses[w.number][w.at], free, of_block)

    while running:
        # The one that can go on first; of several, the one that has waited longest.
        when, _, n = min((max(now, earliest(w)), w.issued, n) for n, w in enumerate(running))
        assert when < float("inf"), "the warps wait for each other"
        warp = running[n]
        program = programs[warp.number]
        instruction, used = program[warp.at], uses[warp.number][warp.at]
        now, warp.issued = when + 1, when
        begin = max(when, free[used.pipe]) if used.cycles else when
        # A wgmma whose operands come slower than it multiplies them takes as long as they do.
        free[used.pipe] = begin + (max(used.cycles, used.shared) if used.pipe == pipes.TENSOR else used.cycles)
        for pipe, cycles in (("issue", 1), (used.pipe, used.cycles), (pipes.SHARED, used.shared)):
            busy[pipe] += cycles
        warp.ready = when + max(instruction.stall, 1)
        _take_effect(warp, instruction, used, begin, when)
        if warp.number < warps:
            meetings[warp.block].issue(warp.number, warp.at, instruction, when)
        if warps > 1 and _meets_others(instruction):
            met = gathered.setdefault((warp.block, len(warp.ends), warp.at), [])
            met.append(warp)
            running.remove(warp)
            if len(met) == warps:
                for other in met:
                    other.ready = max(other.ready, when + pipes.BARRIER_LATENCY)
                running += met
        warp.at = (warp.at + 1) % len(program)
        if warp.at == 0:
            warp.ends.append(warp.ready)
            if len(warp.ends) == turns:
                running.remove(warp)
                if warp.number < warps:
                    meetings[warp.block].leave(warp.number)
    skipped = max(turns // 3, 1)
    cycles = max(w.ends[-1] - w.ends[skipped - 1] for w in every) / (turns - skipped)
    used_up = {pipe: cycles / turns for pipe, cycles in busy.items() if cycles}
    # Loads and products of matrices share the shared memory in turns too short to simulate.
    return Timing(max(cycles, *used_up.values()), max(w.held for w in every), used_up)


def _meets_others(instruction: Instruction) -> bool:
    """True if an instruction is a barrier of more threads than one warpgroup's."""
    if not instruction.opcode.startswith("BAR.SYNC"):
        return False
    threads = re.search(r", 0x([0-9a-f]+)$", instruction.operands.strip())
    return threads is None or int(threads.group(1), 16) > 128


def _earliest(
    warp: _Warp, instruction: Instruction, used: pipes.Use, free: Mapping[str, float], meetings: Meetings | None
) -> float:
    """When a warp may issue its next instruction."""
    opens = 0.0
    if meetings is not None and (warp.at == 0 or waits(instruction)):
        opens = meetings.open(warp.number, warp.at if waits(instruction) else -1, warp.at == 0 and not warp.ends)
    when = max(opens, warp.ready, *(warp.scoreboards[n] for n in range(6) if instruction.waits >> n & 1), 0.0)
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        when = max(when, _until_left(warp.groups, instruction))
    elif instruction.name == "DEPBAR":
        when = max(when, _until_left(warp.copies, instruction))
    if used.cycles and used.pipe != pipes.TENSOR:  # tensor cores have a queue, loads and stores a short one
        when = max(when, free[used.pipe] - (pipes.READ_LATENCY if used.pipe == pipes.MEMORY else 0))
    return when


def _until_left(ends: Sequence[float], instruction: Instruction) -> float:
    """When as few groups are under way as an instruction waits for."""
    left = int(instruction.operands.rsplit("0x", 1)[-1], 16) if "0x" in instruction.operands else 0
    return ends[len(ends) - 1 - left] if len(ends) > left else 0.0


def _take_effect(warp: _Warp, instruction: Instruction, used: pipes.Use, begin: float, when: float) -> None:
    name = instruction.name
    if pipes.wgmma(instruction):
        warp.products = max(begin + max(used.cycles, used.shared), warp.products)
        if "gsb" in instruction.operands:
            warp.groups.append(warp.products + pipes.WGMMA_LATENCY)
    elif name == "BAR":
        warp.ready = max(warp.ready, when + pipes.BARRIER_LATENCY)
    elif name == "SYNCS" and "PHASECHK" in instruction.opcode:
        warp.waited = when
    elif name == "UTMALDG" and warp.waited is not None:
        warp.held = max(warp.held, when - warp.waited)
    elif name == "LDGDEPBAR":
        warp.copies.append(when)  # data is always there
    for n, cycles in ((instruction.writes, used.cycles + used.latency), (instruction.reads, pipes.READ_LATENCY)):
        if n is not None:
            warp.scoreboards[n] = max(warp.scoreboards[n], begin + cycles)

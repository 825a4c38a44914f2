"""Pipes that a machine instruction of Hopper occupies, and for how long. Knows opcodes and rates, no kernels."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from pallas_kernels.speed.chip import Chip
from pallas_kernels.speed.sass import Instruction

TENSOR, SHARED, MUFU, FMA, ALU, UNIFORM, MEMORY, CONTROL = (
    "tensor",
    "shared memory",
    "mufu",
    "fma",
    "alu",
    "uniform",
    "load and store",
    "control",
)

_FMA = frozenset("FADD FMUL FFMA HADD2 HFMA2 HMUL2".split())
_IMAD = frozenset("IMAD IDP".split())
_MUFU = frozenset("MUFU F2I I2F F2F FRND POPC FLO".split())
_UNIFORM = frozenset("R2UR S2UR VOTEU REDUX".split())
_LOADS = frozenset("LDS LDSM LDG LD LDGSTS".split())
_STORES = frozenset("STS STSM STG ST".split())
_SHARED = frozenset("LDS LDSM STS STSM SHFL LDGSTS".split())
_CONTROL = frozenset(
    "NOP BRA BAR SYNCS DEPBAR WARPGROUP WARPSYNC EXIT BSSY BSYNC ELECT MEMBAR FENCE S2R CS2R LDC ULDC LDGDEPBAR ERRBAR "
    "UTMALDG UTMASTG UTMACMDFLUSH UTMAPF USETMAXREG NANOSLEEP CALL RET YIELD CCTL UBLKCP".split()
)
# Cycles until a result is ready, for instructions that signal it by scoreboard. Shared memory: Hopper. Others assumed,
# from measurements of earlier architectures: arXiv:1804.06826 and arXiv:2208.11174.
_LATENCY = {"MUFU": 23, "SHFL": 24, "LDS": 29, "LDSM": 33, "LDC": 30, "S2R": 20, "S2UR": 20, "SYNCS": 20, "R2UR": 10}
_LATENCY |= {"MEMBAR": 20, "FENCE": 20}
OTHER_LATENCY = 20
# Until operands in registers are read, or an order is taken.
READ_LATENCY = 12
# Latency of a barrier that all threads have reached, and from the end of a wgmma until a warp goes on. Assumed.
BARRIER_LATENCY, WGMMA_LATENCY = 20, 40


class Use(NamedTuple):
    """Cost of one instruction of a warp.

    cycles: of a pipe of its scheduler. shared: of shared memory, if each of the four schedulers has a warp that does
    the same. latency: from its end until its result is ready.
    """

    pipe: str
    cycles: float
    shared: float = 0.0
    latency: float = OTHER_LATENCY


class Wgmma(NamedTuple):
    """Shape of a wgmma 64 x n x k and the bytes that it reads of shared memory."""

    n: int
    k: int
    shared_bytes: int

    @property
    def flops(self) -> int:
        return 2 * 64 * self.n * self.k


@functools.cache
def wgmma(instruction: Instruction) -> Wgmma | None:
    """Returns the shape of a wgmma; None for other instructions."""
    match = re.match(r"([HQI])GMMA\.(?:SP\.)?64x(\d+)x(\d+)", instruction.opcode)
    if match is None:
        return None
    n, k = int(match.group(2)), int(match.group(3))
    size = 2 if match.group(1) == "H" else 1
    from_registers = re.match(r"R\d+, R\d+,", instruction.operands) is not None
    return Wgmma(n, k, (0 if from_registers else 64 * k * size) + n * k * size)


def width(instruction: Instruction) -> int:
    """Returns the bytes that each thread loads or stores."""
    opcode = instruction.opcode
    if instruction.name in ("LDSM", "STSM"):  # matrices of 8 x 8 of 16 bits
        return 4 * int(opcode[-1]) if opcode[-1].isdigit() else 4
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((sizes[part] for part in opcode.split(".")[1:] if part in sizes), 4)


def pipe(instruction: Instruction) -> str:
    """Returns the pipe that executes an instruction."""
    name = instruction.name
    if wgmma(instruction) or name in ("HMMA", "IMMA", "QMMA"):
        return TENSOR
    for members, where in _PIPES:
        if name in members:
            return where
    return UNIFORM if name in _UNIFORM or name.startswith("U") else ALU


_PIPES = ((_LOADS | _STORES | {"SHFL"}, MEMORY), (_FMA | _IMAD, FMA), (_MUFU, MUFU), (_CONTROL, CONTROL))
_CYCLES = {FMA: 1, MUFU: 8, CONTROL: 0, UNIFORM: 2, ALU: 2}


def use(instruction: Instruction, chip: Chip, load_latency: float) -> Use:
    """Returns the cost of an instruction. load_latency: cycles of a load from global memory."""
    name, where = instruction.name, pipe(instruction)
    latency = _LATENCY.get(name, _LATENCY["MUFU"] if where == MUFU else OTHER_LATENCY)
    if shape := wgmma(instruction):
        rate = chip.tensor_flops * (1 if name == "HGMMA" else 2)
        return Use(TENSOR, shape.flops / rate, shape.shared_bytes / chip.shared_bytes_per_cycle, 0)
    if where == TENSOR:
        flops = 2 * 16 * 8 * (16 if ".16816" in instruction.opcode else 8)
        return Use(TENSOR, flops / (chip.tensor_flops / chip.schedulers * chip.mma_sync), latency=33)
    if where == MEMORY:
        cycles = max(32 * width(instruction) / chip.shared_bytes_per_cycle * chip.schedulers, 1)
        latency = load_latency if name in ("LDG", "LD") else latency
        return Use(MEMORY, cycles, cycles if name in _SHARED else 0, latency)
    return Use(where, 2 if name in _IMAD else _CYCLES[where], latency=latency)

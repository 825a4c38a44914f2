"""Loads and stores of threads: ld, st, ldmatrix, stmatrix."""

from __future__ import annotations

import re

import numpy as np

from tests.emulator.arithmetic import LANES, TYPES
from tests.emulator.instructions import Compiler, Step
from tests.emulator.memory import GLOBAL_BASE, Trap
from tests.emulator.parser import Instruction


def _memory(c: Compiler, i: Instruction) -> Step:
    loads, parts = i.parts[0] == "ld", i.parts
    vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
    dtype = np.dtype(TYPES[parts[-1]])
    size = dtype.itemsize
    mask = c.mask(i)
    names = [x.strip() for x in i.operands[0 if loads else 1].strip("{}").split(",")]
    if any(p.startswith("param") for p in parts):
        where = i.operands[1].strip("[] ")
        name, _, offset = where.partition("+")
        write, index = c.write(names[0], i), list(c.program.params).index(name)
        if int(offset or 0) or vector > 1:
            raise NotImplementedError("parts of parameters")

        def load_param(warp):
            write(warp.registers, np.full(LANES, warp.block.params[index], np.uint64))

        return Step("memory", load_param)
    space = "shared" if any(p.startswith("shared") for p in parts) else "global" if "global" in parts else None
    address = c.address(i.operands[1 if loads else 0])
    writes = [c.write(x, i) for x in names] if loads else []
    reads = [] if loads else [c.read(x, parts[-1]) for x in names]

    def access(warp):
        registers = warp.registers
        where = address(registers)
        chosen = slice(None) if mask is None else np.nonzero(mask(registers))[0]
        where = where[chosen]
        if (where % (size * vector)).any():
            raise Trap(f"address {int(where[0]):#x} of {size * vector} bytes is not aligned")
        shared = space == "shared" or (space is None and not (where >= GLOBAL_BASE).any())
        if loads:
            data = np.zeros((LANES, size * vector), np.uint8)
            if shared:
                data[chosen] = warp.block.shared.load(where, size * vector, warp.index)
            else:
                data[chosen] = warp.block.memory.load(where, size * vector)
            data = data.view(dtype)
            for j, write in enumerate(writes):
                write(registers, np.ascontiguousarray(data[:, j]))
            return
        columns = [read(registers).reshape(LANES, 1) for read in reads]
        data = np.ascontiguousarray(np.concatenate(columns, axis=1)).view(np.uint8)[chosen]
        if shared:
            warp.block.shared.store(where, data, warp.index)
        else:
            warp.block.memory.store(where, data)

    return Step("memory", access)


def _matrix(c: Compiler, i: Instruction) -> Step:
    """ldmatrix and stmatrix: 8 x 8 matrices of 16 bits, whose rows are at the addresses of 8 threads each."""
    loads, parts = i.parts[0] == "ldmatrix", i.parts
    count = next(int(p[1:]) for p in parts if re.fullmatch(r"x\d", p))
    address = c.address(i.operands[1 if loads else 0])
    names = [x.strip() for x in i.operands[0 if loads else 1].strip("{}").split(",")]
    writes = [c.write(x, i) for x in names] if loads else []
    reads = [] if loads else [c.read(x, "b32") for x in names]

    def access(warp):
        where = address(warp.registers)
        for j in range(count):
            rows = where[8 * j : 8 * j + 8]
            if (rows % 16).any():
                raise Trap("a row of a matrix is not at a multiple of 16 bytes")
            if loads:
                matrix = warp.block.shared.load(rows, 16, warp.index).view(np.uint16)
                matrix = matrix.T if "trans" in parts else matrix
                writes[j](warp.registers, np.ascontiguousarray(matrix).view(np.uint32).reshape(LANES))
            else:
                matrix = reads[j](warp.registers).view(np.uint16).reshape(8, 8)
                matrix = np.ascontiguousarray(matrix.T) if "trans" in parts else matrix
                warp.block.shared.store(rows, np.ascontiguousarray(matrix).view(np.uint8), warp.index)

    return Step("memory", access)


FAMILIES = {"ld.": _memory, "st.": _memory, "ldmatrix": _matrix, "stmatrix": _matrix}

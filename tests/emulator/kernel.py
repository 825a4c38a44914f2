"""A kernel as it is started: its PTX, grid, threads and shared memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np

from tests.emulator import access, asynchronous
from tests.emulator.block import Block
from tests.emulator.instructions import Compiler
from tests.emulator.memory import Global
from tests.emulator.parser import parse
from tests.emulator.tma import TensorMap

Three = tuple[int, int, int]


class Kernel:
    """A kernel that can be run.

    Args:
      ptx: its text.
      grid, threads: blocks, and threads of each, along x, y and z.
      shared_bytes: dynamic shared memory of a block.

    Raises:
      NotImplementedError: an instruction is not modelled.
    """

    def __init__(self, ptx: str, *, grid: Three, threads: Three, shared_bytes: int):
        self.ptx, self.program = ptx, parse(ptx)
        self.name = self.program.name.removesuffix("_mosaic_gpu_kernel")
        self.grid, self.threads, self.shared_bytes = grid, threads, shared_bytes
        self.compiled = Compiler(self.program, access.FAMILIES | asynchronous.FAMILIES)

    def run(
        self,
        memory: Global,
        params: Sequence[int],
        *,
        tensor_maps: Mapping[tuple[int, int], TensorMap] | None = None,
        seed: int = 0,
    ) -> None:
        """Runs all blocks, one after another in random order.

        Args:
          params: numbers; any number for an array of bytes.
          tensor_maps: by the number of a parameter that is an array of bytes, and the offset in it.

        Raises:
          Trap: a kernel did something that the hardware does not define.
        """
        names = list(self.program.params)
        maps = {self.program.param_address(names[i]) + at: tensor for (i, at), tensor in (tensor_maps or {}).items()}
        x, y, z = map(range, self.grid)
        blocks = list(itertools.product(x, y, z))
        random.Random(seed).shuffle(blocks)
        with np.errstate(all="ignore"):
            for index in blocks:
                Block(self, index, memory, list(params), maps, seed).run()

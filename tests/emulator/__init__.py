"""An emulator of PTX for Hopper: runs Mosaic GPU kernels, as they are compiled, on a machine without a GPU.

jax's interpreter runs a kernel's source. This runs the compiler's output: the PTX that ptxas gets. It sees
layouts, swizzles, TMA boxes, descriptors, fences and barriers, which decide whether a kernel is right on hardware, and
stops with the kernel, block, warp and line of the PTX at behaviour that the hardware does not define.

    from tests import emulator
    out = emulator.run(jitted_function, *arrays)           # as jitted_function(*arrays), kernels in the emulator
    kernel = emulator.Kernel(text, grid=(1, 1, 1), threads=(128, 1, 1), shared_bytes=4096)   # PTX alone, without jax

`run` needs the extra aot-gpu (CUDA plugin and ptxas); everything else needs NumPy and ml_dtypes only.

Modelled: warps in random order, by a seed; mbarriers (arrivals, bytes, parity) and named barriers; TMA loads and stores
of boxes, out of bounds, swizzled by absolute address, carried out at random moments; wgmma with operands in shared
memory (K- and MN-major, 32, 64 and 128 bytes of swizzle) or in registers, carried out between issue and wait; ldmatrix
and stmatrix; fences between proxies; predicates; the arithmetic that kernels here use.

A `Trap` is raised by: a deadlock; more arrivals than a barrier counts; shared memory that threads wrote and that wgmma
or TMA touch without a fence.proxy.async; memory written while a wgmma or TMA copy reads it; accesses of two warps, or
of a warp and a copy, that no chain of barriers orders, even if this run was lucky; registers of a wgmma touched before
it was waited for, or after the last wgmma.fence before it; copies that complete on an mbarrier without a fence after
its initialisation; more registers than the block has, by setmaxnreg; tensor maps and addresses that the driver or
hardware would refuse; accesses outside of arrays; threads of a warp that part at a branch; kernels that end with copies
or products that were never waited for. Unwritten memory is NaN.

Not modelled: time; clusters and multicast; caches, weak memory order, races in global memory; blocks that wait for
each other; rounding of approximate instructions; one warp's threads going different ways. An instruction that is not
modelled is refused before the kernel runs.

Files: `parser` (text to instructions); `arithmetic`, `order`, `memory`, `barriers`, `tma`, `wgmma` (the machine);
`instructions`, `access`, `asynchronous` (an instruction to a function of a warp); `block` (warps and their order);
`kernel`; `host` (grid, parameters and tensor maps, from Mosaic GPU's dump); `program` (jax functions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.emulator.kernel import Kernel
from tests.emulator.memory import Global, Trap
from tests.emulator.tma import TensorMap

__all__ = ["Global", "Kernel", "TensorMap", "Trap", "run"]


def run(function: Callable, *args, target: str = "h200", seed: int = 0) -> Any:
    """Result of function(*args) on a GPU, by emulation of its Mosaic GPU kernels.

    Args:
      function: of arrays and trees of them. Kernels may be in jitted functions, not in loops or branches.
      target: GPU that is compiled for, of `aot.targets()`; a Hopper.
      seed: for the order of warps, copies and blocks of threads.

    Raises:
      Trap: a kernel did something that the hardware does not define; the message says where.
      NotImplementedError: something in the program or its PTX is not modelled.
      RuntimeError: the extra aot-gpu is not installed.
    """
    from tests.emulator import program  # imports jax, which the rest does not need

    return program.run(function, *args, target=target, seed=seed)

"""Runs one block of threads: its warps in random order, and what goes on by itself between them."""

from __future__ import annotations

import random

import numpy as np

from pallas_kernels.ptx import wgmma
from pallas_kernels.ptx.arithmetic import LANES, UNSIGNED
from pallas_kernels.ptx.barriers import MBarrier, NamedBarrier
from pallas_kernels.ptx.memory import SHARED_BASE, Shared, Trap

# How soon copies and products are carried out, in shares of the moments in which they could be: drawn for each block.
_HASTE = (1.0, 0.3, 0.02)


class Block:
    """One block of threads of a `Kernel`.

    Args:
      index: its coordinates in the grid.
      params: numbers of the kernel's parameters, addresses where they are arrays of bytes.
      tensor_maps: by address.
    """

    def __init__(self, kernel, index: tuple[int, int, int], memory, params: list[int], tensor_maps, seed):
        self.kernel, self.index, self.memory, self.params, self.tensor_maps = kernel, index, memory, params, tensor_maps
        self.random = random.Random(str((seed, index)))
        self.haste = self.random.choice(_HASTE)
        self.num_threads = int(np.prod(kernel.threads))
        self.shared = Shared(kernel.shared_bytes)
        self.barriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.loads: list = []  # copies under way and their barriers
        self.warps = [Warp(self, i) for i in range(self.num_threads // LANES)]

    def barrier(self, address: int) -> MBarrier:
        if address not in self.barriers:
            raise Trap(f"no mbarrier at byte {address - SHARED_BASE} of shared memory")
        return self.barriers[address]

    def run(self) -> None:
        """Runs all warps to their end.

        Raises:
          Trap: what happened, and where: kernel, block, warp and line of the PTX.
        """
        running = {warp: warp.run() for warp in self.warps}
        waiting: dict[Warp, tuple] = {}
        while running:
            if self.loads and self.random.random() < self.haste:
                self._deliver()
            ready = [warp for warp in running if warp not in waiting or waiting[warp][0]()]
            if not ready:
                if not self.loads:
                    said = "; ".join(f"warp {warp.index}, line {warp.line}, {waiting[warp][1]()}" for warp in running)
                    raise Trap(f"{self}: deadlock: {said}")
                self._deliver()
                continue
            warp = self.random.choice(ready)
            waiting.pop(warp, None)
            try:
                wait = next(running[warp])
            except StopIteration:
                del running[warp]
                continue
            if wait is not None:
                waiting[warp] = wait
        if self.loads:
            raise Trap(f"{self}: ends with {len(self.loads)} TMA loads under way")
        for barrier in self.barriers.values():
            if barrier.bytes:
                raise Trap(f"{self}: ends with {barrier.bytes} bytes missing at {barrier.place}")

    def _deliver(self) -> None:
        copy, barrier = self.loads.pop(self.random.randrange(len(self.loads)))
        try:
            barrier.deliver(copy.run(self.memory))
        except Trap as trap:
            raise Trap(f"{self}: {copy.who}: {trap}") from None

    def __str__(self) -> str:
        return f"{self.kernel.name}, block {self.index[0] if not any(self.index[1:]) else self.index}"


class Warp:
    """32 threads. Registers that nobody has written hold NaN."""

    def __init__(self, block: Block, index: int):
        self.block, self.index, self._position = block, index, 0
        compiled = block.kernel.compiled
        self.registers = [_poison(compiled.width(name)) for name in compiled.places]
        for name, values in self._special().items():
            if name in compiled.places:
                self.registers[compiled.places[name]] = values
        self.products, self.stores = Products(self), Stores(self)

    @property
    def line(self) -> int:
        return self.block.kernel.program.instructions[self._position].line

    def _special(self) -> dict[str, np.ndarray]:
        lanes = np.arange(LANES, dtype=np.uint32)
        x, y, z = self.block.kernel.threads
        thread = lanes + np.uint32(LANES * self.index)
        numbers = {
            "%laneid": lanes,
            "%warpid": self.index,
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
        }
        for axis, size, index, threads in zip("xyz", self.block.kernel.grid, self.block.index, (x, y, z)):
            numbers |= {f"%ctaid.{axis}": index, f"%nctaid.{axis}": size, f"%ntid.{axis}": threads}
            numbers |= {f"%clusterid.{axis}": index, f"%nclusterid.{axis}": size}
            numbers |= {f"%cluster_ctaid.{axis}": 0, f"%cluster_nctaid.{axis}": 1}
        numbers |= {"%cluster_ctarank": 0, "%cluster_nctarank": 1}
        return {name: np.full(LANES, x, np.uint32) for name, x in numbers.items()}

    def run(self):
        """A generator that yields wherever other warps may come first: None, or two functions: whether it can go
        on, and what it waits for."""
        steps, registers, random, position = (
            self.block.kernel.compiled.steps,
            self.registers,
            self.block.random.random,
            0,
        )
        try:
            while True:
                kind, run, target = steps[position]
                self._position = position
                position += 1
                if kind == "plain":
                    run(registers)
                elif kind == "memory":
                    run(self)
                    if random() < 0.1:
                        yield None
                elif kind == "branch":
                    if run(registers):
                        position = target
                    if random() < 0.1:
                        yield None
                elif kind == "waits":
                    yield from run(self)
                    if random() < 0.3:
                        yield None
                elif run(registers):
                    break
            self.products.end()
            self.stores.end()
        except Trap as trap:
            instruction = self.block.kernel.program.instructions[self._position]
            raise Trap(f"{self.block}, warp {self.index}, line {instruction.line}: {instruction}: {trap}") from None


def _poison(width: int) -> np.ndarray:
    if width == 1:
        return np.zeros(LANES, bool)
    return np.full(LANES, (1 << (width - 1)) - 1, UNSIGNED[width // 8])


class _Groups:
    """What a warp has issued: in groups, the oldest first, and what belongs to none yet."""

    def __init__(self, warp: Warp):
        self.warp, self.groups, self.open = warp, [], []

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def end(self) -> None:
        if self.open or any(self.groups):
            raise Trap(f"the warp ends with {self.kind} under way that it has not waited for")

    kind = ""


class Stores(_Groups):
    """Copies to global memory."""

    kind = "TMA stores"

    def __init__(self, warp: Warp):
        super().__init__(warp)
        self._under_way: set = set()

    def issue(self, copy) -> None:
        self.open.append(copy)
        self._under_way.add(copy)
        if self.warp.block.random.random() < self.warp.block.haste:
            self._run(copy)

    def _run(self, copy) -> None:
        if copy in self._under_way:
            copy.run(self.warp.block.memory)
            self._under_way.discard(copy)

    def wait(self, keep: int) -> None:
        while len(self.groups) > keep:
            for copy in self.groups.pop(0):
                self._run(copy)
                copy.finish()


class Products(_Groups):
    """wgmmas. Their results are in no register until they have been waited for."""

    kind = "wgmmas"

    def __init__(self, warp: Warp):
        super().__init__(warp)
        self._results: dict[tuple, np.ndarray] = {}
        self._waiting: list[wgmma.Product] = []

    def issue(self, product: wgmma.Product) -> None:
        shared, registers = self.warp.block.shared, self.warp.registers
        for granules in product.reads:
            shared.begin_read(granules, "a wgmma")
        if product.result not in self._results:
            self._results[product.result] = wgmma.from_accumulators([registers[p] for p in product.result])
            for place in product.result:
                registers[place] = _poison(32)
        self.open.append(product)
        self._waiting.append(product)
        if self.warp.block.random.random() < self.warp.block.haste:
            self._run_all()

    def _run_all(self) -> None:
        for product in self._waiting:
            self._results[product.result] = product.run(self.warp.block.shared.data, self._results[product.result])
        self._waiting.clear()

    def wait(self, keep: int) -> None:
        self._run_all()
        while len(self.groups) > keep:
            for product in self.groups.pop(0):
                for granules in product.reads:
                    self.warp.block.shared.end_read(granules)
        busy = {product.result for group in (*self.groups, self.open) for product in group}
        for result in [r for r in self._results if r not in busy]:
            for place, bits in zip(result, wgmma.to_accumulators(self._results.pop(result))):
                self.warp.registers[place] = bits

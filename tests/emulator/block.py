"""Runs one block of threads: its warps in random order, and asynchronous work between them."""

from __future__ import annotations

import functools
import operator
import random

import numpy as np

from tests.emulator import wgmma
from tests.emulator.arithmetic import LANES, UNSIGNED
from tests.emulator.barriers import MBarrier, NamedBarrier
from tests.emulator.memory import SHARED_BASE, Shared, Trap
from tests.emulator.order import Clocks, knows, owner

# Speed of copies and products, as shares of the moments in which they could complete: drawn for each block.
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
        num_warps = self.num_threads // LANES
        self.clocks = Clocks(num_warps, kernel.program.num_mbarriers)
        self.shared = Shared(kernel.shared_bytes, self.clocks)
        self.barriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.loads: list = []  # copies under way, their barriers and moments
        self.free_registers = 0  # that setmaxnreg has given back
        self.warps = [Warp(self, i) for i in range(num_warps)]

    def run(self) -> None:
        """Runs all warps to their end.

        Raises:
          Trap: an undefined behaviour, and its place: kernel, block, warp and line of the PTX.
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
        for barrier in self.barriers.values():
            if self.clocks.told[:, barrier.column].max() < barrier.loads:
                raise Trap(f"{self}: ends with a TMA load that no warp has waited for at {barrier.place}")
            if barrier.bytes:
                raise Trap(f"{self}: ends with {barrier.bytes} bytes missing at {barrier.place}")

    def _deliver(self) -> None:
        copy, barrier, moment = self.loads.pop(self.random.randrange(len(self.loads)))
        try:
            barrier.deliver(copy.run(self.memory), moment)
        except Trap as trap:
            raise Trap(f"{self}: {copy.who}: {trap}") from None

    def __str__(self) -> str:
        return f"{self.kernel.name}, block {self.index[0] if not any(self.index[1:]) else self.index}"


class Warp:
    """32 threads. Unwritten registers hold NaN."""

    def __init__(self, block: Block, index: int):
        self.block, self.index, self._position = block, index, 0
        compiled = block.kernel.compiled
        self.registers = [_poison(compiled.width(name)) for name in compiled.places]
        for name, values in self._special().items():
            if name in compiled.places:
                self.registers[compiled.places[name]] = values
        self.told = block.clocks.told[index]
        self.num_registers = compiled.program.num_registers
        self.products, self.stores = Products(self), Stores(self)
        self._unfenced: list[MBarrier] = []

    def go_on(self) -> None:
        """Begins a new moment: warps that know the last one know nothing of later events."""
        self.told[self.index] = self.block.clocks.next(self.index)

    def make_barrier(self, address: int, count: int) -> None:
        barriers = self.block.barriers
        column = barriers[address].column if address in barriers else len(self.block.warps) + len(barriers)
        if column == len(self.told):
            raise NotImplementedError("mbarriers that are initialised in a loop")
        barriers[address] = MBarrier(address, count, int(self.told[self.index]), column, len(self.told))
        self._unfenced.append(barriers[address])

    def barrier(self, address: int) -> MBarrier:
        """The mbarrier at an address, of whose initialisation this warp knows."""
        if address not in self.block.barriers:
            raise Trap(f"no mbarrier at byte {address - SHARED_BASE} of shared memory")
        barrier = self.block.barriers[address]
        if not knows(self.told, np.array(barrier.made)):
            raise Trap(f"{barrier.place} is used without a barrier since warp {owner(barrier.made)} has initialised it")
        return barrier

    def fence_barriers(self) -> None:
        """Lets copies complete on mbarriers that this warp has initialised."""
        for barrier in self._unfenced:
            barrier.fenced = True
        self._unfenced.clear()

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
        """A generator that yields wherever other warps may come first: None, or two functions: the condition to go
        on, and the name of the wait."""
        steps, registers, products = self.block.kernel.compiled.steps, self.registers, self.products
        random, position = self.block.random.random, 0
        try:
            while True:
                kind, run, target, touched = steps[position]
                self._position = position
                position += 1
                if touched:
                    products.touch(touched)
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


@functools.cache
def _poison(width: int) -> np.ndarray:
    """Initial content of registers of a width: one array for all, as none is changed in place."""
    nan = np.zeros(LANES, bool) if width == 1 else np.full(LANES, (1 << (width - 1)) - 1, UNSIGNED[width // 8])
    nan.flags.writeable = False
    return nan


class _Groups:
    """Issued operations of a warp: in groups, the oldest first, and the ones that belong to none yet."""

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
    """wgmmas. Until they have been waited for they own their registers: no other instruction touches these.

    `busy`: registers of those that run, `unfenced`: those that were touched since the last wgmma.fence, as bits.
    """

    kind = "wgmmas"

    def __init__(self, warp: Warp):
        super().__init__(warp)
        self._results: dict[tuple, np.ndarray] = {}
        self._waiting: list[wgmma.Product] = []
        self._busy, self._unfenced = 0, -1  # nothing has been fenced yet

    def touch(self, registers: int) -> None:
        """An instruction reads or writes registers of products."""
        if registers & self._busy:
            names = self.warp.block.kernel.compiled.products_names(registers & self._busy)
            raise Trap(f"{names[0]} is touched while a wgmma runs that has it")
        self._unfenced |= registers

    def fence(self) -> None:
        self._unfenced = 0

    def issue(self, product: wgmma.Product) -> None:
        shared, registers = self.warp.block.shared, self.warp.registers
        if late := product.touched & self._unfenced:
            names = self.warp.block.kernel.compiled.products_names(late)
            raise Trap(f"no wgmma.fence since {names[0]} was touched")
        for granules in product.reads:
            shared.begin_read(granules, "a wgmma", self.warp.index)
        if product.result not in self._results:
            self._results[product.result] = wgmma.from_accumulators([registers[p] for p in product.result])
        self._busy |= product.touched
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
                    self.warp.block.shared.end_read(granules, self.warp.index)
        running = [product for group in (*self.groups, self.open) for product in group]
        self._busy = functools.reduce(operator.or_, (product.touched for product in running), 0)
        busy = {product.result for product in running}
        for result in [r for r in self._results if r not in busy]:
            for place, bits in zip(result, wgmma.to_accumulators(self._results.pop(result))):
                self.warp.registers[place] = bits

"""Instructions that wait or start asynchronous work: barriers, bulk copies, wgmma, proxy fences."""

from __future__ import annotations

import re

import numpy as np

from tests.emulator import wgmma
from tests.emulator.arithmetic import LANES
from tests.emulator.barriers import NamedBarrier
from tests.emulator.instructions import Compiler, Step
from tests.emulator.memory import GRANULE, Trap
from tests.emulator.parser import Instruction, split
from tests.emulator.tma import RowCopy, TensorCopy

EVERY_LANE = np.ones(LANES, bool)


def _lanes(c: Compiler, i: Instruction):
    mask = c.mask(i)
    return (lambda registers: EVERY_LANE) if mask is None else mask


def _mbarrier(c: Compiler, i: Instruction) -> Step:
    what, lanes = i.parts[1], _lanes(c, i)
    if what == "init":
        place, count = c.address(i.operands[0]), c.read(i.operands[1], "u32")

        def init(warp):
            chosen = np.nonzero(lanes(warp.registers))[0]
            if len(chosen):
                where = int(place(warp.registers)[chosen[0]])
                warp.make_barrier(where, int(count(warp.registers)[chosen[0]]))

        return Step("memory", init)
    if what == "inval":
        return Step("plain", lambda registers: None)
    if what in ("try_wait", "test_wait") and "parity" in i.parts:
        result = c.write(i.operands[0], i)
        place, parity = c.uniform(i.operands[1], "the address of an mbarrier"), c.uniform(i.operands[2], "a parity")

        def wait(warp):
            barrier, wanted = warp.barrier(place(warp.registers)), parity(warp.registers) & 1
            if what == "try_wait":
                while not barrier.passed(wanted):
                    yield lambda: barrier.passed(wanted), lambda: f"waits for parity {wanted} of {barrier}"
            if barrier.passed(wanted):
                barrier.meeting.tell(warp.told)
            result(warp.registers, np.full(LANES, barrier.passed(wanted)))

        return Step("waits", wait)
    if (
        what not in ("arrive", "expect_tx")
        or "noComplete" in i.parts
        or i.operands[0].startswith("[") != (what == "expect_tx")
    ):
        raise NotImplementedError(i.op)
    operands = i.operands[what == "arrive" :]
    place = c.uniform(operands[0], "the address of an mbarrier")
    number = c.read(operands[1], "u32") if len(operands) > 1 else None
    expects = "expect_tx" in i.parts

    def arrive(warp):
        chosen = lanes(warp.registers)
        if not chosen.any():
            return
        barrier = warp.barrier(place(warp.registers))
        numbers = None if number is None else number(warp.registers)[chosen].astype(np.int64)
        total = 0 if numbers is None else int(numbers.sum())
        if what == "expect_tx":
            barrier.arrive(warp.told, 0, total)
        elif expects:
            barrier.arrive(warp.told, int(chosen.sum()), total)
        else:
            barrier.arrive(warp.told, int(chosen.sum()) if numbers is None else total)
        warp.go_on()

    return Step("memory", arrive)


def _bar(c: Compiler, i: Instruction) -> Step:
    if "sync" not in i.parts:
        raise NotImplementedError(i.op)
    which = c.uniform(i.operands[0], "the number of a barrier")
    threads = c.uniform(i.operands[1], "the threads of a barrier") if len(i.operands) > 1 else None

    def sync(warp):
        block = warp.block
        number = which(warp.registers)
        if number not in block.named:
            block.named[number] = NamedBarrier(len(warp.told))
        barrier = block.named[number]
        phase = barrier.phase
        barrier.arrive(warp.told, block.num_threads if threads is None else threads(warp.registers))
        warp.go_on()
        while barrier.phase == phase:
            yield lambda: barrier.phase != phase, lambda: f"waits at bar.sync {number} with {barrier.arrived} threads"
        barrier.meeting.tell(warp.told)

    return Step("waits", sync)


def _fence(c: Compiler, i: Instruction) -> Step:
    def fence(warp):
        warp.fence_barriers()
        if "proxy" in i.parts:
            warp.block.shared.fence(warp.index)

    return Step("memory", fence)


def _setmaxnreg(c: Compiler, i: Instruction) -> Step:
    number = int(i.operands[0])
    if not 24 <= number <= 256 or number % 8:
        raise NotImplementedError(f"{number} registers for each thread")

    def change(warp):
        block, more = warp.block, number - warp.num_registers
        if (more < 0) != ("dec" in i.parts) and more:
            raise Trap(f"setmaxnreg of a warp that has {warp.num_registers} registers for each thread")
        while block.free_registers < more * LANES:
            yield (
                lambda: block.free_registers >= more * LANES,
                lambda: f"waits for {more} more registers for each thread, the block has {block.free_registers} left",
            )
        block.free_registers -= more * LANES
        warp.num_registers = number

    return Step("waits", change)


def _wgmma(c: Compiler, i: Instruction) -> Step:
    what = i.parts[1]
    if what == "fence":
        return Step("memory", lambda warp: warp.products.fence())
    if what == "commit_group":
        return Step("memory", lambda warp: warp.products.commit())
    if what == "wait_group":
        keep = int(i.operands[0])

        def wait(warp):
            yield None
            warp.products.wait(keep)

        return Step("waits", wait)
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", i.parts[-4])
    if what != "mma_async" or shape is None or i.parts[-3] != "f32":
        raise NotImplementedError(i.op)
    n, depth = map(int, shape.groups())
    dtype = wgmma.DTYPES[i.parts[-2]]
    if i.parts[-1] != i.parts[-2]:
        raise NotImplementedError("factors of two types")
    result, a, b, keep, *numbers = i.operands
    names = [x.strip() for x in result.strip("{}").split(",")]
    places = tuple(map(c.place, names))
    in_registers = a.startswith("{")
    a_names = [x.strip() for x in a.strip("{}").split(",")] if in_registers else []
    a_places = list(map(c.place, a_names))
    a_descriptor = None if in_registers else c.uniform(a, "the descriptor of A", "b64")
    b_descriptor = c.uniform(b, "the descriptor of B", "b64")
    kept = c.read(keep, "pred")
    signs, turned = (int(numbers[0]), int(numbers[1])), [int(x) for x in numbers[2:]]
    a_turned, b_turned = (False, *turned) if in_registers else turned or (0, 0)
    size = np.dtype(dtype).itemsize
    touched = c.products_mask([*names, *a_names])

    def multiply(warp):
        registers, row = warp.registers, warp.index % 4 * 16
        b_shape = (b_descriptor(registers), n, depth, bool(b_turned), size)
        reads = [wgmma.granules(*b_shape)]
        if a_descriptor is None:
            rows = wgmma.from_fragments([registers[p] for p in a_places], dtype)
        else:
            a_shape = (a_descriptor(registers), 64, depth, bool(a_turned), size)
            rows = wgmma.addresses(*a_shape)[row : row + 16]
            reads.append(np.unique(rows // GRANULE))
        product = wgmma.Product(
            places,
            rows,
            a_descriptor is not None,
            wgmma.addresses(*b_shape),
            dtype,
            bool(kept(registers)[0]),
            signs,
            reads,
            touched,
        )
        warp.products.issue(product)

    return Step("memory", multiply)


def _bulk(c: Compiler, i: Instruction) -> Step:
    if "commit_group" in i.parts:
        return Step("memory", lambda warp: warp.stores.commit())
    if "wait_group" in i.parts:
        keep = int(i.operands[0])

        def wait(warp):
            yield None
            warp.stores.wait(keep)

        return Step("waits", wait)
    if any(p in i.op for p in (".reduce", ".multicast", ".im2col", ".gather", ".scatter", ".prefetch")):
        raise NotImplementedError(i.op)
    lanes, tensor = _lanes(c, i), "tensor" in i.parts
    load = "shared::cluster.global" in i.op or "shared::cta.global" in i.op
    operands = list(i.operands)
    barrier = c.address(operands[3 if not tensor else 2]) if load else None
    shared, array = operands[:2] if load else operands[1::-1]
    shared_address = c.address(shared)
    if tensor:
        descriptor, corner = split(array.strip()[1:-1])
        map_address = c.read(descriptor, "u64")
        corners = [c.read(x.strip(), "s32") for x in corner.strip("{} ").split(",")][::-1]
    else:
        address, count = c.address(array), c.read(operands[2], "u32")

    def copy(warp):
        chosen = np.nonzero(lanes(warp.registers))[0]
        if not len(chosen):
            return
        if len(chosen) > 1:
            raise Trap(f"{len(chosen)} threads of a warp issue the same copy")
        lane, registers, block = chosen[0], warp.registers, warp.block
        where, who = int(shared_address(registers)[lane]), f"a TMA {'load' if load else 'store'}"
        moment = target = None
        if barrier is not None:
            target = warp.barrier(int(barrier(registers)[lane]))
            if not target.fenced:
                raise Trap(f"{who} completes on {target.place}, which was initialised without a fence after it")
            moment = target.loads = block.clocks.next(target.column)
        if tensor:
            at = int(map_address(registers)[lane])
            if at not in block.tensor_maps:
                raise Trap(f"{who} with a tensor map at {at:#x}, where there is none")
            position = tuple(int(x(registers)[lane]) for x in corners)
            issued = TensorCopy(who, block.tensor_maps[at], position, where, block.shared, warp.index, moment)
        else:
            number = int(count(registers)[lane])
            issued = RowCopy(who, int(address(registers)[lane]), where, number, block.shared, warp.index, moment)
        if target is None:
            warp.stores.issue(issued)
        else:
            block.loads.append((issued, target, moment))

    return Step("memory", copy)


FAMILIES = {
    "mbarrier.": _mbarrier,
    "bar.": _bar,
    "barrier.": _bar,
    "fence.proxy.async": _fence,
    "fence.mbarrier_init": _fence,
    "setmaxnreg.": _setmaxnreg,
    "wgmma.": _wgmma,
    "cp.async.bulk": _bulk,
}

"""Reads Mosaic GPU's host code before it starts a kernel: grid, parameters and tensor maps.

Mosaic GPU compiles a host function for each kernel, in MLIR's LLVM dialect, and leaves its text in the log of passes of
MOSAIC_GPU_DUMP_TO. The function has no branches: it makes tensor maps of buffers and starts the kernel. It is carried
out here on symbols in place of addresses. Knows no jax.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tests.emulator.tma import TensorMap

# Constants of mosaic_gpu_init_tma_desc: bits of an element by the number of its type.
_ELEMENT_BITS = {8: 2, 0: 4, 1: 8, 2: 16, 3: 32, 4: 64, 5: 16, 6: 32, 7: 16, 9: 32, 10: 64}
# Swizzles by CUtensorMapSwizzle, and by bytes, where 16 is none.
_SWIZZLES = {0: 0, 16: 0, 1: 32, 2: 64, 3: 128, 32: 32, 64: 64, 128: 128}
# Functions that start a kernel: up to jax 0.11, and since 0.12, where it is described first.
_LAUNCHES = ("mosaic_gpu_launch_kernel", "mosaic_gpu_build_kernel_spec")
_COPIES = (
    "builtin.unrealized_conversion_cast",
    "llvm.ptrtoint",
    "llvm.inttoptr",
    "llvm.trunc",
    "llvm.sext",
    "llvm.zext",
    "llvm.bitcast",
    "llvm.addrspacecast",
)
_SIZES = {"i64": 8, "!llvm.ptr": 8, "i32": 4, "i8": 1}


@dataclasses.dataclass(frozen=True)
class Pointer:
    """To a byte of a region: "buffer 3" is the fourth array of the call, inputs before outputs."""

    region: str
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Contents:
    """All bytes of a region, as a value."""

    region: str


@dataclasses.dataclass(frozen=True)
class TensorMapOf:
    """A tensor map of a buffer whose address is not yet known."""

    buffer: int
    offset: int
    fields: dict[str, Any]

    def at(self, address: int) -> TensorMap:
        return TensorMap(address=address + self.offset, **self.fields)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is started.

    Args:
      params: for each parameter the buffer and the offset in it; None for parameters that hold tensor maps.
      tensor_maps: by the number of a parameter and the offset in it.
    """

    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_bytes: int
    params: list[tuple[int, int] | None]
    tensor_maps: dict[tuple[int, int], TensorMapOf]


def read_launch(passes: str) -> Launch:
    """The launch in a log of Mosaic GPU's passes.

    Raises:
      ValueError: the log has none, or another version of Mosaic GPU wrote it in a way unknown here.
    """
    calls = list(re.finditer(rf"llvm\.call @({'|'.join(_LAUNCHES)})\(", passes))
    start = passes.rfind("llvm.func @", 0, calls[-1].start()) if calls else -1
    if start < 0:
        raise ValueError("no launch in the log of Mosaic GPU's passes; another version of jax?")
    signature, *lines = passes[start : passes.index("\n", calls[-1].start())].splitlines()
    host = _Host(re.findall(r"(%\w+): !llvm\.ptr", signature))
    for line in lines:
        host.run(re.sub(r"\s*loc\(.*\)\s*$", "", line).strip())
    assert host.launch is not None
    return host.launch


class _Host:
    """Carries the function out, a line at a time. The last of its arguments points to pointers to the buffers."""

    def __init__(self, arguments: list[str]):
        self.values: dict[str, Any] = {name: Pointer(f"argument {name}") for name in arguments}
        self.values[arguments[-1]] = Pointer("buffers")
        self.memory: dict[Pointer, Any] = {}
        self.maps: dict[Pointer, TensorMapOf] = {}
        self.launch: Launch | None = None

    def run(self, line: str) -> None:
        match = re.match(r"(?:(%\w+) = )?([\w.]+)\s*(.*)", line)
        if match is None:
            return
        result, operation, rest = match.groups()
        value = self._operation(operation, rest, result)
        if result:
            self.values[result] = value

    def _operation(self, operation: str, rest: str, result: str | None):
        names = re.findall(r"%\w+", rest)
        if operation == "llvm.mlir.constant":
            number = re.match(r"\((-?\d+|true|false)\b", rest)
            if number is None:
                return None
            return int(number.group(1)) if number.group(1).lstrip("-").isdigit() else int(number.group(1) == "true")
        if operation in ("llvm.mlir.undef", "llvm.mlir.poison", "llvm.mlir.zero"):
            return {}
        if operation == "llvm.alloca":
            return Pointer(f"alloca {result}")
        if operation in _COPIES:
            return self.values[names[0]]
        if operation == "llvm.insertvalue":
            where = re.match(r"%\w+, %\w+\[([\d, ]+)\]", rest)
            assert where, rest
            return self.values[names[1]] | {where.group(1): self.values[names[0]]}
        if operation == "llvm.extractvalue":
            where = re.match(r"%\w+\[([\d, ]+)\]", rest)
            assert where, rest
            return self.values[names[0]][where.group(1)]
        if operation == "llvm.getelementptr":
            return self._element(rest)
        if operation == "llvm.store":
            self.memory[self.values[names[1]]] = self.values[names[0]]
            return None
        if operation == "llvm.load":
            pointer = self.values[names[0]]
            if pointer.region == "buffers":
                return Pointer(f"buffer {pointer.offset // 8}")
            return self.memory.get(pointer, Contents(pointer.region))
        if operation in ("llvm.add", "llvm.mul", "llvm.sub"):
            a, b = self.values[names[0]], self.values[names[1]]
            if isinstance(a, Pointer):
                return Pointer(a.region, a.offset + b)
            return {"llvm.add": a + b, "llvm.sub": a - b, "llvm.mul": a * b}[operation]
        if operation == "llvm.call":
            return self._call(rest, [self.values[name] for name in names])
        if operation in ("llvm.mlir.addressof", "llvm.return"):
            return None
        raise ValueError(f"{operation} in a host function of Mosaic GPU; another version of jax?")

    def _element(self, rest: str) -> Pointer:
        match = re.match(r"(?:[a-z|]+ )?(%\w+)\[([^\]]*)\] : .*-> !llvm\.ptr, (.*)$", rest)
        if match is None:
            raise ValueError(f"llvm.getelementptr {rest}: another version of jax?")
        pointer = self.values[match.group(1)]
        indices = [self.values[x] if x.startswith("%") else int(x) for x in match.group(2).split(", ")]
        if len(indices) == 2:  # fields of a structure lie far apart, so that their sizes do not matter
            return Pointer(f"{pointer.region} field {indices[1]}")
        return Pointer(pointer.region, pointer.offset + indices[0] * _SIZES[match.group(3)])

    def _array(self, pointer: Pointer, count: int) -> list[int]:
        return [self.memory[Pointer(pointer.region, pointer.offset + 8 * i)] for i in range(count)]

    def _call(self, rest: str, values: list[Any]):
        if rest.startswith("@mosaic_gpu_init_tma_desc"):
            where, base, kind, rank, sizes, strides, swizzle, box = values
            self.maps[where] = _tensor_map(
                base, kind, self._array(sizes, rank), self._array(strides, rank), swizzle, self._array(box, rank)
            )
            return None
        if rest.startswith("@mosaic_gpu_launch_kernel"):
            # Before the stream, jax 0.11 has one number more.
            _, *numbers, _, params = values
        elif rest.startswith("@mosaic_gpu_build_kernel_spec"):
            _, *numbers, _, params, _ = values
        else:
            raise ValueError(f"llvm.call {rest.split('(')[0]} in a host function of Mosaic GPU: not modelled")
        grid, cluster, threads, shared_bytes = numbers[:3], numbers[3:6], numbers[6:9], numbers[9]
        if any(n > 1 for n in cluster):
            raise NotImplementedError(f"clusters of {cluster} blocks")
        found, maps = [], {}
        while (pointer := self.memory.get(Pointer(params.region, 8 * len(found)))) is not None:
            value = self.memory.get(pointer, Contents(pointer.region))
            if isinstance(value, Contents):
                at = {(len(found), where.offset): x for where, x in self.maps.items() if where.region == value.region}
                maps |= at
                found.append(None)
            else:
                found.append((int(value.region.split()[1]), value.offset))
        self.launch = Launch(tuple(grid), tuple(threads), shared_bytes, found, maps)
        return None


def _tensor_map(base: Pointer, kind: int, shape, strides, swizzle: int, box) -> TensorMapOf:
    bits = _ELEMENT_BITS[kind]
    packed = max(1, 8 // bits)  # the driver gets bytes for smaller elements
    fields = {
        "shape": (*shape[:-1], shape[-1] // packed),
        "strides": (*(s // packed for s in strides[:-1]), strides[-1]),
        "box": (*box[:-1], box[-1] // packed),
        "element_bytes": max(1, bits // 8),
        "swizzle": _SWIZZLES[swizzle],
    }
    return TensorMapOf(int(base.region.split()[1]), base.offset, fields)

"""Arithmetic of PTX on registers of a warp: arrays of 32 numbers in, one out. Knows no memory and no control flow.

Approximate instructions (ex2, lg2, rcp, rsqrt, tanh, div.full) give correctly rounded results, and float32 numbers
that are subnormal stay so: the hardware may differ by what PTX allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

LANES = 32
TYPES = {
    "pred": np.bool_,
    "s8": np.int8,
    "u8": np.uint8,
    "b8": np.uint8,
    "s16": np.int16,
    "u16": np.uint16,
    "b16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "b32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
    "b64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FLOATS = ("f16", "bf16", "f32", "f64", "e4m3", "e5m2")

Function = Callable[..., np.ndarray]


def operation(parts: Sequence[str]) -> tuple[list[str], Function] | None:
    """Types of the sources of an instruction and its function; None if it is not arithmetic.

    Args:
      parts: of the instruction's name: ("add", "s32").
    """
    name, kind = parts[0], parts[-1]
    if name == "setp":
        if len(parts) > 3 and parts[2] in ("and", "or", "xor"):
            combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[parts[2]]
            compare = _comparison(parts[1], kind)
            return [kind, kind, "pred"], lambda x, y, p: combine(compare(x, y), p)
        return [kind, kind], _comparison(parts[1], kind)
    if name == "selp":
        return [kind, kind, "pred"], lambda x, y, p: np.where(p, x, y)
    if name == "cvt":
        return _conversion(parts)
    if name == "mov" or name == "cvta":
        return [kind], lambda x: x
    if name in ("mul", "mad") and parts[1] == "wide":
        wide = TYPES[kind[0] + str(2 * int(kind[1:]))]
        if name == "mul":
            return [kind, kind], lambda x, y: x.astype(wide) * y.astype(wide)
        return [kind, kind, kind[0] + str(2 * int(kind[1:]))], lambda x, y, z: x.astype(wide) * y.astype(wide) + z
    if name == "mul" and parts[1] == "hi":
        bits = int(kind[1:])
        wide = TYPES[kind[0] + "64"]
        return [kind, kind], lambda x, y: (x.astype(wide) * y.astype(wide) >> wide(bits)).astype(x.dtype)
    if name in ("shl", "shr"):
        return [kind, "u32"], _shift(name == "shl", kind)
    if name in ("bfe", "prmt", "lop3", "bfi", "popc", "clz", "brev"):
        return _bits(name, kind)
    if name not in _ARITHMETIC:
        return None
    function, count = _ARITHMETIC[name]
    if name in ("min", "max") and kind in ("f32", "f16", "bf16") and "NaN" not in parts:
        function = np.fmin if name == "min" else np.fmax
    if kind == "pred" and name == "not":
        function = np.logical_not
    if name in ("div", "rem"):
        function = _division(name, kind)
    if kind in ("bf16x2", "f16x2", "bf16", "f16"):
        function = _half(function, kind.removesuffix("x2"))
    elif "sat" in parts:
        exact = function
        function = lambda *xs: np.clip(np.nan_to_num(exact(*xs)), 0, 1)  # noqa: E731
    return [kind] * count, function


def _fma(x, y, z):
    if x.dtype == np.float32:  # products are exact in float64, so they are rounded once but for rarest cases
        return (x.astype(np.float64) * y + z).astype(np.float32)
    return x * y + z


_ARITHMETIC: dict[str, tuple[Function, int]] = {
    "add": (np.add, 2),
    "sub": (np.subtract, 2),
    "mul": (np.multiply, 2),
    "fma": (_fma, 3),
    "mad": (_fma, 3),
    "min": (np.minimum, 2),
    "max": (np.maximum, 2),
    "div": (np.divide, 2),
    "rem": (np.remainder, 2),
    "neg": (np.negative, 1),
    "abs": (np.abs, 1),
    "and": (np.bitwise_and, 2),
    "or": (np.bitwise_or, 2),
    "xor": (np.bitwise_xor, 2),
    "not": (np.invert, 1),
    "ex2": (np.exp2, 1),
    "lg2": (np.log2, 1),
    "sqrt": (np.sqrt, 1),
    "rcp": (lambda x: x.dtype.type(1) / x, 1),
    "rsqrt": (lambda x: x.dtype.type(1) / np.sqrt(x), 1),
    "tanh": (np.tanh, 1),
    "sin": (np.sin, 1),
    "cos": (np.cos, 1),
    "copysign": (lambda x, y: np.copysign(y, x), 2),
}


def _half(function: Function, kind: str) -> Function:
    """16-bit numbers: computed in float64 and rounded once."""
    return lambda *xs: function(*(x.astype(np.float64) for x in xs)).astype(TYPES[kind])


def _comparison(name: str, kind: str) -> Function:
    compare = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "lo": np.less,
        "ls": np.less_equal,
        "hi": np.greater,
        "hs": np.greater_equal,
    }
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        ordered = compare[name[:-1]]
        return lambda x, y: ordered(x, y) | np.isnan(x) | np.isnan(y)
    if name == "ne" and kind in _FLOATS:  # of NumPy it is true for NaN
        return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
    return compare[name]


def _division(name: str, kind: str) -> Function:
    if kind in _FLOATS:
        return np.divide

    def divide(x, y):  # truncated, not floored; by zero all bits are ones
        zero = y == 0
        safe = np.where(zero, 1, y).astype(y.dtype)
        quotient = x // safe
        quotient += ((x % safe != 0) & ((x < 0) != (safe < 0))).astype(x.dtype)
        result = quotient if name == "div" else x - quotient * safe
        return np.where(zero, np.array(-1).astype(x.dtype), result)

    return divide


def _shift(left: bool, kind: str) -> Function:
    bits = int(kind[1:])

    def shift(x, count):  # counts beyond the width count as the width
        over = count >= bits
        count = np.where(over, 0, count).astype(x.dtype)
        if left:
            return np.where(over, 0, x << count).astype(x.dtype)
        emptied = np.where(x < 0, -1, 0) if kind[0] == "s" else 0
        return np.where(over, emptied, x >> count).astype(x.dtype)

    return shift


def _bits(name: str, kind: str) -> tuple[list[str], Function]:
    unsigned = TYPES["b" + kind[1:]]
    if name == "bfe":

        def extract(x, start, length):
            mask = (unsigned(1) << np.minimum(length, int(kind[1:]) - 1).astype(unsigned)) - unsigned(1)
            return (x >> start.astype(unsigned)) & mask

        def extract_signed(x, start, length):  # a field that ends inside of the number
            width = int(kind[1:])
            left = x << (width - start - length).astype(x.dtype)
            return left >> (width - length).astype(x.dtype)

        return [kind, "u32", "u32"], extract_signed if kind[0] == "s" else extract
    if name == "bfi":

        def insert(x, y, start, length):
            mask = ((unsigned(1) << length.astype(unsigned)) - unsigned(1)) << start.astype(unsigned)
            return (y & ~mask) | ((x << start.astype(unsigned)) & mask)

        return [kind, kind, "u32", "u32"], insert
    if name == "prmt":

        def permute(x, y, selector):
            both = np.concatenate([np.ascontiguousarray(v).view(np.uint8).reshape(LANES, 4) for v in (x, y)], axis=1)
            nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
            chosen = np.take_along_axis(both, (nibbles & np.uint32(7)).astype(np.int64), axis=1)
            signs = np.where(chosen & 128, 255, 0).astype(np.uint8)
            return np.where(nibbles & 8, signs, chosen).astype(np.uint8).view(np.uint32).reshape(LANES)

        return ["b32"] * 3, permute
    if name == "lop3":

        def look_up(x, y, z, table):
            number, result = int(table[0]), np.zeros(LANES, np.uint32)
            for i in range(8):
                if number >> i & 1:
                    result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
            return result

        return ["b32"] * 4, look_up
    if name == "brev":
        raise NotImplementedError(name)
    count = (lambda n: bin(n).count("1")) if name == "popc" else (lambda n: int(kind[1:]) - n.bit_length())
    return [kind], lambda x: np.array([count(int(n)) for n in x], np.uint32)


def _conversion(parts: Sequence[str]) -> tuple[list[str], Function]:
    to, source = parts[-2:]
    single = to.removesuffix("x2")
    if to in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2") and source == "f32":
        # The first source becomes the upper half.
        return [source] * 2, lambda upper, lower: np.stack(
            [_rounded(lower, single, parts), _rounded(upper, single, parts)], 1
        )
    if to.endswith("x2") or source.endswith("x2"):
        return [source], lambda x: x.astype(TYPES[single])
    if source in _FLOATS and to not in _FLOATS:
        rounding = next((f for p, f in _ROUNDINGS.items() if p in parts), np.trunc)
        limits = np.iinfo(TYPES[to])

        def to_integer(x):
            x = np.clip(np.nan_to_num(rounding(x.astype(np.float64)), nan=0.0), float(limits.min), float(limits.max))
            # For 64 bits the largest float64 is one too large.
            return np.where(x >= float(limits.max), limits.max, x.astype(TYPES[to])).astype(TYPES[to])

        return [source], to_integer
    if source in _FLOATS and to == source:
        rounding = next((f for p, f in _ROUNDINGS.items() if p in parts), None)
        return [source], (lambda x: rounding(x).astype(x.dtype)) if rounding else (lambda x: x)
    if to in _FLOATS:
        return [source], lambda x: _rounded(x, to, parts)
    if "sat" in parts:
        limits = np.iinfo(TYPES[to])
        return [source], lambda x: np.clip(x, limits.min, limits.max).astype(TYPES[to])
    return [source], lambda x: x.astype(TYPES[to])


_ROUNDINGS: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _rounded(x, to: str, parts: Sequence[str]):
    """To nearest; other roundings are refused."""
    if any(p in ("rz", "rm", "rp", "rna", "rs") for p in parts):
        raise NotImplementedError(".".join(parts))
    if "satfinite" in parts:
        largest = float(ml_dtypes.finfo(TYPES[to]).max)
        x = np.clip(x, -largest, largest)
    return np.maximum(x, 0).astype(TYPES[to]) if "relu" in parts else x.astype(TYPES[to])

"""Makes tests/golden/gguf_blocks.npz: random blocks of every type of GGUF tensor, and their values by the package gguf.

In an environment of its own: pip install gguf==0.19.0; python tests/golden/make_gguf_blocks.py (a second)

For a type T, "T.blocks" has uint8 [blocks, bytes] and "T.values" float32 [blocks, values]. All bytes are random, and so
are scales: of either sign, subnormal ones too, but finite; the first block is zero, and the second has all bits set
elsewhere. gguf 0.19.0 made the committed file.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Where the float16 numbers are in a block.
HALVES = {"F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,)}
HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


def finite_halves(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random bits of float16 numbers below 2 ** 15; every eighth is subnormal."""
    bits = rng.integers(0, 2**16, count, np.uint16)
    bits[bits & 0x7C00 >= 0x7800] &= 0x83FF
    bits[::8] &= 0x83FF
    return bits.astype("<u2").view(np.uint8).reshape(-1, 2)


def main() -> None:
    rng, stored = np.random.default_rng(36), {}
    for name, places in HALVES.items():
        kind = GGMLQuantizationType[name]
        num_values, num_bytes = GGML_QUANT_SIZES[kind]
        count = 6 if num_values == 256 else 20
        blocks = rng.integers(0, 256, (count, num_bytes), np.uint8)
        blocks[0], blocks[1] = 0, 255
        for at in places:
            blocks[1:, at : at + 2] = finite_halves(rng, count - 1)
        if name == "MXFP4":
            blocks[:, 0] = np.arange(count) * 13  # exponents from 0 to 247: the largest value is finite
        stored |= {f"{name}.blocks": blocks, f"{name}.values": dequantize(blocks, kind)}
    np.savez_compressed(Path(__file__).with_name("gguf_blocks.npz"), **stored)


if __name__ == "__main__":
    main()

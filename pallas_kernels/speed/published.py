"""Predictions of kernels that others have timed, beside the published times: the error of the model.

    python -m pallas_kernels.speed.published

jax's own attention for Hopper, attention_mgpu, in the two settings with public times of a close relative. The
relative also makes its mask, which its time includes, so the published rates are lower bounds of this kernel's.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import aot
from pallas_kernels.aot import check
from pallas_kernels.aot.check import Case
from pallas_kernels.speed.grids import Prefill

LENGTH, HEADS, HEAD_DIM = 4096, 16, 128
NAME = "jax attention_mgpu"


class Published(NamedTuple):
    """A published rate in TFLOP/s, its setting, and its source."""

    tflops: float
    of: str
    where: str


# By keys of a turn. Times in microseconds of one row of 4,096 tokens and 16 heads of 128, causal, forward, on an H100.
_FLOPS = 4 * HEADS * HEAD_DIM * LENGTH**2 / 2
_WHERE = "github.com/jax-ml/jax/pull/35114"
PUBLISHED = {
    128: Published(_FLOPS / 169.4e6, "splash attention on the same kernel, with its mask", _WHERE),
    64: Published(_FLOPS / 199.7e6, "splash attention on the same kernel, with its mask", _WHERE),
}


def cases(target: aot.Target) -> list[Case]:
    """The settings that have been published."""
    found = []
    for keys in PUBLISHED:
        model = Prefill(
            "entry", 128, HEADS, HEADS, HEAD_DIM, keys, keys, {"causal 4k": (LENGTH, LENGTH)}, longest_first=False
        )
        lower = functools.partial(_lower, keys=keys)
        found.append(Case(NAME, {"block_kv": keys}, lower, speed=model))
    return found


def _lower(target: aot.Target, *, keys: int) -> Any:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=keys, max_concurrent_steps=2, causal=True)
    x = jax.ShapeDtypeStruct((1, LENGTH, HEADS, HEAD_DIM), jnp.float16)
    return aot.lower(target, lambda q, k, v: attention_mgpu.attention(q, k, v, config), x, x, x)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns predicted beside published rates as a Markdown table."""
    lines = ["| kernel | predicted | published | predicted / published | published for |", "|---|---:|---:|---:|---|"]
    for row in rows:
        keys, predicted = row["config"]["block_kv"], row["predicted_tflops"]
        said = PUBLISHED[keys]
        cells = f"{predicted:.0f} TFLOP/s | {said.tflops:.0f} TFLOP/s | {predicted / said.tflops:.2f}"
        lines.append(f"| {NAME}, {keys} keys a turn | {cells} | {said.of}: {said.where} |")
    return "\n".join(lines)


def main() -> int:
    """The command. Exit status 1: a kernel was not compiled."""
    found = check.check("h200", sources=[f"{__spec__.name if __spec__ else __name__}:cases"], show=lambda line: None)
    rows = found["kernels"]
    for row in rows:
        if not row.get("predictions"):
            print(f"{row['name']}: {row['reason']}", file=sys.stderr)
            return 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Lower bounds of times: bytes over the bandwidth of memory, operations over the rate of matrix products; measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.dtypes import DTYPE_BYTES
from ksana_jax.core.processor import num_cores
from ksana_jax.devices.platforms import platform_of
from ksana_jax.kv.model_layout import layout_of

if TYPE_CHECKING:
    import jax

# Larger than any cache.
_READ_BYTES = 2**29
_WIDTH = 2048


class Rates(NamedTuple):
    """This machine's measured peaks: bytes read per second, and operations per second of matrix products in a dtype."""

    bytes_per_s: float
    flop_per_s: float


class WorkBound(NamedTuple):
    """Minimum cost of a workload: bytes read from memory, and operations."""

    num_bytes: float
    flop: float

    def seconds(self, rates: Rates) -> float:
        """Returns the larger of the two bounds."""
        return max(self.num_bytes / rates.bytes_per_s, self.flop / rates.flop_per_s)


def work_of(
    model: ModelConfig,
    dtype: str,
    prompts: Sequence[int],
    outputs: Sequence[int],
    weights_bytes: int | None = None,
) -> WorkBound:
    """Returns the minimum cost of greedy decoding of some requests at once, for any engine.

    Every output token but a request's first needs a step after the one before, which reads all weights once for all
    requests, and its own keys and values. Keys and values are counted in the dtype of weights.

    Args:
      prompts, outputs: tokens of each request.
      weights_bytes: bytes of weights that a step reads; None if all weights are in dtype.
    """
    from experiments.benches.tokens_in_forward import flop_per_token

    size = DTYPE_BYTES[dtype]
    weights = flop_per_token(model, 0) // 2 * size if weights_bytes is None else weights_bytes
    stored = layout_of(model, dtype=dtype, block_size=1).leaf("kv")
    kv_token = model.num_layers * stored.nbytes // stored.shape[0]
    seen = [sum(range(p + 1, p + n)) for p, n in zip(prompts, outputs, strict=True)]  # by the steps after the first
    attended = sum(sum(range(1, p + n)) for p, n in zip(prompts, outputs, strict=True))
    # The last token is sampled and never computed; of a prompt, only the last token needs logits.
    computed = sum(prompts) + sum(outputs) - len(outputs)
    head = 2 * model.vocab_size * model.d_model
    body = flop_per_token(model, 0) - head
    per_attended = 4 * model.num_layers * model.num_heads * model.head_dim
    flop = computed * body + sum(outputs) * head + attended * per_attended
    return WorkBound(max(outputs) * weights + sum(seen) * kv_token, flop)


def measure_rates(dtype: str, num_bytes: int = _READ_BYTES) -> Rates:
    """Measures the rates of this machine with all of its cores; takes some seconds.

    Args:
      num_bytes: that a host reads again and again: its caches may hold what a step reads.
    """
    import jax.numpy as jnp

    from ksana_jax.devices.capabilities import capabilities

    kind = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}[dtype]
    square = jnp.ones((_WIDTH, _WIDTH), kind)
    flop_per_s = 2 * _WIDTH**3 / _product_s(square, square)
    if not capabilities().shares_host_memory:
        return Rates(_device_bandwidth(), flop_per_s)
    weights = jnp.ones((-(-num_bytes // (_WIDTH * DTYPE_BYTES[dtype])), _WIDTH), kind)
    return Rates(max(_host_bandwidth(num_bytes), weights.nbytes / _product_s(square[:1], weights)), flop_per_s)


def _host_bandwidth(num_bytes: int) -> float:
    workers = num_cores()
    values = np.ones(num_bytes // 4, np.float32)
    parts = np.array_split(values, workers)
    with ThreadPoolExecutor(workers) as pool:
        return values.nbytes / _fastest(lambda: list(pool.map(np.sum, parts)))


def _device_bandwidth() -> float:
    import jax.numpy as jnp

    values = jnp.ones(_READ_BYTES // 4, jnp.float32)
    return _READ_BYTES / _fastest(lambda: jnp.sum(values).block_until_ready())


def _product_s(x: jax.Array, w: jax.Array) -> float:
    """Returns the time of x w^T by the fastest products here, of XLA or the engine's own."""
    import jax

    from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
    from ksana_jax.ops.weight_packing import pack

    found, platform = [], platform_of()
    for implementation in LINEAR_IMPLEMENTATIONS:
        if implementation.why_not(platform, x.dtype.name) is None:
            weights = pack(w) if implementation.packs else w
            multiply = functools.partial(jax.jit(implementation.load().linear), x, weights)
            found.append(_fastest(lambda multiply=multiply: multiply().block_until_ready()))
    return min(found)


def _fastest(work, repeats: int = 4) -> float:
    """Returns the shortest time of some calls after a first one: the machine's peak."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])

"""Bounds on the time of a step, computed from the model's shapes: operations over the peak rate, bytes over bandwidth.

Nothing is measured and nothing compiled. Weights are read once, and so are the keys and values that a tile of queries
sees; activations, which stay in caches for the most part, are not counted. Source: Williams et al., CACM 2009.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.loading.load import abstract_params
from ksana_jax.runner.planner.chips import Chip
from ksana_jax.scheduler.step.types import StepShape


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Bounds of one step on one chip.

    flops: of products with weights, of attention, and of the sampled tokens' logits. weight_bytes, kv_bytes: read, and
    keys and values also written. compute_s, memory_s: at the chip's peak rates.
    """

    flops: float
    weight_bytes: int
    kv_bytes: int
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The least time that the step can take, by both bounds."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s > self.memory_s else "memory"


def roofline(
    model: ModelConfig,
    shape: StepShape,
    chip: Chip,
    patterns: Sequence[AttentionPattern],
    *,
    dtype: str,
    kv_token_bytes: int,
    context: int,
    quantization: str | None = None,
) -> Roofline:
    """Computes the bounds of a step without padding: every tile is full, and ends a text of `context` tokens. Experts
    are read as if each of them were chosen equally often.

    Args:
      patterns: of each layer. kv_token_bytes: of one token in all layers.

    Raises:
      ConfigError: there is no published rate for the dtype.
    """
    if dtype not in chip.flops_per_s:
        raise ConfigError(f"{chip.name} has no published rate for {dtype}, only for {', '.join(chip.flops_per_s)}")
    params, stored = (abstract_params(model, dtype, q) for q in (None, quantization))
    # Norms with biases have two rows.
    whole, codes = ([x for x in jax.tree.leaves(p.layers) if x.ndim > 1 and x.shape[0] > 2] for p in (params, stored))
    of_token = 1 if model.experts is None else model.experts.num_chosen / model.experts.num_experts
    read = 1 - (1 - of_token) ** shape.num_tokens
    # Stacks of experts have three axes.
    matrices = sum(x.size * (of_token if x.ndim == 3 else 1) for x in whole)
    matrix_bytes = sum(x.size * x.dtype.itemsize * (read if x.ndim == 3 else 1) for x in codes)
    vocabulary = model.vocab_size * model.d_model
    itemsize = params.final_norm.dtype.itemsize
    attended, seen = _attended(model, patterns, shape, context)
    sampled = min(shape.max_sampled, shape.num_tiles)
    flops = 2 * shape.num_tokens * matrices + attended + 2 * sampled * vocabulary
    # One row of the embedding for each token; the head is read whole.
    weight_bytes = matrix_bytes + itemsize * (vocabulary + shape.num_tokens * model.d_model)
    num_stored = sum(layer.attention.own_kv for layer in model.layers)
    kv_bytes = round(kv_token_bytes * (seen / num_stored + shape.num_tokens))
    compute_s, memory_s = flops / chip.flops_per_s[dtype], (weight_bytes + kv_bytes) / chip.bytes_per_s
    return Roofline(flops, weight_bytes, kv_bytes, compute_s, memory_s)


def _attended(
    model: ModelConfig, patterns: Sequence[AttentionPattern], shape: StepShape, context: int
) -> tuple[float, float]:
    """Returns the operations of attention, and the tokens that tiles see, both summed over layers."""
    flops = seen = 0.0
    keys = np.arange(context)
    counts, of_layer = {}, len(patterns) // model.num_layers  # 1, or the kv heads that have patterns of their own
    for index, pattern in enumerate(patterns):
        spec = model.layers[index // of_layer].attention
        for count, width in shape.parts:
            if (pattern, width) not in counts:
                visible = np.asarray(pattern.visible(np.arange(context - width, context)[:, None], keys))
                counts[pattern, width] = int(visible.sum()), int(visible.any(axis=0).sum())
            pairs, any_seen = counts[pattern, width]
            # Two products of length head_dim for each pair of a query and a key, in each head.
            flops += count * pairs * 4 * spec.num_heads * spec.head_dim / of_layer
            seen += count * any_seen / of_layer
    return flops, seen

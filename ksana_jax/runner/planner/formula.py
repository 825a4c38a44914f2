"""The formula Mem = M + alpha * BS + beta * TN, and the largest batch, context and pool within a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ksana_jax.core.config import MAX_SEQS, MAX_TOKENS, ConfigError, ModelConfig
from ksana_jax.core.patterns import AttentionPattern, per_layer
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.state_layout import SLOTS_PER_ROW
from ksana_jax.loading.load import check_embedding_on_host
from ksana_jax.runner.planner.request import PlanRequest
from ksana_jax.runner.planner.step_memory import StepCost
from ksana_jax.runner.planner.terms import weights_bytes
from ksana_jax.sharding.shares import local_model


@dataclasses.dataclass(frozen=True)
class Memory:
    """The formula with everything but batch and context fixed; in bytes unless a name says tokens.

    layout: layout of a device's KV pool. step: memory of a compiled step.
    """

    weights: int
    layout: KVLayout
    request: PlanRequest
    budget: int
    step: StepCost

    @classmethod
    def of(cls, config: ModelConfig, asked: PlanRequest, budget: int, step: StepCost) -> Memory:
        """Returns the memory of a model under a request, on a device with `budget` bytes.

        Raises:
          ConfigError: model and request are incompatible.
        """
        config = local_model(config, asked.tensor_parallel_size)
        pattern = config.pattern
        if asked.window is not None:
            pattern = AttentionPattern(window=asked.window, num_sinks=asked.num_sinks)
        patterns = per_layer(pattern, config.num_layers)
        # The number of bytes is the same on every platform.
        layout = make_layout(config, patterns, asked.stored)
        if asked.prefix_share and any(g.live.window is not None and not g.residual for g in layout.groups):
            raise ConfigError(f"prefix_share is {asked.prefix_share}, but a window frees the shared prefix")
        if asked.embedding_device == "host":
            check_embedding_on_host(config)
        weights = weights_bytes(config, asked.dtype, asked.embedding_device, asked.quantization)
        return cls(weights, layout, asked, budget, step)

    @property
    def beta(self) -> int:
        """Bytes of a token's keys and values in all layers; with a block codec, of its codes."""
        return self.layout.token_bytes

    def tokens_held(self, batch: int, context: int) -> int:
        """Returns TN in whole blocks: every request holds the tokens its pattern keeps, and one computes a chunk."""
        r, size = self.request, self.request.block_size
        blocks = self.layout.blocks_of(context)
        of_chunk = self.layout.blocks_of(context, r.max_num_batched_tokens) - blocks
        # Exact tokens next to codes are at the end of a text, so they are never shared.
        shared = int(self.layout.num_lasting_groups * -(-context // size) * r.prefix_share)
        # A block holds its tokens in the layers of one group.
        return -(-size * (batch * (blocks - shared) + shared + of_chunk) // self.layout.num_lasting_groups)

    @property
    def state(self) -> int:
        """Bytes of a request's slots for states of recurrent layers, whatever its context is; 0 without any."""
        return self.layout.states.slot_bytes * SLOTS_PER_ROW if self.layout.states else 0

    def width(self, context: int) -> int:
        """Returns the width of a block table in blocks."""
        return self.layout.table_width(context, self.request.max_num_batched_tokens)

    def total(self, batch: int, context: int) -> int:
        step = self.step.bytes(batch, self.width(context))
        return self.weights + step + self.state * batch + self.beta * self.tokens_held(batch, context)

    def max_batch(self, context: int) -> int:
        return largest(MAX_SEQS, lambda batch: self.total(batch, context) <= self.budget)

    def max_context(self, batch: int) -> int:
        return largest(MAX_TOKENS, lambda context: self.total(batch, context) <= self.budget)

    def max_kv_tokens(self, batch: int, context: int) -> int:
        """Returns the tokens of the pool that fits the remaining memory, in whole blocks; with a block codec, in texts
        of `context` tokens."""
        left = self.budget - self.weights - self.step.bytes(batch, self.width(context)) - self.state * batch
        block = self.request.block_size
        return max(int(left // (self.layout.bytes_per_token(context) * block)), 0) * block


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number in [0, most] that fits, assuming that all smaller numbers fit too; 0 if 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low

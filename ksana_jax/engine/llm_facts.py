"""Facts that experiments read from an LLM: its pool, its records, its memory, a step as a function. Serves nothing."""

from __future__ import annotations

from collections.abc import Callable

import jax

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.metrics import StepRecord
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.distributed.replicas import Replicas
from ksana_jax.engine.engine import Engine
from ksana_jax.models.params import Params
from ksana_jax.runner.example import StepFunction, step_function
from ksana_jax.runner.logprobs import logprobs_function
from ksana_jax.runner.planner.engine import Compared, PoolPlan, usage
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepShape


class LLMFacts:
    """The facts of an `LLM`; see there."""

    config: EngineConfig
    engine: Engine
    memory_plan: PoolPlan
    replicas: Replicas
    runner: Runner
    _resident_before: int | None

    @property
    def num_compilations(self) -> int:
        """Number of functions compiled so far."""
        return sum(engine.executor.num_compilations for engine in self.replicas.engines)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def patterns(self) -> tuple[AttentionPattern, ...]:
        """The attention pattern of each layer."""
        return self.runner.patterns

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self.engine.scheduler.blocks.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of its group of layers."""
        return self.runner.layout.block_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers; with a block codec, of its codes."""
        return self.runner.layout.token_bytes

    def kv_bytes_per_token(self, num_tokens: int) -> float:
        """Returns the bytes per token of a sequence of num_tokens; with a block codec, of codes and exact tokens."""
        return self.runner.layout.bytes_per_token(num_tokens)

    @property
    def records(self) -> list[StepRecord]:
        """One record for each step since `clear_records`; of several replicas, one after the other."""
        return self.replicas.records

    def memory_usage(self) -> dict[str, Compared]:
        """Returns planned and measured bytes of weights, pool, a step and the peak; meaningful after `warm_up`."""
        return usage(self.memory_plan, self.runner, self._resident_before)

    def step_function(self, shape: StepShape | None = None, context: int | None = None) -> StepFunction:
        """Returns a step as a pure function with example arguments, for jax's own tools::

            step = llm.step_function()
            jax.make_jaxpr(step.function)(*step.arguments)
            jax.jit(step.function).lower(*step.arguments).compile().cost_analysis()

        Args:
          shape: sizes of the step, such as a key of `llm.runner.programs`; None takes a decode of max_num_seqs rows.
          context: tokens of each row, including the step's; None takes as many as the block tables hold and the
            pool has room for.

        Raises:
          ValueError: block tables of this shape do not hold such rows, or no shape does.
        """
        if shape is None:
            if (tokens := context or self.engine.max_model_len) > self.engine.max_model_len:
                raise ValueError(f"context is {tokens:,} tokens, max_model_len is {self.engine.max_model_len:,}")
            width = -(-tokens // self.config.block_size)
            shape = self.engine.builder.buckets.shape(self.config.max_num_seqs, (), width)
        return step_function(self.runner, shape, context)

    def logprobs_function(self) -> Callable[[Params, jax.Array], jax.Array]:
        """Returns a function that training differentiates and whose numbers are those that this engine samples by::

            logprobs = llm.logprobs_function()
            jax.grad(lambda params: logprobs(params, tokens)[0, -1, 7])(params)

        Returns:
          (params, tokens int32 [B, T]) -> float32 [B, T, V], log-probabilities of the token after each one. They equal
          those of requests bit by bit, whatever their batches, chunks and caches, once `update_weights` has given the
          engine the same weights (`load_model`'s, in the engine's dtype). The gradient is that of `dense_logits`.

        Raises:
          ConfigError: numerics is not "invariant", or what the engine computes depends on more than weights and tokens.
        """
        return logprobs_function(self.runner, self.config)

    def clear_records(self) -> None:
        for engine in self.replicas.engines:
            engine.records.clear()

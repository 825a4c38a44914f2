"""Floating-point operations of steps by definition: two for each multiply-add, whatever computes it."""

from __future__ import annotations

from typing import NamedTuple

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.params import num_active_params


class StepFlops(NamedTuple):
    """Operations of products with weights, scores and weighted sums; all else, and padding, counts none.

    token: of a token's products with weights, also of norms and biases. pair: of a token and one that it attends to, in
    all layers and heads. sampled: of the logits of one token.
    """

    token: float
    pair: float
    sampled: float

    @classmethod
    def of(cls, model: ModelConfig) -> StepFlops:
        """Returns the operations of a model; of experts, those that a token chooses."""
        table = model.vocab_size * model.d_model
        matrices = num_active_params(model) - table * (1 if model.tie_embeddings else 2)
        return cls(2.0 * matrices, 4.0 * model.num_layers * model.num_heads * model.head_dim, 2.0 * table)

    def count(self, num_tokens: int, num_attended: int, num_sampled: int) -> float:
        """Returns the operations of a step. num_attended: pairs of a token and one that it attends to."""
        return self.token * num_tokens + self.pair * num_attended + self.sampled * num_sampled

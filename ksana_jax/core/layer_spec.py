"""Specifications of a network's layers, as frozen values. Knows no arrays; the kinds are defined in `models/`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.recurrent import RecurrentSpec

SinkLogits = Literal["learned", "zero"]
QKNorm = Literal["head", "projection"]
# Norms of a layer by placement, fields of `models.params.LayerParams`; see `NormSpec`.
NORM_PLACEMENTS = {
    "before": ("attn_norm", "mlp_norm"),
    "after": ("post_attn_norm", "post_mlp_norm"),
    "both": ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm"),
    "parallel": ("attn_norm", "mlp_norm"),
    "parallel_shared": ("attn_norm",),
}
PARALLEL = ("parallel", "parallel_shared")
NormPlacement = Literal["before", "after", "both", "parallel", "parallel_shared"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, arXiv:2104.09864, and its scaled variants.

    Fields beyond `theta` belong to some kinds only, and are named as in Hugging Face's `rope_scaling`.
    original_max_len: context in tokens before scaling (dynamic, llama3, yarn, longrope).
    factors: divisors of the frequencies ("factors": the form in which GGUF has llama3; longrope: of sequences beyond
      original_max_len, arXiv:2402.13753). short_factors: of sequences up to it (longrope).
    partial_rotary_factor: part of a head's numbers that is rotated; the others keep their values at every position.
    "none" rotates nothing: such a layer tells positions apart by its mask alone (NoPE, arXiv:2305.19466).
    """

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors", "none"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_len: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0

    def dims(self, head_dim: int) -> int:
        """Returns how many of a head's numbers are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def problems(self, head_dim: int) -> list[str]:
        """Returns the problems of this rope for heads of an even number of rows, one sentence each."""
        numbers = {"rope theta": self.theta, "rope factor": self.factor}
        found = [checks.number(name, value, above=0) for name, value in numbers.items()]
        if self.kind in ("dynamic", "llama3", "yarn", "longrope") and not self.original_max_len:
            found.append(f"rope {self.kind!r} needs original_max_len")
        part = self.partial_rotary_factor
        if problem := checks.number("rope partial_rotary_factor", part, high=1, above=0):
            found.append(problem)
        elif isinstance(head_dim, int) and head_dim % 2 == 0:
            dims = self.dims(head_dim)
            if not dims or dims % 2:
                found.append(f"rope rotates {dims} of head_dim {head_dim} ({part}), must be an even number from 2")
            given = {"factors": [self.factors], "longrope": [self.factors, self.short_factors]}.get(self.kind, [])
            wrong = [len(factors) for factors in given if len(factors) != dims // 2]
            found += [f"rope has {n} factors, must have {dims // 2}, half of what it rotates" for n in wrong]
        divisors = (*self.factors, *self.short_factors)
        return [
            *filter(None, found),
            *filter(None, (checks.number("rope factor", value, above=0) for value in divisors)),
        ]


PLAIN_ROPE, NO_ROPE = RopeConfig(), RopeConfig("none")


@dataclasses.dataclass(frozen=True)
class IndexerSpec:
    """Specifies a lightning indexer, which chooses the tokens that a layer attends to (DeepSeek-V3.2, arXiv:2512.02556,
    section 2.1).

    A token has one key of head_dim numbers, and as a query num_heads vectors with a weight each. A query's score of a
    token is the sum over heads of weight * relu(vector . key); it attends to the top_k tokens with the highest. The
    first `LatentSpec.rotated` numbers of a vector and of a key are rotated, i with i + rotated / 2.

    eps: of the layer norm of keys.
    """

    num_heads: int
    head_dim: int
    top_k: int
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Specifies multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): a token's keys and values in
    all heads are products of one vector, its latent.

    The pool stores one vector of head_dim = rank + rotated numbers per token, key and value at once. A head's key is
    its matrix UK times the latent, followed by the rotated numbers, which all heads share; its value is UV times the
    latent. Queries are multiplied by UK instead, and attention's results by UV.

    rank: numbers of the latent, which has a norm of its own. rotated: numbers next to it that depend on the position.
    plain: numbers of a head's query that are not rotated; `rotated` more are. value: numbers of a head's value.
    query_rank: numbers of the vector that queries are products of; None if they are products of hidden states.
    interleaved: True if the rotation pairs 2 i with 2 i + 1 of the rotated numbers, not i with i + rotated / 2.
    eps: of the norms of latents and of that vector, whatever the model's `norm_eps` is.
    indexer: what chooses the tokens that a query attends to, from that vector; None if it attends to all.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int | None = None
    interleaved: bool = True
    eps: float = 1e-6
    indexer: IndexerSpec | None = None

    @property
    def head_dim(self) -> int:
        """Numbers of a token in the pool."""
        return self.rank + self.rotated

    def expanded(self, num_heads: int) -> int:
        """Returns how many numbers a token's keys and values of all heads are."""
        return num_heads * (self.plain + self.rotated + self.value)

    @property
    def expanded_dim(self) -> int:
        """Numbers of a head's key, or of its value if these are more."""
        return max(self.plain + self.rotated, self.value)

    @property
    def least_expanded(self) -> int | None:
        """Least queries of a text that attend to expanded keys and values in less time than to latents; None: never.

        A query and a key take 2 `expanded_dim` products in each head instead of 2 `head_dim`, and a key takes
        rank (plain + value) once. That pays from 171 queries on with DeepSeek's sizes; measured, from about 300 (C++,
        AVX-512, context of 2,048).
        """
        saved = 2 * (self.head_dim - self.expanded_dim)
        return -(-2 * self.rank * (self.plain + self.value) // saved) if saved > 0 and self.plain <= self.rank else None

    def problems(self, num_kv_heads: int, head_dim: int) -> list[str]:
        """Returns the problems of these numbers, and of the model's, one sentence each."""
        sizes = ("rank", "rotated", "plain", "value")
        found = [checks.integer(f"latent {name}", getattr(self, name)) for name in sizes]
        found += [checks.integer("latent query_rank", self.query_rank, optional=True)]
        for name in ("rank", "rotated"):
            value = getattr(self, name)
            found += [f"latent {name} is {value}, must be even"] * (isinstance(value, int) and value % 2)
        if (indexer := self.indexer) is not None:
            names = ("num_heads", "head_dim", "top_k")
            wrong = [checks.integer(f"indexer {name}", getattr(indexer, name)) for name in names]
            if not any((*found, *wrong)) and indexer.head_dim < self.rotated:
                wrong.append(
                    f"indexer head_dim is {indexer.head_dim}, must be at least {self.rotated}, what is rotated"
                )
            found += [*wrong, "an indexer needs latent query_rank" if self.query_rank is None else None]
        if (num_kv_heads, head_dim) != (1, self.head_dim):
            found += [f"num_kv_heads {num_kv_heads} and head_dim {head_dim} must be 1 and {self.head_dim} with latents"]
        return [*filter(None, found)]


def rotated_part(rank: int, rotated: int) -> float:
    """Returns the `RopeConfig.partial_rotary_factor` of latents, rounded up: its product is at least `rotated`."""
    return math.nextafter(rotated / (rank + rotated), 1)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Specifies the attention of one layer.

    pattern: positions that the layer was trained to see; an engine may use another pattern.
    scale: factor of the scores, applied before the soft cap.
    soft_cap: scores become cap * tanh(score / cap); None for no cap.
    sinks: a logit of each head in the softmax's denominator, without a key or a value, so that a head can attend to
      nothing. "learned" is a parameter (gpt-oss, arXiv:2508.10925); "zero" is fixed at 0, which gives
      exp(x_i) / (1 + sum_j exp(x_j)), softmax-off-by-one (arXiv:2309.17453, section 3.3); None for no such logit.
    qk_norm: norms of queries and keys before the rotation, each head separately ("head", Qwen3) or all heads of a token
      together ("projection", OLMo 2); None for none.
    alibi: slope of each head of the model, all devices' heads: a score gets slope * (position of the key - position of
      the query) added after the scale (arXiv:2108.12409); None for no such bias.
    own_kv: False for a layer that computes queries only, and attends to the keys and values of an earlier layer, see
      `ModelConfig.kv_layers`.
    latent: how keys and values follow from a latent; None if they are products of hidden states.
    out_gate: the result is multiplied by the sigmoid of a product of the layer's input (arXiv:2505.06708).
    query_growth: beta and length in tokens: queries are multiplied by 1 + beta * log(1 + floor(position / length)) (as
      released with Llama 4); None for no such factor.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    pattern: AttentionPattern
    scale: float
    soft_cap: float | None
    sinks: SinkLogits | None
    qkv_bias: bool
    out_bias: bool
    qk_norm: QKNorm | None
    alibi: tuple[float, ...] | None = None
    own_kv: bool = True
    latent: LatentSpec | None = None
    out_gate: bool = False
    query_growth: tuple[float, int] | None = None


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """Specifies the experts of one layer, MLPs among which a router chooses for each token (arXiv:2101.03961).

    num_experts: of the layer. num_chosen: of them for each token.
    normalised: the weights of a token's experts add up to 1: their softmax is over the chosen ones, not over all.
    shared_d_ff: width of an MLP that each token passes through as well; 0 for none. shared_gate: its result is
      multiplied by the sigmoid of a product.
    scoring: what turns the router's products into weights. choice_bias: numbers that are added to them for the choice
      alone (arXiv:2408.15664).
    num_groups: of experts, of which only the best groups_chosen are chosen from; a group is as good as the sum of its
      groups_by best experts.
    factor: of the weights.
    sigmoid_factor, limit: of clamped experts, see `models.experts.clamped`; None for no limit.
    plain_layers: layers of the model, counted from 0, with an MLP of kind `plain_mlp` and width `plain_d_ff` instead.
    """

    num_experts: int
    num_chosen: int
    normalised: bool = True
    shared_d_ff: int = 0
    sigmoid_factor: float = 1.0
    limit: float | None = None
    plain_layers: tuple[int, ...] = ()
    plain_mlp: str = "swiglu"
    plain_d_ff: int = 0
    shared_gate: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: bool = False
    num_groups: int = 1
    groups_chosen: int = 1
    groups_by: int = 1
    factor: float = 1.0

    def problems(self) -> list[str]:
        """Returns the problems of these numbers, one sentence each."""
        found = checks.integer("num_experts", self.num_experts), checks.integer("num_chosen", self.num_chosen)
        found += (checks.integer("shared_d_ff", self.shared_d_ff, 0),)
        found += (checks.integer("plain_d_ff", self.plain_d_ff, 1 if self.plain_layers else 0),)
        found += (checks.number("sigmoid_factor", self.sigmoid_factor, above=0),)
        found += (checks.number("limit", self.limit, above=0, optional=True),)
        found += (checks.number("factor", self.factor, above=0),)
        found += tuple(checks.integer(name, getattr(self, name)) for name in ("num_groups", "groups_chosen"))
        problems = [*filter(None, found)]
        if problems:
            return problems
        if self.num_experts % self.num_groups:
            problems.append(f"num_experts {self.num_experts} is not a multiple of num_groups {self.num_groups}")
        elif self.groups_chosen > self.num_groups:
            problems.append(f"groups_chosen {self.groups_chosen} is above num_groups {self.num_groups}")
        elif self.groups_by > self.num_experts // self.num_groups:
            problems.append(f"{self.num_groups} groups of {self.num_experts} experts have fewer than {self.groups_by}")
        elif self.num_chosen > (most := self.num_experts // self.num_groups * self.groups_chosen):
            problems.append(f"num_chosen {self.num_chosen} is above num_experts {most}")
        return problems


@dataclasses.dataclass(frozen=True)
class MLPSpec:
    """Specifies the MLP of one layer. kind: a name in `models.mlp.MLPS`. d_ff: width of its hidden vectors, or of each
    expert's."""

    kind: str
    d_ff: int
    bias: bool
    experts: ExpertsSpec | None = None


def mlp_specs(kind: str, d_ff: int, bias: bool, experts: ExpertsSpec | None, num_layers: int) -> list[MLPSpec]:
    """Returns the MLP of each layer."""
    specs = [MLPSpec(kind, d_ff, bias, experts)] * num_layers
    if experts is not None:
        plain = MLPSpec(experts.plain_mlp, experts.plain_d_ff, bias)
        specs = [plain if layer in experts.plain_layers else spec for layer, spec in enumerate(specs)]
    return specs


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """Specifies the norms of one layer.

    kind: a name in `models.layers.NORMS`. placement: whether the inputs of attention and MLP are normalised ("before"),
    their outputs before these are added ("after"), or "both". In "parallel" layers, attention and MLP both read the
    layer's input, each with its own norm before it (GPT-J, GPT-NeoX); "parallel_shared" has one norm for both.
    """

    kind: str
    eps: float
    placement: NormPlacement


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Specifies one layer: its attention, its MLP and its norms.

    residual_scale: factor of the outputs of attention and MLP when they are added to hidden states.
    recurrent: what the layer computes instead of attention; None if it attends.
    """

    attention: AttentionSpec
    mlp: MLPSpec
    norms: NormSpec
    residual_scale: float = 1.0
    recurrent: RecurrentSpec | None = None


def layer_indices(given: Any) -> tuple[int, ...]:
    """Returns the layers of `kv_full_precision_layers` in rising order, each once.

    Raises:
      ConfigError: a value is not a list of integers from 0.
    """
    if not isinstance(given, (list, tuple)) or any(checks.integer("layer", layer, 0) for layer in given):
        raise ConfigError(f"kv_full_precision_layers is {given!r:.60}, must be a list of layers, counted from 0")
    return tuple(sorted(set(given)))

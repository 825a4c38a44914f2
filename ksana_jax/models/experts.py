"""MLPs of experts: a router chooses a few of them for each token, and weights their results (arXiv:2101.03961).

Pairs of a token and an expert are sorted by expert and computed in blocks of rows of one expert, in a loop over the
blocks that a step has: an expert without a token is not read. On a CPU, `jax.lax.ragged_dot` took 10 to 40 times as
long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.layer_spec import ExpertsSpec, MLPSpec
from ksana_jax.models.mlp_forms import MLP, STATED, gated, gated_shapes

# Rows of a block at most; more make an expert's last block longer than its tokens.
MOST_ROWS = 64


# (gate x, up x, spec) -> an expert's hidden vectors; a function of single numbers.
Hidden = Callable[[jax.Array, jax.Array, ExpertsSpec], jax.Array]


def experts(function: Callable[[jax.Array], jax.Array], hidden: Hidden | None = None) -> MLP:
    """Returns an MLP of experts that each are gated, down(function(gate x) * up x).

    Args:
      function: of single numbers. hidden: takes the place of function(gate x) * up x.
    """
    shared = gated(function)
    combined = hidden or (lambda gate, up, spec: function(gate) * up)

    def apply(x, p, linear, spec, real=None, grouped=None):
        rows = x.reshape(-1, x.shape[-1])
        scores = linear(rows, p.w_router, p.b_router, dtype=jnp.float32)
        chosen, weights = route(scores, spec.experts, p.choice_bias)
        if real is not None:
            chosen = jnp.where(real.reshape(-1, 1), chosen, spec.experts.num_experts)

        def of_expert(rows: jax.Array, gate_up_down: Any) -> jax.Array:
            (gate, up, down), (b_gate, b_up, b_down) = gate_up_down
            hidden = combined(linear(rows, gate, b_gate), linear(rows, up, b_up), spec.experts)
            return linear(hidden, down, b_down)

        matrices = p.w_gate_experts, p.w_up_experts, p.w_down_experts
        biases = p.b_gate_experts, p.b_up_experts, p.b_down_experts
        products: list[Any] = [grouped(w) for w in matrices] if grouped else [None]
        if None in products:
            found = each_expert(rows, chosen, (matrices, biases), of_expert, spec.experts)
        else:
            found = all_experts(rows, chosen, products, biases, combined, spec.experts)
        out = summed(weights[..., None] * found).astype(x.dtype).reshape(x.shape)
        if not spec.experts.shared_d_ff:
            return out
        of_all = shared.apply(x, p, linear, spec)
        return out + (jax.nn.sigmoid(linear(x, p.w_shared_gate)) * of_all if spec.experts.shared_gate else of_all)

    return MLP(shapes, apply, takes_joined=True, **STATED, routes=True)


def clamped(gate: jax.Array, up: jax.Array, spec: ExpertsSpec) -> jax.Array:
    """Returns g sigmoid(factor g) (u + 1), with g at most the limit and u at most so far from 0 (gpt-oss,
    arXiv:2508.10925)."""
    if spec.limit is not None:
        gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
    return gate * jax.nn.sigmoid(spec.sigmoid_factor * gate) * (up + 1)


def shapes(d_model: int, spec: MLPSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the router, of each expert's matrices and biases in stacks, and of the shared MLP, which has no biases.

    Raises:
      ConfigError: the model's config has no experts.
    """
    if spec.experts is None:
        raise ConfigError(f"mlp {spec.kind!r} needs experts, this config has none")
    e, f, d = spec.experts.num_experts, spec.d_ff, d_model
    found = {"w_router": (e, d), "w_gate_experts": (e, f, d), "w_up_experts": (e, f, d), "w_down_experts": (e, d, f)}
    if spec.bias:
        found |= {"b_router": (e,), "b_gate_experts": (e, f), "b_up_experts": (e, f), "b_down_experts": (e, d)}
    if spec.experts.choice_bias:
        found |= {"choice_bias": (e,)}
    if not spec.experts.shared_d_ff:
        return found
    found |= gated_shapes(d, MLPSpec(spec.kind, spec.experts.shared_d_ff, False))
    return found | ({"w_shared_gate": (1, d)} if spec.experts.shared_gate else {})


def route(scores: jax.Array, spec: ExpertsSpec, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by scores [T, E], the first of equal ones.

    Args:
      bias: [E], see `ExpertsSpec.choice_bias`.

    Returns:
      The experts of each token [T, k], best first, and their weights [T, k], float32.
    """
    if spec.scoring == "sigmoid" or spec.num_groups > 1 or spec.factor != 1:
        return _route_in_groups(scores, spec, bias)
    best, chosen = jax.lax.top_k(scores, spec.num_chosen)
    powers = jnp.exp(best - best[:, :1])
    total = powers if spec.normalised else jnp.exp(scores - best[:, :1])
    return chosen, powers / summed(total)[:, None]


def _route_in_groups(scores: jax.Array, spec: ExpertsSpec, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Chooses as `route` does, from the best groups (arXiv:2412.19437, section 2.1.2)."""
    weights = jax.nn.sigmoid(scores) if spec.scoring == "sigmoid" else jax.nn.softmax(scores, axis=-1)
    choice = weights if bias is None else weights + bias
    if spec.num_groups > 1:
        groups = choice.reshape(len(scores), spec.num_groups, -1)
        quality = jax.lax.top_k(groups, spec.groups_by)[0].sum(axis=-1)
        best = jax.lax.top_k(quality, spec.groups_chosen)[1]
        is_best = (best[..., None] == jnp.arange(spec.num_groups)).any(axis=1)
        choice = jnp.where(is_best[..., None], groups, -jnp.inf).reshape(scores.shape)
    chosen = jax.lax.top_k(choice, spec.num_chosen)[1]
    weights = jnp.take_along_axis(weights, chosen, axis=-1)
    if spec.normalised:
        weights /= summed(weights)[:, None] + 1e-20
    return chosen, weights * spec.factor


def summed(x: jax.Array) -> jax.Array:
    """Adds up x [T, n, ...] over n from the first to the last, so that a row's bits do not depend on T."""
    total = x[:, 0]
    for index in range(1, x.shape[1]):
        total += x[:, index]
    return total


def block_rows(num_pairs: int, num_experts: int) -> int:
    """Returns the rows of a block: the power of two next to the mean of an expert's tokens."""
    return min(2 ** max(round(num_pairs / num_experts) - 1, 0).bit_length(), MOST_ROWS)


def each_expert(
    rows: jax.Array,
    chosen: jax.Array,
    weights: Any,
    apply: Callable[[jax.Array, Any], jax.Array],
    spec: ExpertsSpec,
) -> jax.Array:
    """Applies the chosen experts to rows [T, D].

    Args:
      chosen: [T, k], experts in [0, E); E for none, whose result is arbitrary.
      weights: pytree of stacks [E, ...]. apply: (rows [B, D], one expert's weights) -> [B, D].

    Returns:
      [T, k, D], the result of each token and expert.
    """
    num_tokens, k = chosen.shape
    size = block_rows(chosen.size, spec.num_experts)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    counts = jnp.bincount(chosen.reshape(-1), length=spec.num_experts)
    last_pair, last_block = jnp.cumsum(counts), jnp.cumsum(-(-counts // size))
    # The last block of an expert may reach into the rows of the next one, or beyond the last pair.
    tokens = jnp.pad(order // k, (0, size - 1))

    def block(index: jax.Array, found: jax.Array) -> jax.Array:
        expert = (last_block <= index).sum()
        # Blocks of an expert end with its last pair, counted in whole blocks from its first.
        before = -(-counts[expert] // size) - (last_block[expert] - index)
        first = last_pair[expert] - counts[expert] + before * size
        at = jax.lax.dynamic_slice_in_dim(tokens, first, size)
        of_expert = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, expert, keepdims=False), weights)
        return jax.lax.dynamic_update_slice_in_dim(found, apply(rows[at], of_expert), first, 0)

    found = jnp.zeros((chosen.size + size - 1, rows.shape[1]), rows.dtype)
    found = jax.lax.fori_loop(0, last_block[-1], block, found)
    return found[jnp.argsort(order)].reshape(num_tokens, k, -1)


def all_experts(
    rows: jax.Array,
    chosen: jax.Array,
    products: Sequence[Callable[..., jax.Array]],
    biases: Sequence[jax.Array | None],
    hidden: Hidden,
    spec: ExpertsSpec,
) -> jax.Array:
    """Computes the chosen experts for rows [T, D] by products that take the rows of all experts at once.

    Args:
      chosen: [T, k], experts in [0, E); E for none, whose result is arbitrary.
      products: of gate, up and down, see `Operators.grouped`. biases: theirs, [E, ...], or None.

    Returns:
      [T, k, D], the result of each token and expert.
    """
    (num_tokens, k), of_pairs = chosen.shape, chosen.reshape(-1)
    order, counts = jnp.argsort(of_pairs, stable=True), jnp.bincount(of_pairs, length=spec.num_experts)
    x, experts_of_x = rows[order // k], of_pairs[order]
    of_rows = [None if b is None else b[experts_of_x] for b in biases]
    gate, up, down = (functools.partial(f, counts=counts, b=b) for f, b in zip(products, of_rows, strict=True))
    return down(hidden(gate(x), up(x), spec))[jnp.argsort(order)].reshape(num_tokens, k, -1)

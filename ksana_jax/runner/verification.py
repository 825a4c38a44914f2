"""Verifies draft tokens under jit: samples a token after each of them, and accepts those that a rule allows.

Where drafts branch, keys and values of the accepted tokens, the nodes on one path through a tree, move to the slots of
a sequence without branches.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.models.params import Params
from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.token_programs import OutputHead, sampling_of, sampling_shapes, score_shapes, settings_packing
from ksana_jax.runner.transfer import Fetched, Packing, packed
from ksana_jax.sampling.acceptance import RULES, accept_tree, equal_sampled, good_enough, num_before, rule_of
from ksana_jax.sampling.masks import mask_shape, masked
from ksana_jax.sampling.noise import gumbel_noise, of_stream, uniforms
from ksana_jax.sampling.probabilities import distribution, score
from ksana_jax.sampling.sampler import adjust, sample
from ksana_jax.scheduler.step.drafts import Drafts, FlatDrafts
from ksana_jax.scheduler.step.settings import SamplingArrays
from ksana_jax.scheduler.step.types import StepInput, StepShape, TileGroup
from ksana_jax.sharding.specs import BY_HEAD, EVERYWHERE


class VerificationKey(NamedTuple):
    """Key of a compiled `verify_tokens` in the runner.

    count: J tokens, see `StepShape.max_sampled`.
    part: the tiles of rows, for rules that need to know each row's tokens; None for others.
    samples, dense: True with sampling settings, and with penalties or biases.
    num_top: most probable tokens to score; None scores nothing. acceptance: see `StepInput`.
    drawn_from: lengths of the first axes of `Drafts.drawn_from`; None without it. tree: True if drafts have parents.
    masks: True with `StepInput.mask`.
    """

    count: int
    part: TileGroup | None
    samples: bool
    dense: bool
    num_top: int | None
    acceptance: str = "sampled"
    drawn_from: tuple[int, int] | None = None
    tree: bool = False
    masks: bool = False

    @classmethod
    def of(
        cls,
        shape: StepShape,
        samples: bool,
        dense: bool,
        num_top: int | None,
        rule: str,
        drawn_from: tuple[int, int] | None = None,
        tree: bool = False,
        masks: bool = False,
    ) -> VerificationKey:
        """Returns the key for a step's shape and a rule of `rule_of`."""
        by_row = tree or rule in RULES
        drawn_from = drawn_from if rule in RULES else None
        part = shape.parts[0] if by_row else None
        return cls(shape.max_sampled, part, samples, dense, num_top, rule, drawn_from, tree, masks)

    @classmethod
    def of_step(cls, step: StepInput, num_top: int | None) -> VerificationKey:
        """Returns the key for a step with drafts. num_top: as in the key."""
        assert step.drafts is not None
        drawn, tree, sampling = step.drafts.drawn_from, step.drafts.parents is not None, step.sampling
        sizes = None if drawn is None else tuple(drawn.shape[:2])
        dense = sampling is not None and sampling.counts is not None
        rule = rule_of(step.acceptance, sampling is not None)
        return cls.of(step.shape, sampling is not None, dense, num_top, rule, sizes, tree, step.mask is not None)

    def drafts_of(self, step: StepInput) -> Drafts | FlatDrafts:
        """Returns a step's drafts as the program takes them."""
        assert step.drafts is not None
        return step.drafts.flat(self.count) if self.part is None else step.drafts


@functools.cache
def verification_packing(key: VerificationKey) -> Packing:
    """Returns how the host gets the result of `verify_tokens`."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens, scores = ints((key.count,)), None if key.num_top is None else score_shapes(key.count, key.num_top)
    accepted = tokens if key.part is None else ints((key.part.count,))
    return Packing((tokens, accepted, tokens if key.tree else None, scores))


def verified(report: Fetched, part: TileGroup) -> tuple[Any, ...]:
    """Waits for the result of `verify_tokens`; returns (tokens, num_accepted, sampled, scores) of `StepOutput`.

    part: the tiles of the step's rows.
    """
    tokens, accepted, sampled, scores = report.result()
    used = part.count * part.width
    if len(accepted) > part.count:
        accepted = num_before(accepted[:used].reshape(part))
    return tokens[:used], accepted, sampled, scores


def lower_verification(params: Params, *, head: OutputHead, key: VerificationKey) -> Any:
    """Lowers `verify_runs`."""
    run = head.placement.jit(functools.partial(verify_runs, head=head, key=key))
    return lower(run, *verification_arguments(head, params, key))


def verification_arguments(head: OutputHead, params: Params, key: VerificationKey) -> tuple[Any, ...]:
    """Returns the arguments of `verify_tokens`, or their shapes."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    count, vocab_size = key.count, head.config.vocab_size
    hidden = jax.ShapeDtypeStruct((count, head.config.d_model), params.final_norm.dtype)
    drawn_from = None
    if key.drawn_from is not None:
        drawn_from = jax.ShapeDtypeStruct((*key.drawn_from, vocab_size), jnp.float32)
    rollback = jax.ShapeDtypeStruct((), jnp.float32) if key.acceptance == "bild" else None
    if key.part is None:
        drafts = FlatDrafts(ints((count,)), rollback)
    else:
        ids = ints((key.part.count, key.part.width - 1))
        drafts = Drafts(ids, ints((key.part.count,)), drawn_from, None, ids if key.tree else None)
    settings = ints((settings_packing(count).size,)) if key.samples else None
    dense = sampling_shapes(count, vocab_size)[-3:] if key.dense else None
    return params, hidden, settings, dense, drafts, mask_shape(count, vocab_size) if key.masks else None


def verify_tokens(
    params, hidden, settings, dense, drafts: Drafts | FlatDrafts, mask=None, *, head: OutputHead, key: VerificationKey
):
    """Chooses a token after each row's newest one and after each of its draft tokens, and accepts drafts.

    Args:
      hidden: [J, D], whose first rows belong to R tiles of K + 1 tokens. settings, dense: of all of them, as
        `choose_tokens` has them.
      drafts: ids [R, K], counts [R]; or, for rules that judge each token separately, ids [J]. mask: of `StepInput`.

    Returns:
      A vector of `verification_packing`, with the number of accepted draft tokens [R], or which of them [J] are usable;
      for trees the path [R, K + 1] of `accept_tree`, which orders the tokens, else None; and that number, or which.
    """
    scores_SV, path, in_order = head(params, hidden), None, ()
    if mask is not None:
        scores_SV = masked(scores_SV, mask, head.vocabulary)
    sampling = sampling_of(settings, dense, hidden, len(hidden), head)
    if isinstance(drafts, FlatDrafts):
        tokens, accepted = _by_token(scores_SV, sampling, drafts, head)
    elif drafts.parents is not None:
        in_order = sample(scores_SV, sampling, head.vocabulary)
        of_rows = in_order.reshape(key.part)
        accepted, path = accept_tree(of_rows, drafts.ids, drafts.parents, drafts.counts, jnp)
        at = (jnp.arange(len(path))[:, None] * path.shape[1] + path).reshape(-1)
        tokens, scores_SV = in_order[at], scores_SV if key.num_top is None else scores_SV[at]
    else:
        tokens, accepted = _by_distribution(scores_SV, sampling, drafts, head, key)
    scores = () if key.num_top is None else score(scores_SV, tokens, key.num_top, head.vocabulary)
    accepted = accepted.astype(jnp.int32)
    return packed((tokens, accepted, in_order, scores)), path, accepted


def verify_runs(*arguments: Any, head: OutputHead, key: VerificationKey) -> tuple[jax.Array, jax.Array]:
    """Verifies drafts that do not branch; arguments and results of `verify_tokens`, without a path."""
    report, _, accepted = verify_tokens(*arguments, head=head, key=key)
    return report, accepted


def _by_token(scores_SV, sampling: SamplingArrays | None, drafts: FlatDrafts, head: OutputHead):
    """Accepts drafts by the tokens sampled in their places, and by the model's scores of them with a threshold;
    returns tokens [J], and which draft tokens [J] are usable."""
    tokens, (following, rollback) = sample(scores_SV, sampling, head.vocabulary), drafts
    if rollback is None:
        return tokens, equal_sampled(tokens, following)
    adjusted = scores_SV if sampling is None else adjust(scores_SV, sampling)
    logprobs = score(adjusted, jnp.maximum(following, 0), 0, head.vocabulary)[0]
    usable = good_enough(tokens, following, logprobs, rollback)
    if sampling is not None:
        usable &= (sampling.forced < 0) | equal_sampled(tokens, following)
    return jnp.where(usable, following, tokens), usable


def _by_distribution(scores_SV, sampling, drafts: Drafts, head: OutputHead, key: VerificationKey):
    """Accepts drafts by the distributions of target and draft; returns tokens [J] and how many [R]."""
    ids, counts, drawn_from, *_ = drafts
    assert sampling is not None and key.part is not None
    (rows, most), tile = ids.shape, key.part.width
    p = distribution(scores_SV, sampling)[: rows * tile].reshape(rows, tile, -1)
    if drawn_from is None:
        q = jax.nn.one_hot(ids, p.shape[-1], dtype=p.dtype)
    else:
        q = jnp.moveaxis(drawn_from[:most], 0, 1)[:rows]
        q = jnp.pad(q, ((0, rows - len(q)), (0, 0), (0, 0)))
    generator = head.vocabulary.features.generator
    chances = uniforms(of_stream(sampling, 1), generator)[: rows * tile].reshape(rows, tile)[:, :-1]
    number, after = RULES[key.acceptance](p, q, ids, counts, chances, jnp)
    at = jnp.arange(rows) * tile + number
    noise = gumbel_noise(of_stream(SamplingArrays(*(x[at] for x in sampling[:-3])), 2), p.shape[-1], generator)
    chosen = jnp.argmax(jnp.log(after) + noise, axis=-1)
    chosen = jnp.where(jnp.isfinite(jnp.max(after, axis=-1)), chosen, -1).astype(jnp.int32)
    drafted = jnp.pad(ids, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(tile) < number[:, None], drafted, chosen[:, None]).reshape(-1)
    return jnp.pad(tokens, (0, key.count - len(tokens))), number


def lower_trees(params: Params, cache: Any, *, head: OutputHead, num_groups: int, key: VerificationKey) -> Any:
    """Lowers `verify_trees` for a pool with some groups of layers."""
    assert key.part is not None
    run = head.placement.jit(
        functools.partial(verify_trees, head=head, key=key), returns=(BY_HEAD, EVERYWHERE), donated=0
    )
    slots = jax.ShapeDtypeStruct((num_groups, key.part.count * key.part.width), jnp.int32)
    return lower(run, cache, slots, *verification_arguments(head, params, key))


def verify_trees(
    cache: KVCache, slots: jax.Array, *arguments: Any, head: OutputHead, key: VerificationKey
) -> tuple[KVCache, jax.Array]:
    """Verifies drafts and moves accepted tokens; accepted tokens of a run stay in place.

    Args:
      slots: [Gk, S * W] of a step's tokens; M * B for padding. arguments: of `verify_tokens`.

    Returns:
      The pool, and a vector of `verification_packing`.
    """
    report, path, _ = verify_tokens(*arguments, head=head, key=key)
    assert path is not None
    return moved_to_path(cache, slots, path), report


def moved_to_path(cache: KVCache, slots: jax.Array, path: jax.Array) -> KVCache:
    """Moves the cached content of some tokens of each tile to the slots of others, for all layers.

    Args:
      slots: [Gk, S * W] of a step's tokens; M * B for padding.
      path: [S, W] for each slot of a tile the token of the tile that moves there; its own number where it stays.
    """
    targets = slots.reshape(len(slots), *path.shape)
    sources = jnp.take_along_axis(targets, path[None], axis=2)
    stays = path[None] == jnp.arange(path.shape[1])
    none = cache.num_blocks * cache.block_size
    sources, targets = sources.reshape(-1), jnp.where(stays, none, targets).reshape(-1)
    leaves = {name: _moved(leaf, sources, targets) for name, leaf in cache.leaves.items()}
    return cache.replace(leaves=leaves)  # pyright: ignore[reportAttributeAccessIssue]


def _moved(leaf: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Copies between slots of a leaf [M, L, I, K, B, ...]; targets beyond it are dropped."""
    _, num_layers, parts, heads, size, *_ = leaf.shape
    all_heads = jnp.ix_(jnp.arange(num_layers), jnp.arange(parts), jnp.arange(heads))

    def at(slots: jax.Array) -> tuple[jax.Array, ...]:
        block, offset = (x[:, None, None, None] for x in (slots // size, slots % size))
        return (block, *(x[None] for x in all_heads), offset)

    # All are read before one is written.
    return leaf.at[at(targets)].set(leaf.at[at(sources)].get(mode="clip"), mode="drop")

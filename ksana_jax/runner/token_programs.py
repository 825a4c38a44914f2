"""Functions under jit that turn hidden states into tokens and scores, and the shapes of their settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params
from ksana_jax.models.transformer import logits
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.transfer import Packing, packed
from ksana_jax.sampling.acceptance import RULES, accept_tree, equal_sampled, good_enough, rule_of
from ksana_jax.sampling.noise import gumbel_noise, of_stream, uniforms
from ksana_jax.sampling.probabilities import distribution, score
from ksana_jax.sampling.sampler import adjust, sample
from ksana_jax.sampling.vocabulary import Vocabulary
from ksana_jax.scheduler.step.drafts import Drafts, FlatDrafts
from ksana_jax.scheduler.step.types import SamplingArrays, StepInput, StepShape, TileGroup, TokenScores
from ksana_jax.sharding.placement import Placement

# Maximum number of prompt tokens whose scores over the whole vocabulary are computed at a time.
SCORED_AT_ONCE = 128


def sampling_shapes(size: int, vocab_size: int | None) -> Any:
    """Returns the shapes of SamplingArrays; with penalties and biases if a vocabulary size is given."""

    def array(dtype, *more: int) -> Any:
        return jax.ShapeDtypeStruct((size, *more), dtype)

    f32, i32 = array(jnp.float32), array(jnp.int32)
    settings = SamplingArrays(f32, i32, f32, f32, array(jnp.uint32, 2), i32, f32, f32, f32)
    if vocab_size is None:
        return settings
    counts, in_prompt, bias = (array(dtype, vocab_size) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    return settings._replace(counts=counts, in_prompt=in_prompt, bias=bias)


@functools.cache
def settings_packing(max_sampled: int) -> Packing:
    """Returns how the sampling settings of max_sampled tokens are packed, without penalties and biases."""
    return Packing(sampling_shapes(max_sampled, None))


@functools.cache
def report_packing(count: int, num_top: int | None) -> Packing:
    """Returns how the host gets `count` tokens, and their `TokenScores` if num_top is given; see `choose_tokens`."""
    return Packing((jax.ShapeDtypeStruct((count,), jnp.int32), None if num_top is None else _scores(count, num_top)))


@functools.cache
def verification_packing(key: VerificationKey) -> Packing:
    """Returns how the host gets the result of `verify_tokens`."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens, scores = ints((key.count,)), None if key.num_top is None else _scores(key.count, key.num_top)
    accepted = tokens if key.part is None else ints((key.part.count,))
    return Packing((tokens, accepted, tokens if key.tree else None, scores))


@functools.cache
def scores_packing(count: int, num_top: int) -> Packing:
    """Returns how the host gets the `TokenScores` of `score_tokens`."""
    return Packing(_scores(count, num_top))


def _scores(count: int, num_top: int) -> TokenScores:
    def array(dtype, *more: int) -> Any:
        return jax.ShapeDtypeStruct((count, *more), dtype)

    f32, i32 = jnp.float32, jnp.int32
    return TokenScores(array(f32), array(i32), array(i32, num_top), array(f32, num_top))


@dataclasses.dataclass(frozen=True)
class OutputHead:
    """Scores of the vocabulary, and the programs that choose and score tokens by them.

    config: of the model. operators, placement: of its network. vocabulary: for sampling, on the devices.
    """

    config: ModelConfig
    operators: Operators
    placement: Placement
    vocabulary: Vocabulary

    def __call__(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns the scores [..., V] of hidden states [..., D]; on one device, scores of its ids."""
        scores = logits(params, hidden, config=self.config, linear=self.operators.linear)
        return self.vocabulary.without_padding(scores)

    def lower_choice(self, params: Params, hidden, count: int, samples: bool, dense: bool, num_top: int | None) -> Any:
        """Lowers `choose_tokens`; arguments as in `Runner.compile_sampler`."""
        run = self.placement.jit(functools.partial(choose_tokens, head=self, count=count, num_top=num_top))
        settings = jax.ShapeDtypeStruct((settings_packing(hidden.shape[0]).size,), jnp.int32) if samples else None
        given = sampling_shapes(count, self.config.vocab_size)[-3:] if dense else None
        return lower(run, params, hidden, settings, given)

    def lower_verification(self, params: Params, key: VerificationKey) -> Any:
        """Lowers `verify_runs`."""
        run = self.placement.jit(functools.partial(verify_runs, head=self, key=key))
        return lower(run, *self.verification_arguments(params, key))

    def verification_arguments(self, params: Params, key: VerificationKey) -> tuple[Any, ...]:
        """Returns the arguments of `verify_tokens`, or their shapes."""
        ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        count, vocab_size = key.count, self.config.vocab_size
        hidden = jax.ShapeDtypeStruct((count, self.config.d_model), params.final_norm.dtype)
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
        return params, hidden, settings, dense, drafts

    def lower_scores(self, params: Params, num_tokens: int, num_top: int) -> Any:
        """Lowers `score_tokens` for prompts of num_tokens tokens in a step."""
        hidden = jax.ShapeDtypeStruct((num_tokens, self.config.d_model), params.final_norm.dtype)
        targets = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
        return lower(
            self.placement.jit(functools.partial(score_tokens, head=self, num_top=num_top)), params, hidden, targets
        )


def _sampling_of(settings, dense, hidden, count: int, head: OutputHead) -> SamplingArrays | None:
    """Returns the sampling settings of the first `count` of hidden [J, D]; arguments as `choose_tokens` has them."""
    if settings is None:
        return None
    settings = settings_packing(hidden.shape[0]).unpack(settings)
    given = map(head.vocabulary.own, dense or ())
    return SamplingArrays(*(x[:count] for x in jax.tree.leaves(settings)), *given)


def choose_tokens(params, hidden, settings, dense, *, head: OutputHead, count: int, num_top: int | None):
    """Chooses a token for each of the first `count` of hidden [J, D].

    Args:
      settings: vector of `settings_packing`; None chooses the most probable tokens.
      dense: counts, in_prompt and bias of `SamplingArrays`, of `count` tokens; None without penalties and biases.

    Returns:
      The tokens [J], padded, and a vector of `report_packing`.
    """
    # This name separates these operations from layers in a program that also computes layers.
    with jax.named_scope("choice"):
        scores_SV = head(params, hidden[:count])
        tokens = sample(scores_SV, _sampling_of(settings, dense, hidden, count, head), head.vocabulary)
        scores = () if num_top is None else score(scores_SV, tokens, num_top, head.vocabulary)
        # One fixed size, because the next step may take its tokens from there.
        return jnp.pad(tokens, (0, hidden.shape[0] - count)), packed((tokens, scores))


def drawn_with(params, hidden, settings, head: OutputHead, count: int):
    """Returns the probabilities [J, V] with which `choose_tokens` draws, given the same arguments; 0 after `count`."""
    sampling = _sampling_of(settings, None, hidden, count, head)
    assert sampling is not None
    return jnp.pad(distribution(head(params, hidden[:count]), sampling), ((0, len(hidden) - count), (0, 0)))


class VerificationKey(NamedTuple):
    """Key of a compiled `verify_tokens` in the runner.

    count: J tokens, see `StepShape.max_sampled`.
    part: the tiles of rows, for rules that need to know each row's tokens; None for others.
    samples, dense: True with sampling settings, and with penalties or biases.
    num_top: most probable tokens to score; None scores nothing. acceptance: see `StepInput`.
    drawn_from: lengths of the first axes of `Drafts.drawn_from`; None without it. tree: True if drafts have parents.
    """

    count: int
    part: TileGroup | None
    samples: bool
    dense: bool
    num_top: int | None
    acceptance: str = "sampled"
    drawn_from: tuple[int, int] | None = None
    tree: bool = False

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
    ) -> VerificationKey:
        """Returns the key for a step's shape and a rule of `rule_of`."""
        by_row = tree or rule in RULES
        drawn_from = drawn_from if rule in RULES else None
        part = shape.parts[0] if by_row else None
        return cls(shape.max_sampled, part, samples, dense, num_top, rule, drawn_from, tree)

    @classmethod
    def of_step(cls, step: StepInput, num_top: int | None) -> VerificationKey:
        """Returns the key for a step with drafts. num_top: as in the key."""
        assert step.drafts is not None
        drawn, tree, sampling = step.drafts.drawn_from, step.drafts.parents is not None, step.sampling
        sizes = None if drawn is None else tuple(drawn.shape[:2])
        dense = sampling is not None and sampling.counts is not None
        rule = rule_of(step.acceptance, sampling is not None)
        return cls.of(step.shape, sampling is not None, dense, num_top, rule, sizes, tree)

    def drafts_of(self, step: StepInput) -> Drafts | FlatDrafts:
        """Returns a step's drafts as the program takes them."""
        assert step.drafts is not None
        return step.drafts.flat(self.count) if self.part is None else step.drafts


def verify_tokens(
    params, hidden, settings, dense, drafts: Drafts | FlatDrafts, *, head: OutputHead, key: VerificationKey
):
    """Chooses a token after each row's newest one and after each of its draft tokens, and accepts drafts.

    Args:
      hidden: [J, D], whose first rows belong to R tiles of K + 1 tokens. settings, dense: of all of them, as
        `choose_tokens` has them.
      drafts: ids [R, K], counts [R]; or, for rules that judge each token separately, ids [J].

    Returns:
      A vector of `verification_packing`, with the number of accepted draft tokens [R], or which of them [J] are usable;
      and for trees the path [R, K + 1] of `accept_tree`, which orders the tokens, else None.
    """
    scores_SV, path, in_order = head(params, hidden), None, ()
    sampling = _sampling_of(settings, dense, hidden, len(hidden), head)
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
    return packed((tokens, accepted.astype(jnp.int32), in_order, scores)), path


def verify_runs(*arguments: Any, head: OutputHead, key: VerificationKey) -> jax.Array:
    """Verifies drafts that do not branch; arguments and result of `verify_tokens`, without a path."""
    report, _ = verify_tokens(*arguments, head=head, key=key)
    return report


def _by_token(scores_SV, sampling: SamplingArrays | None, drafts: FlatDrafts, head: OutputHead):
    """Accepts drafts by the tokens sampled in their places, and by the model's scores of them with a threshold;
    returns tokens [J], and which draft tokens [J] are usable."""
    tokens, (following, rollback) = sample(scores_SV, sampling, head.vocabulary), drafts
    if rollback is None:
        return tokens, equal_sampled(tokens, following)
    adjusted = scores_SV if sampling is None else adjust(scores_SV, sampling)
    logprobs = score(adjusted, jnp.maximum(following, 0), 0, head.vocabulary)[0]
    usable = good_enough(tokens, following, logprobs, rollback)
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


def score_tokens(params, hidden, targets, *, head: OutputHead, num_top: int):
    """Scores the token that follows each of hidden [T, D]; returns a vector of `scores_packing`."""
    group = math.gcd(hidden.shape[0], SCORED_AT_ONCE)
    if group < 16:
        group = hidden.shape[0]
    parts = jax.lax.map(
        lambda part: score(head(params, part[0]), part[1], num_top, head.vocabulary),
        (hidden.reshape(-1, group, hidden.shape[-1]), targets.reshape(-1, group)),
    )
    return packed(parts)

"""A network with hashes for numbers: whatever reaches a query through its block table decides the next token, so a
stale, stolen, misaligned, half-written or early freed block shows in the text at once.

It has layers like a real one. What a token leaves in the cache of layer l, h_l, is a hash of its id, its position and
all that it saw below:

    h_0     = hash(id, position)
    h_(l+1) = hash(h_l, sum over visible slots j of h_l(j) * (2 * position of j + 1))

and the next token is hash(h_last) mod vocab. `reference_hidden` computes the same from a text alone: no blocks, no
chunks, and the pattern from its literal definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.scheduler.step.types import TokenScores
from tests.reference import literal

VOCAB, HEAD_DIM = 97, 8
Patterns = Sequence[AttentionPattern]


def two_layers(pattern: AttentionPattern) -> Patterns:
    """The fewest layers with which a cached token depends on what it saw."""
    return (pattern, pattern)


FULLY = two_layers(FULL)
SINKS = two_layers(AttentionPattern(window=6, num_sinks=2))


def u64(x) -> np.ndarray:
    return np.atleast_1d(np.asarray(x)).astype(np.uint64, copy=False)


def mix(x: np.ndarray) -> np.ndarray:
    """A hash of 64 bits, element by element (the finaliser of splitmix64, doi:10.1145/2660193.2660195)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def embed(token_ids, positions) -> np.ndarray:
    return mix((u64(token_ids) << np.uint64(32)) + u64(positions))


def weights_of(positions: np.ndarray) -> np.ndarray:
    """What the keys at some positions are multiplied with: it tells them apart in a sum."""
    return u64(positions) * np.uint64(2) + np.uint64(1)


def attend(hidden: np.ndarray, weighed: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """hidden [T], weighed and visible [T, C]: the next layer's hidden [T]."""
    return mix(hidden ^ mix(np.where(visible, weighed, np.uint64(0)).sum(axis=1, dtype=np.uint64)))


def choose(hidden: np.ndarray, vocab: int, seeds=None, num_outputs=None) -> np.ndarray:
    """Tokens [T] after hidden [T]; with seeds [T], sampled at place num_outputs [T] of each seed's random stream."""
    if seeds is not None:
        hidden = hidden ^ mix(mix(u64(seeds)) + u64(num_outputs))
    return (mix(hidden) % np.uint64(vocab)).astype(np.int32)


def score(hidden: np.ndarray, token_ids, num_top: int, vocab: int) -> TokenScores:
    """Log-probabilities that say of which hidden [T] and token [T] they are."""
    tops = hidden[:, None] + np.arange(num_top, dtype=np.uint64)
    return TokenScores(
        logprob=-((mix(hidden ^ u64(token_ids)) >> np.uint64(44)).astype(np.float64)),
        rank=np.full(len(hidden), 1 + num_top),
        top_ids=(mix(tops) % np.uint64(vocab)).astype(np.int32),
        top_logprobs=-((mix(~tops) >> np.uint64(20)).astype(np.float64)),
    )


# ------------------------------------------------------------------ no cache, no blocks


def reference_hidden(token_ids, patterns: Patterns) -> np.ndarray:
    """Last layer's hidden [T] of a text [T], all at once."""
    positions = np.arange(len(token_ids))
    hidden = embed(token_ids, positions)
    for pattern in patterns:
        visible, _ = literal(pattern, positions[:, None], positions[None])
        hidden = attend(hidden, (hidden * weights_of(positions))[None], visible)
    return hidden


def reference_tokens(prompt, count: int, patterns: Patterns, vocab: int = VOCAB, seed: int | None = None) -> list[int]:
    """The `count` tokens that follow a prompt; greedy, or sampled with a seed. Quadratic in what it keeps: nothing."""
    positions = np.arange(len(prompt) + count)
    text = np.concatenate([np.asarray(prompt, np.int64), np.zeros(count, np.int64)])
    # masks[l]: which positions each position sees; layers[l]: what the text so far holds in layer l.
    masks = [literal(p, positions[:, None], positions[None])[0] for p in patterns]
    layers = np.zeros((len(patterns) + 1, len(text)), np.uint64)
    weighed, weights = np.zeros((len(patterns), len(text)), np.uint64), weights_of(positions)
    start = 0
    for end in range(len(prompt), len(text)):
        new = slice(start, end)
        layers[0, new] = embed(text[new], positions[new])
        for at, mask in enumerate(masks):
            weighed[at, new] = layers[at, new] * weights[new]
            layers[at + 1, new] = attend(layers[at, new], weighed[at][None], mask[new])
        sampled = () if seed is None else ([seed], [end - len(prompt)])
        text[end] = choose(layers[-1, end - 1 : end], vocab, *sampled)[0]
        start = end
    return text[len(prompt) :].tolist()


def until_stop(token_ids: list[int], stop_ids, min_tokens: int = 0) -> list[int]:
    """What is left of an output that ends with the first stop id after min_tokens tokens."""
    ends = (n + 1 for n, token in enumerate(token_ids) if token in stop_ids and n >= min_tokens)
    return token_ids[: next(ends, len(token_ids))]

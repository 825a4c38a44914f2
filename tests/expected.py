"""What requests to the fake network must end with, each computed from its text alone: no blocks, no cache, no batch."""

from __future__ import annotations

import functools

import numpy as np

from ksana_jax.core.patterns import FULL, AttentionPattern
from tests.fakes import FULLY, VOCAB, Patterns, reference_hidden, reference_tokens, score, until_stop
from tests.reference import literal

PATTERNS = {
    "full": (FULL, FULL),
    "sliding": (AttentionPattern(window=5),) * 2,
    "sliding, only itself": (AttentionPattern(window=1),) * 2,
    "sink": (AttentionPattern(window=4, num_sinks=3),) * 2,
    "dilated": (AttentionPattern(window=8, stride=3),) * 2,
    "global": (AttentionPattern(window=3, global_every=7),) * 2,
    "layers that differ": (AttentionPattern(window=6, num_sinks=1), AttentionPattern(window=3, global_every=9)),
    "one layer sees everything": (AttentionPattern(window=2), FULL),
}
LONGEST = 40
STOP_IDS = (3, 4)


def expected_tokens(prompt: bytes, count: int, pattern: str, seed: int | None, min_tokens: int, stop_ids) -> list[int]:
    """What a prompt gives alone on a cold engine."""
    if seed is None:  # few texts are asked for again and again, with other lengths
        tokens = _tokens(prompt, LONGEST - len(prompt) // 4, pattern, None)[:count]
    else:
        tokens = _tokens(prompt, count, pattern, seed)
    return until_stop(tokens, stop_ids, min_tokens)


@functools.lru_cache(maxsize=2**16)
def _tokens(prompt: bytes, count: int, pattern: str, seed: int | None) -> list[int]:
    return reference_tokens(np.frombuffer(prompt, np.int32), count, PATTERNS[pattern], seed=seed)


def searched(continuations, width: int, penalty: float, stops, max_tokens: int) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search without blocks, sharing or batches: (sum of log-probabilities, tokens) of the best hypotheses, the
    best first.

    Args:
      continuations: tokens so far -> [(token, log-probability)], all of them or the best `kept`.
    """
    kept = max(2, 1 + len(stops)) * width
    running, done = [(0.0, ())], []
    for length in range(1, max_tokens + 1):
        options = [(total + p, text + (t,)) for total, text in running for t, p in continuations(text)]
        options = sorted(options, key=lambda option: -option[0])[:kept]
        done += [option for option in options[:width] if option[1][-1] in stops]
        running = [option for option in options if option[1][-1] not in stops][:width]
        if length == max_tokens:
            done += running
        done = sorted(done, key=lambda option: -option[0] / len(option[1]) ** penalty)[:width]
        if len(done) == width and running:
            worst = done[-1][0] / len(done[-1][1]) ** penalty
            if running[0][0] / length**penalty <= worst:
                break
    return done


def beams_by(hidden_of, width: int, penalty: float, stops, max_tokens: int):
    """What `searched` finds after a prompt. hidden_of: tokens after the prompt -> hidden [T] of the whole text."""

    def continuations(text):
        top = score(hidden_of(text)[-1:], [0], max(2, 1 + len(stops)) * width, VOCAB)
        return list(zip(top.top_ids[0].tolist(), top.top_logprobs[0].tolist(), strict=True))

    return searched(continuations, width, penalty, stops, max_tokens)


@functools.lru_cache(maxsize=2**16)
def expected_beams(prompt: bytes, width: int, penalty: float, patterns: Patterns, stops, max_tokens: int):
    """The same, every log-probability computed from its text alone."""
    begin = np.frombuffer(prompt, np.int32)

    def hidden_of(text):
        return reference_hidden(np.concatenate([begin, np.array(text, np.int32)]), patterns)

    return beams_by(hidden_of, width, penalty, stops, max_tokens)


@functools.lru_cache(maxsize=2**16)
def visible_later(pattern: str, layers: tuple[int, ...], done: int, covered: int, size: int) -> list[int]:
    """Starts of the blocks that queries of some layers from `done` on see, or write to."""
    return seen_later([PATTERNS[pattern][layer] for layer in layers], done, covered, size)


def seen_later(patterns: Patterns, done: int, covered: int, size: int) -> list[int]:
    """Starts of the blocks that queries from `done` on see with any of some patterns, or write to."""
    later, positions = np.arange(done, done + LONGEST + 10)[:, None], np.arange(covered)[None]
    seen = np.any([literal(pattern, later, positions)[0] for pattern in patterns], axis=(0, 1))
    return (np.flatnonzero((seen | (positions[0] >= done)).reshape(-1, size).any(axis=1)) * size).tolist()


def expect_reference(requests, patterns=FULLY) -> None:
    """Every completion of each request is what its prompt gives alone."""
    for request in requests:
        expected = reference_tokens(request.prompt_token_ids, request.params.max_tokens, patterns)
        for completion in request.output().outputs:
            assert completion.token_ids == expected, request.request_id

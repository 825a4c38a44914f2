"""What requests to the fake network must end with, each computed from its text alone: no blocks, no cache, no batch."""

from __future__ import annotations

import functools

import numpy as np

from ksana_jax.patterns import FULL, AttentionPattern
from tests.fakes import FULLY, VOCAB, reference_hidden, reference_tokens, score, until_stop
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


@functools.lru_cache(maxsize=2**16)
def expected_beams(prompt: bytes, width: int, length_penalty: float, pattern: str, stop_ids, max_len: int):
    """(tokens, sum of log-probabilities) of the beams that a search ends with, the best first; every beam computed
    from its text alone."""
    count = max(2, 1 + len(stop_ids)) * width
    begin, alive, ended = np.frombuffer(prompt, np.int32), [([], 0.0)], []

    def rank(found):
        return sorted(found, key=lambda e: -e[1] / len(e[0]) ** length_penalty)

    while True:
        found = []
        for tokens, total in alive:
            hidden = reference_hidden(np.concatenate([begin, np.array(tokens, np.int32)]), PATTERNS[pattern])[-1:]
            scores = score(hidden, [0], count, VOCAB)
            tops = zip(scores.top_ids[0].tolist(), scores.top_logprobs[0].tolist(), strict=True)
            found += [([*tokens, token], total + logprob) for token, logprob in tops]
        best = sorted(found, key=lambda e: -e[1])[:count]
        ended = rank(ended + [e for e in best[:width] if e[0][-1] in stop_ids])[:width]
        alive = [e for e in best if e[0][-1] not in stop_ids][:width]
        if len(begin) + len(found[0][0]) >= max_len:
            return rank(ended + alive)[:width]
        if len(ended) == width and (not alive or rank([alive[0], ended[-1]])[0] is ended[-1]):
            return ended


@functools.lru_cache(maxsize=2**16)
def visible_later(pattern: str, layers: tuple[int, ...], done: int, covered: int, size: int) -> list[int]:
    """Starts of the blocks that queries of some layers from `done` on see, or write to."""
    later, positions = np.arange(done, done + LONGEST + 10)[:, None], np.arange(covered)[None]
    seen = np.any([literal(PATTERNS[pattern][layer], later, positions)[0] for layer in layers], axis=(0, 1))
    return (np.flatnonzero((seen | (positions[0] >= done)).reshape(-1, size).any(axis=1)) * size).tolist()


def expect_reference(requests, patterns=FULLY) -> None:
    """Every completion of each request is what its prompt gives alone."""
    for request in requests:
        expected = reference_tokens(request.prompt_token_ids, request.params.max_tokens, patterns)
        for completion in request.output().outputs:
            assert completion.token_ids == expected, request.request_id

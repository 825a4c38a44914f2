"""The shapes that the GPU script times, with their lists of work and grids. Knows numbers, no jax."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

# As in `work`.
TILE_KV, MIN_PIECES = 64, 4
# Lengths of rows of the shapes of decode; `experiments.gpu` times them.
DECODE: dict[str, tuple[int, ...]] = {
    "64x4k": (4096,) * 64,
    "1x4k": (4096,),
    "8x8k": (8192,) * 8,
    "1x128k+31x4k": (131072,) + (4096,) * 31,
    "32x4k": (4096,) * 32,
    "1x32k": (32768,),
    "256x512": (512,) * 256,
}
# Queries of a prefill, the last ones of a row, and the row's length.
PREFILL: dict[str, tuple[int, int]] = {"causal 8k": (8192, 8192), "chunk of 512 at 4k": (512, 4096)}
# Tokens of a step whose keys and values are written.
WRITES: dict[str, int] = {"8k tokens": 8192, "64 tokens": 64}


class Stretches(NamedTuple):
    """A list of work in numbers. pieces, segments: of each worker that has any. of_pair: segments of each pair."""

    pieces: list[int]
    segments: list[int]
    of_pair: list[int]


def stretches(lengths: Sequence[int], num_kv_heads: int, num_workers: int) -> Stretches:
    """Cuts rows of one query each, with all of their keys visible, as `work.schedule` does."""
    length = np.repeat([-(-n // TILE_KV) for n in lengths], num_kv_heads)
    begin = np.concatenate([[0], np.cumsum(length)])
    total = int(begin[-1])
    stretch = max(-(-total // num_workers), MIN_PIECES)
    cuts = np.arange(0, total, stretch)
    edges = np.union1d(begin[:-1], cuts)
    segments = np.diff(np.searchsorted(edges, np.append(cuts, total)))
    of_pair = np.diff(np.searchsorted(edges, begin))
    pieces = np.minimum(cuts + stretch, total) - cuts
    return Stretches(pieces.tolist(), segments.tolist(), of_pair.tolist())


def makespan(durations: Iterable[float], slots: int) -> float:
    """When the last block of threads ends, if each starts on the first slot that is free, in their order."""
    free = [0.0] * slots
    heapq.heapify(free)
    end = 0.0
    for duration in durations:
        until = heapq.heappop(free) + duration
        heapq.heappush(free, until)
        end = max(end, until)
    return end

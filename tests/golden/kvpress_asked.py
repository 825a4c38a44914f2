"""Cases that `make_kvpress` asks kvpress: presses and their arguments, without prompts and answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvpress_cases import CONFIG, KVPressCase

LENGTHS, RATIOS = (96, 61), (0.25, 0.5, 0.75, 0.9)
WINDOWS_AND_KERNELS = ((2, 1), (4, 5), (6, 7), (3, 13))
# (ratio, window, kernel, beta): steep and gentle ones; one whose first layer would exceed the prompt; one whose last
# layer could not hold the window.
PYRAMIDS = ((0.5, 2, 5, 20), (0.75, 4, 7, 4), (0.75, 3, 5, 2), (0.625, 4, 5, 8), (0.375, 4, 5, 20), (0.75, 4, 5, 20))
# (length, sinks, lag size, tokens that stay of each partition): torch chooses among partitions' equals by chance.
LAGS = ((96, 4, 8, 3), (96, 1, 16, 9), (61, 4, 5, 1), (61, 0, 12, 5))
# (length, ratio, window, kernel, chunk): SnapKV's windows begin with a chunk, since kvpress counts no chunk in part.
CHUNKS = ((96, 0.5, 8, 1, 8), (96, 0.75, 4, 5, 4), (96, 0.7, 12, 3, 6), (61, 0.5, 5, 5, 7), (61, 0.3, 1, 1, 10))
# (ratio, future positions, sinks, covariance, norms of values, epsilon), with given statistics and the prompt's own.
EXPECTED = ((0.5, 32, 4, True, True, 0.0), (0.75, 512, 4, True, True, 0.02), (0.75, 8, 1, False, True, 0.0))
EXPECTED += ((0.25, 64, 0, True, False, 0.0),)
# (ratio, window, kernel, first stage's part, epsilon) of CriticalKV around SnapKV.
CRITICAL = ((0.5, 4, 5, 0.5, 1e-4), (0.75, 4, 7, 0.5, 1e-2), (0.5, 3, 1, 0.25, 1e-4))
# (length, sinks, tokens that a head keeps on average) of KVzip: a context of one chunk, and its repetition; with a
# budget for each layer and with one for all.
REPEATED = ((61, 4, 15), (61, 0, 30), (61, 4, 46), (40, 1, 6))
# (length, ratio, share, SnapKV's window and kernel; KnormPress without them)
SHARES = ((96, 0.75, 0.2, 4, 5), (96, 0.5, 0.9, 6, 7), (61, 0.75, 0.0, 2, 1), (61, 0.9, 0.2, 3, 3))
OF_KEYS = ((96, 0.75, 0.2), (61, 0.5, 0.5))
# A prompt is reduced to TARGET tokens, and the cache again after so many tokens. StreamingLLMPress is not among these
# presses: it goes by a token's place in the cache, where kvpress leaves what it kept in the order of the scores.
DECODING = tuple(itertools.product(("KnormPress", "KeyDiffPress", "TOVAPress"), (1, 4, 8)))
TARGET, NUM_WRITTEN = 24, 24


def asked() -> Iterator[KVPressCase]:
    """Every case but what is kept."""
    for length, ratio in itertools.product(LENGTHS, RATIOS):
        settings = {"compression_ratio": ratio}
        for press in ("KnormPress", "KeyDiffPress", "TOVAPress", "ObservedAttentionPress"):
            yield KVPressCase(press, settings, length, 0, [], [])
        for num_sinks in (1, 4):
            yield KVPressCase("StreamingLLMPress", settings | {"n_sink": num_sinks}, length, 0, [], [])
        for window, kernel in WINDOWS_AND_KERNELS:
            of_window = {"window_size": window, "kernel_size": kernel}
            yield KVPressCase("SnapKVPress", settings | of_window, length, 0, [], [])
    for ratio, window, kernel, beta in PYRAMIDS:
        settings = {"compression_ratio": ratio, "window_size": window, "kernel_size": kernel, "beta": beta}
        yield KVPressCase("PyramidKVPress", settings, LENGTHS[0], 0, [], [])
    for length, ratio, window, kernel, chunk in CHUNKS:
        settings = {"compression_ratio": ratio, "window_size": window, "kernel_size": kernel, "chunk_length": chunk}
        yield KVPressCase("ChunkKVPress", settings, length, 0, [], [])
    for length, num_sinks, lag, num_kept in LAGS:
        num_scored = (length - num_sinks) // lag - 1
        evicted = num_scored * (lag - num_kept)
        # Half a token less: kvpress rounds down what it keeps.
        settings = {"compression_ratio": (evicted - 0.5) / length, "n_sink": num_sinks, "lag_size": lag}
        yield KVPressCase("LagKVPress", settings, length, 0, [], [])
    for length, ratio in itertools.product(LENGTHS, RATIOS):
        yield KVPressCase("QFilterPress", {"compression_ratio": ratio}, length, 0, [], [])
    names = "compression_ratio n_future_positions n_sink use_covariance use_vnorm epsilon".split()
    for press, values in itertools.product(("ExpectedAttentionStatsPress", "ExpectedAttentionPress"), EXPECTED):
        yield KVPressCase(press, dict(zip(names, values)), LENGTHS[0], 0, [], [])
    names = "compression_ratio window_size kernel_size first_stage_ratio epsilon".split()
    for length, values in itertools.product(LENGTHS, CRITICAL):
        yield KVPressCase("CriticalKVPress", dict(zip(names, values)), length, 0, [], [])
    for length, ratio, share, window, kernel in SHARES:
        settings = {"compression_ratio": ratio, "window_size": window, "kernel_size": kernel}
        yield KVPressCase("AdaKVPress", settings | {"alpha_safeguard": share}, length, 0, [], [])
    for length, ratio, share in OF_KEYS:
        yield KVPressCase("AdaKVPress", {"compression_ratio": ratio, "alpha_safeguard": share}, length, 0, [], [])
    for (length, num_sinks, num_kept), layerwise in itertools.product(REPEATED, (True, False)):
        # Half a token less of each budget: kvpress rounds down what goes.
        less = 0.5 / CONFIG["num_key_value_heads"] / (1 if layerwise else CONFIG["num_hidden_layers"])
        settings = {"compression_ratio": 1 - (num_kept - less) / length, "layerwise": layerwise, "n_sink": num_sinks}
        yield KVPressCase("KVzipPress", settings, length, 0, [], [])
    for press, interval in DECODING:
        settings = {"compression_interval": interval, "target_size": TARGET}
        yield KVPressCase(press, settings, 2 * TARGET, 0, [], [])

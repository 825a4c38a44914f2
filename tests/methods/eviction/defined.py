"""Settings of eviction methods, and the definition that each keeps to, by the length of a prompt."""

import ml_dtypes
import numpy as np

from ksana_jax.methods.eviction.noise import uniform
from tests.methods.eviction.reference import Rule, cake_budgets


def gumbel(seed):
    return lambda *at: -np.log(-np.log(uniform(np, seed, *at).astype(np.float64)))


def random_number(layer, head, position):
    # Two layers of one group.
    return uniform(np, 7, 0, layer, head, position).item()


def in_8_bits(x):
    """Reads a vector back from e5m2. The float16 scales of int2 would be rounded otherwise in float64 for some."""
    return np.float32(x).astype(ml_dtypes.float8_e5m2).astype(np.float64)


def repeat(context):
    return [7, 3, 5, *context]


# {name: (setting, rule of a prompt of n tokens)}
METHODS = {
    "h2o": (
        {"method": "h2o", "budget": 12, "recent": 0.5, "interval": 3},
        lambda n: Rule("sums", [12, 12], 3, recents=[6] * 2),
    ),
    "h2o, every token, sinks": (
        {"method": "h2o", "budget": 9, "recent": 2, "sinks": 1, "interval": 1, "prompts": "streamed"},
        lambda n: Rule("sums", [9, 9], 1, recents=[2] * 2, sinks=1, whole=False),
    ),
    "h2o, means of half the prompt": (
        {"method": "h2o", "budget": 0.5, "recent": 0.25, "normalised": True},
        lambda n: Rule("means", [max(round(n * 0.5), 4)] * 2, 4, recents=[round(0.25 * max(round(n * 0.5), 4))] * 2),
    ),
    "h2o, pyramid": (
        {"method": "h2o", "budget": 13, "recent": 0.5, "layers": "pyramid", "beta": 2},
        lambda n: Rule("sums", [18, 8], 4, recents=[9, 4]),
    ),
    "h2o, positions in the cache": (
        {"method": "h2o", "budget": 12, "recent": 0.5, "positions": "cache", "prompts": "streamed"},
        lambda n: Rule("sums", [12, 12], 4, recents=[6] * 2, whole=False, in_cache=True),
    ),
    "d2o": (
        {"method": "d2o", "budget": 12, "recent": 2, "sinks": 1, "interval": 3},
        lambda n: Rule("sums", [12, 12], 3, recents=[2] * 2, sinks=1, smoothing=0.7),
    ),
    "d2o, positions in the cache": (
        {"method": "d2o", "budget": 12, "smoothing": 0.4, "positions": "cache", "prompts": "streamed"},
        lambda n: Rule("sums", [12, 12], 4, recents=[3] * 2, sinks=4, whole=False, in_cache=True, smoothing=0.4),
    ),
    "d2o, once, pyramid": (
        {"method": "d2o", "budget": 8, "recent": 0, "sinks": 0, "layers": "pyramid", "beta": 2, "prompts": "once"},
        # As "knorm, once, pyramid".
        lambda n: Rule("sums", [first := min(max(n, 8), 10), 16 - first], 4, recents=[0] * 2, once=True, smoothing=0.7),
    ),
    # A slot of 8 numbers in float32 takes 4 vectors of 8 bits.
    "mikv": (
        {"method": "mikv", "codec": "fp8_e5m2", "budget": 12, "recent": 2, "sinks": 1, "interval": 3},
        lambda n: Rule("sums", [12, 12], 3, recents=[2] * 2, sinks=1, low=in_8_bits, per_slot=4, share=0.5),
    ),
    "mikv, balanced": (
        {"method": "mikv", "codec": "fp8_e5m2", "budget": 12, "recent": 2, "sinks": 1, "interval": 4, "balance": 0.75},
        lambda n: Rule(
            "sums", [12, 12], 4, recents=[2] * 2, sinks=1, low=in_8_bits, per_slot=4, share=0.5, balance=0.75
        ),
    ),
    # With a budget of 9 or 10, one number of a low token is rounded otherwise in float32 than in float64.
    "mikv by keydiff, streamed, the oldest dropped": (
        {
            "method": "mikv",
            "of": {"method": "keydiff"},
            "codec": "fp8_e5m2",
            "share": 0.25,
            "budget": 11,
            "sinks": 1,
            "prompts": "streamed",
        },
        lambda n: Rule(
            "unlike the mean",
            [11, 11],
            4,
            recents=[0] * 2,
            sinks=1,
            whole=False,
            low=in_8_bits,
            per_slot=4,
            share=0.25,
        ),
    ),
    "mikv by snapkv, once, pyramid": (
        {
            "method": "mikv",
            "of": {"method": "snapkv"},
            "codec": "fp8_e5m2",
            "share": 1.0,
            "budget": 14,
            "recent": 3,
            "layers": "pyramid",
        },
        lambda n: Rule(
            "last queries",
            [first := min(max(n, 14), 22), 28 - first],
            4,
            recents=[3] * 2,
            once=True,
            window=3,
            low=in_8_bits,
            per_slot=4,
            share=1.0,
        ),
    ),
    "kvzip": (
        {"method": "kvzip", "budget": 0.4, "interval": 1, "sinks": 1, "instruction": [7, 3, 5]},
        lambda n: Rule("sums", [max(round(n * 0.4), 2)] * 2, 1, recents=[0] * 2, sinks=1, once=True, probe=repeat),
    ),
    "kvzip, pyramid": (
        {"method": "kvzip", "budget": 8, "recent": 2, "layers": "pyramid", "beta": 2, "instruction": [7, 3, 5]},
        # Of 8 tokens, 3 are shared out, by 1.5 and 0.5.
        lambda n: Rule("sums", [10, 6] if n > 9 else [8, 8], 4, recents=[2] * 2, once=True, probe=repeat),
    ),
    "tova": (
        {"method": "tova", "budget": 10, "interval": 1},
        lambda n: Rule("last query", [10, 10], 1, recents=[0] * 2),
    ),
    "tova, once": (
        {"method": "tova", "budget": 10, "interval": 1, "prompts": "once"},
        lambda n: Rule("last query", [10, 10], 1, recents=[0] * 2, once=True),
    ),
    "h2o, once, half of a prompt": (
        {"method": "h2o", "budget": 0.5, "recent": 2, "prompts": "once"},
        lambda n: Rule("sums", [max(round(n * 0.5), 4)] * 2, 4, recents=[2] * 2, once=True),
    ),
    "knorm, once, pyramid": (
        {"method": "knorm", "budget": 8, "layers": "pyramid", "beta": 2, "prompts": "once"},
        # Of 8 tokens, 5 are shared out, by 1.5 and 0.5; the first layer gets at most the prompt, and the sum stays 16.
        lambda n: Rule("norm", [first := min(max(n, 8), 10), 16 - first], 4, recents=[0] * 2, once=True),
    ),
    "snapkv": (
        {"method": "snapkv", "budget": 8, "recent": 3},
        lambda n: Rule("last queries", [8, 8], 4, recents=[3] * 2, once=True, window=3),
    ),
    "snapkv, streamed": (
        {"method": "snapkv", "budget": 12, "recent": 3, "prompts": "streamed"},
        lambda n: Rule("last queries", [12, 12], 4, recents=[3] * 2, whole=False, window=3),
    ),
    "snapkv, then tova": (
        {"method": "prefill_decode", "of": {"method": "snapkv"}, "budget": 10, "recent": 3},
        lambda n: Rule("last queries", [10, 10], 4, recents=[3] * 2, window=3, after="last query"),
    ),
    "h2o, then keydiff": (
        {
            "method": "prefill_decode",
            "of": {"method": "h2o"},
            "decode": {"method": "keydiff"},
            "budget": 0.5,
            "recent": 2,
            "interval": 2,
        },
        lambda n: Rule("sums", [max(round(n * 0.5), 2)] * 2, 2, recents=[2] * 2, after="unlike the mean"),
    ),
    "snapkv, a kernel wider than its window": (
        {"method": "snapkv", "budget": 10, "recent": 6, "kernel": 9, "interval": 1, "sinks": 1},
        lambda n: Rule("last queries", [10, 10], 1, recents=[6] * 2, sinks=1, once=True, window=6, kernel=9),
    ),
    "snapkv, maxima, streamed": (
        {"method": "snapkv", "budget": 12, "recent": 5, "pooling": "max", "interval": 2, "prompts": "streamed"},
        lambda n: Rule("last queries", [12, 12], 2, recents=[5] * 2, whole=False, window=5, pooling="max"),
    ),
    "snapkv, a budget smaller than its window": (
        {"method": "snapkv", "budget": 8, "recent": 12, "prompts": "streamed"},
        lambda n: Rule("last queries", [8, 8], 4, recents=[12] * 2, whole=False, window=12),
    ),
    "cake": (
        {"method": "cake", "budget": 12, "recent": 3},
        lambda n: Rule(
            "means and variances",
            [12, 12],
            4,
            recents=[3] * 2,
            once=True,
            window=3,
            variance=200,
            measure=lambda layers: cake_budgets(layers, 3, 12, 4),
        ),
    ),
    "pyramidkv": (
        {"method": "snapkv", "budget": 14, "recent": 3, "layers": "pyramid"},
        # Of 14 tokens, each layer has 3 in the window and interval - 1 = 3; 8 are shared out, at most 15.6 and 0.4.
        lambda n: Rule(
            "last queries", [first := min(max(n, 14), 22), 28 - first], 4, recents=[3] * 2, once=True, window=3
        ),
    ),
    "chunkkv": (
        {"method": "chunkkv", "budget": 8, "recent": 3, "chunk_size": 4, "interval": 1},
        lambda n: Rule("chunks", [8, 8], 1, recents=[3] * 2, once=True, window=3, kernel=1, chunk=4),
    ),
    "chunkkv of pooled weights, streamed": (
        {
            "method": "chunkkv",
            "budget": 12,
            "recent": 4,
            "chunk_size": 3,
            "kernel": 3,
            "sinks": 1,
            "prompts": "streamed",
        },
        lambda n: Rule("chunks", [12, 12], 4, recents=[4] * 2, sinks=1, whole=False, window=4, kernel=3, chunk=3),
    ),
    "rkv": (
        {"method": "rkv", "budget": 12, "recent": 3, "kernel": 3, "interval": 3},
        lambda n: Rule(
            "important, not redundant", [12, 12], 3, recents=[3] * 2, window=3, kernel=3, pooling="max", mix=0.1
        ),
    ),
    "rkv, streamed, mostly importance": (
        {"method": "rkv", "budget": 14, "recent": 4, "sinks": 1, "mix_lambda": 0.7, "prompts": "streamed"},
        lambda n: Rule(
            "important, not redundant",
            [14, 14],
            4,
            recents=[4] * 2,
            sinks=1,
            whole=False,
            window=4,
            kernel=7,
            pooling="max",
            mix=0.7,
        ),
    ),
    "keyformer": (
        {"method": "keyformer", "budget": 12, "recent": 4, "steps": 10, "seed": 3, "interval": 2},
        lambda n: Rule(
            "sums",
            [12, 12],
            2,
            recents=[4] * 2,
            noise=gumbel(3),
            temperature=lambda t: 1 + min(max(t + 1 - n, 0) / 10, 1),
        ),
    ),
    "knorm": (
        {"method": "knorm", "budget": 10, "recent": 0.5, "interval": 2, "prompts": "streamed"},
        lambda n: Rule("norm", [10, 10], 2, recents=[5] * 2, whole=False),
    ),
    "keydiff": (
        {"method": "keydiff", "budget": 10, "recent": 2, "interval": 2, "prompts": "streamed"},
        lambda n: Rule("unlike the mean", [10, 10], 2, recents=[2] * 2, whole=False),
    ),
    "keydiff, positions in the cache": (
        {"method": "keydiff", "budget": 10, "sinks": 1, "positions": "cache"},
        lambda n: Rule("unlike the mean", [10, 10], 4, recents=[0] * 2, sinks=1, in_cache=True),
    ),
    "lagkv": (
        {"method": "lagkv", "budget": 16, "sinks": 2, "lag_size": 4, "interval": 3},
        lambda n: Rule("lag", [16, 16], 3, recents=[0] * 2, sinks=2, lag=4),
    ),
    "lagkv, streamed, two of the newest": (
        {"method": "lagkv", "budget": 12, "sinks": 1, "recent": 2, "lag_size": 3, "prompts": "streamed"},
        lambda n: Rule("lag", [12, 12], 4, recents=[2] * 2, sinks=1, lag=3, whole=False),
    ),
    "lagkv, a budget smaller than two partitions": (
        {"method": "lagkv", "budget": 8, "sinks": 0, "lag_size": 7, "positions": "cache"},
        lambda n: Rule("lag", [8, 8], 4, recents=[0] * 2, lag=7, in_cache=True),
    ),
    "random": (
        {"method": "random", "budget": 12, "recent": 2, "seed": 7, "prompts": "streamed"},
        lambda n: Rule("random", [12, 12], 4, recents=[2] * 2, whole=False, random=random_number),
    ),
    "vatp": (
        {"method": "vatp", "budget": 12, "recent": 4, "sinks": 1},
        lambda n: Rule("sums times values", [12, 12], 4, recents=[4] * 2, sinks=1),
    ),
    "window": (
        {"method": "window", "budget": 8, "interval": 1, "prompts": "streamed"},
        lambda n: Rule("age", [8, 8], 1, recents=[8] * 2, whole=False),
    ),
    "streaming_llm": (
        {"method": "streaming_llm", "budget": 8, "sinks": 2, "interval": 1, "prompts": "streamed"},
        lambda n: Rule("age", [8, 8], 1, recents=[6] * 2, sinks=2, whole=False, in_cache=True),
    ),
}

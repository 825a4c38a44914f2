"""Settings of eviction methods, as random simulations of an engine draw them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.kv.eviction import EVICTION_METHODS
from ksana_jax.kv.eviction.base import EvictionMethod
from tests.fake_network import HEAD_DIM
from tests.statistics_files import setting_of

# An oracle serves one text, that it has seen before.
METHODS = sorted(EVICTION_METHODS.keys() - {"oracle", "mikv"})
# Drawn by a generator of its own in place of some others, so that their draws stay as they were without it.
MERGING, MEASURING = "d2o", "cake"
# Put around some others, as which it moves; the fake pool drops what it would keep in fewer bits.
DEMOTING = "mikv"
# They observe by a window of recent tokens.
WINDOWED = ("snapkv", "chunkkv", "rkv", "criticalkv", "adakv", "prefill_decode")
# They have one value of `prompts` each.
PROMPTS = {"adakv": "once", "cake": "once", "kvzip": "once", "prefill_decode": "whole"}
# They compare rotated queries and keys.
ROTATED = ("qfilter", "expected_attention", "expected_attention_stats")


def drawn_eviction(
    rng: random.Random, patterns: Sequence[AttentionPattern], block_size: int
) -> tuple[tuple[str, Any], ...]:
    """Settings of any method, with budgets that a text of 40 tokens exceeds."""
    name = rng.choice([name for name in METHODS if name not in (MERGING, MEASURING)])
    pyramid = rng.random() < 0.3
    apart = pyramid or any(pattern != FULL for pattern in patterns)
    interval = rng.choice([None, block_size, 2 * block_size] if apart else [None, 1, 2, 5])
    sinks = rng.choice([0, 0, 1, 3])
    least = sinks + (interval or block_size)
    found = {
        "method": name,
        "budget": rng.choice([0.2, 0.5, 1.0, least, least + 1, least + 4, least + 9, least + 16]),
        "recent": rng.choice([1, 2, 8] if name in WINDOWED else [0, 0.3, 0.5, 1.0, 2]),
        "sinks": sinks,
        "interval": interval,
        "prompts": rng.choice(["whole", "once", "streamed"]),
        "layers": "pyramid" if pyramid else "uniform",
        "positions": "absolute" if name in ROTATED else rng.choice(["absolute", "cache"]),
    }
    heads = ModelConfig(num_layers=1, num_kv_heads=1, head_dim=HEAD_DIM).num_heads
    found |= setting_of(name, (len(patterns), heads, 1, HEAD_DIM))
    if pyramid:
        found["beta"] = rng.choice([2, 20, 2.5])
    if name == "adakv" or (name != "keyformer" and rng.random() < 0.3):
        found |= {"memory": "simulated", "positions": "absolute"}
    found["prompts"] = PROMPTS.get(name, found["prompts"])
    probing = (("method", "kvzip"), ("instruction", (5,)))
    inside = rng.choice([*((("method", of),) for of in ("snapkv", "knorm", "h2o")), probing])
    own = {
        "adakv": {"of": inside, "alpha": rng.choice([0, 0.2, 1]), "layerwise": apart},
        "h2o": {"normalised": rng.random() < 0.5},
        "keyformer": {"steps": rng.choice([1, 7]), "seed": rng.choice([0, 5])},
        "kvzip": {"instruction": rng.choice([(), (5,), (3, 50, 7)])},
        "lagkv": {"lag_size": rng.choice([1, 2, 5, 16])},
        "chunkkv": {"chunk_size": rng.choice([1, 2, 7]), "kernel": rng.choice([1, 3])},
        "rkv": {"mix_lambda": rng.choice([0.1, 0.9]), "threshold": rng.choice([0, 0.5])},
        "snapkv": {"kernel": rng.choice([1, 3, 5]), "pooling": rng.choice(["avg", "max"])},
        "random": {"seed": rng.choice([0, 5])},
    }
    if name not in PROMPTS and "memory" not in found and random.Random(str(found)).random() < 0.15:
        common = [field.name for field in dataclasses.fields(EvictionMethod) if field.name in found]
        return ("method", MERGING), *((key, found[key]) for key in common)
    if name in WINDOWED[:4] and "memory" not in found and random.Random(str(found)).random() < 0.4:
        found, name = found | measured(found, block_size) | {"method": MEASURING}, "snapkv"
    found |= own.get(name, {})
    if name == "adakv" and inside != probing and random.Random(str(found)).random() < 0.5:
        found |= measured(found, block_size) | {"memory": "freed", "layerwise": False}
        found["recent"] = found["recent"] if isinstance(found["recent"], int) else 1
    return tuple(found.items())


def measured(found: dict[str, Any], block_size: int) -> dict[str, Any]:
    """What else the settings of a method need to measure its budgets: each layer takes its blocks for itself."""
    interval = None if (found["interval"] or block_size) % block_size else found["interval"]
    budget, least = found["budget"], found["sinks"] + (interval or block_size)
    needed = {"interval": interval, "prompts": "once", "layers": "uniform", "beta": 20}
    return needed | {"budget": max(budget, least) if isinstance(budget, int) else budget}


def demoting(setting: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Returns some settings with their method inside of one that keeps tokens in fewer bits."""
    found = dict(setting)
    inside = {key: found[key] for key in ("method", "normalised") if key in found}
    if found["method"] not in ("h2o", "knorm", "keydiff", "tova") or random.Random(str(setting)).random() < 0.3:
        return setting
    found = {key: value for key, value in found.items() if key not in inside}
    found |= {"method": DEMOTING, "of": tuple(inside.items()), "memory": "freed", "positions": "absolute"}
    return tuple(found.items())

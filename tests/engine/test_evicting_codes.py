"""Engines that evict tokens whose keys and values are codes of whole blocks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.codecs.base import BlockCodec
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.kv.moves import Evictions
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.runner.evicting import evict
from tests.engine.small import VOCAB, make_llm, model
from tests.soak import soak_unless

RNG = np.random.default_rng(6)
PROMPTS = [{"prompt_token_ids": RNG.integers(2, VOCAB, n)} for n in (3, 21, 38, 9)]
ASKED = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0)
SIZE, RESIDUAL = 4, 3
TIGHT = {"block_size": SIZE, "num_blocks": 160, "max_num_batched_tokens": 7, "query_tile": 4}
LOSSY = {"k": "kivi4", "v": "kivi2", "residual": RESIDUAL}


@dataclasses.dataclass(frozen=True)
class Lossless(BlockCodec):
    """Stores blocks in float32."""

    def arrays(self, block_size: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"x": ((block_size, head_dim), "float32")}

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        return {"x": x}

    def decode(self, stored: Any, xp: Any) -> Any:
        return stored["x"]


EXACTLY = dict.fromkeys(("k", "v"), f"{__name__}:Lossless") | {"residual": RESIDUAL, "first": 2}


def evicts(method: str, **given: Any) -> dict[str, Any]:
    # Rows evict at 16, 20, ... tokens: all of them are in full blocks.
    settings = {"method": method, "budget": 15, "sinks": 2, "recent": RESIDUAL + SIZE - 2, "prompts": "streamed"}
    return {"kv_eviction": settings | given}


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def logprobs(outputs) -> np.ndarray:
    entries = [e for o in outputs for e in [*(o.prompt_logprobs or [])[1:], *(o.outputs[0].logprobs or [])]]
    return np.array([next(iter(entry.values())).logprob for entry in entries])


@pytest.mark.parametrize(
    "settings",
    soak_unless(
        lambda settings: settings["kv_eviction"]["method"] in ("snapkv", "streaming_llm"),
        [
            evicts("h2o"),
            evicts("h2o", prompts="whole"),
            evicts("snapkv"),
            evicts("keydiff"),
            evicts("streaming_llm"),
            evicts("expected_attention", sinks=4, covariance=False),
        ],
    ),
    ids=lambda settings: " ".join(map(str, list(settings["kv_eviction"].values())[::2])),
)
def test_without_loss_a_block_codec_evicts_what_exact_keys_and_values_do(settings):
    [expected, found] = (
        make_llm(**settings, **TIGHT, kv_cache_dtype=dtype).generate(PROMPTS, ASKED) for dtype in ("f32", EXACTLY)
    )
    assert tokens_of(found) == tokens_of(expected)
    # Sums in another order: codes and exact tokens are attended to apart.
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=1e-4)


def test_moved_tokens_are_decoded_and_encoded_again_in_whole_blocks():
    eviction = read_eviction(evicts("knorm", sinks=SIZE)["kv_eviction"])
    layout = layout_of(model()[0], dtype=LOSSY, block_size=SIZE, eviction=eviction, exact_dtype="f32")
    assert layout.sealed is not None and eviction is not None
    sealing, h = layout.sealed.sealing, layout.sealed.head_dim
    layers, heads, table = layout.sealed.num_layers, layout.num_kv_heads, np.array([[7, 3, 0, 5, 8, 2]], np.int32)
    k, v = np.random.default_rng(2).normal(size=(2, layers, heads, 6, SIZE, h)).astype(np.float32)
    codes = sealing.encoded(k, v, np)  # [L, K, P, size]
    cache = make_cache(layout, 9)
    size = codes.shape[-1]
    stored = np.array(cache.kv)
    for layer, head in np.ndindex(layers, heads):
        stored[table[0], 0, 0, head, layer * size : (layer + 1) * size] = codes[layer, head]
    # Of 22 tokens 8 go; 4 are sinks, and the newest 5 and the 2 of the open block stay.
    counts = (np.array([n], np.int32) for n in (22, 14, SIZE, 7, 22, 0, 22))
    asked = Evictions(table, table, *counts)
    found = jax.jit(functools.partial(evict, method=eviction))(cache.with_kv(jnp.asarray(stored)), asked)
    seen = [x.reshape(layers, heads, -1, h) for x in sealing.decoded(codes, SIZE, h, np)]
    for layer, head in np.ndindex(layers, heads):
        norms = np.linalg.norm(seen[0][layer, head], axis=-1)
        kept = sorted([*range(SIZE), *(SIZE + np.argsort(norms[SIZE:15])[:3]), *range(15, 20)])
        expected = [codes[layer, head, 0]]
        for start in (4, 8):
            tokens = kept[start : start + SIZE]
            again = sealing.encoded(*(x[layer, head, tokens] for x in seen), np)
            is_moved_whole = tokens[0] % SIZE == 0 and tokens == list(range(tokens[0], tokens[0] + SIZE))
            expected.append(codes[layer, head, tokens[0] // SIZE] if is_moved_whole else again)
        got = np.array(found.kv)[table[0, :3], 0, 0, head, layer * size : (layer + 1) * size]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("method", ["h2o", pytest.param("keydiff", marks=pytest.mark.soak)])
def test_tokens_do_not_depend_on_chunks_the_prefix_cache_or_preemption(method):
    settings = evicts(method, budget=0.6, prompts="whole") | {"kv_cache_dtype": LOSSY}
    expected = tokens_of(make_llm(**settings, **TIGHT).generate(PROMPTS, ASKED))
    plain = dataclasses.replace(ASKED, logprobs=None, prompt_logprobs=None)
    cached = make_llm(**settings, **TIGHT | {"max_num_batched_tokens": 32}, enable_prefix_caching=True)
    assert tokens_of(cached.generate(PROMPTS, plain)) == expected
    again = cached.generate(PROMPTS, plain)
    assert tokens_of(again) == expected and sum(output.num_cached_tokens for output in again) > 40
    small = make_llm(**settings, **TIGHT | {"num_blocks": 22})
    assert tokens_of(small.generate(PROMPTS, plain)) == expected
    assert small.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (evicts("d2o"), "D2O does not go with kv_cache_dtype .*: tokens that move are decoded"),
        (evicts("h2o", sinks=0) | {"kv_cache_dtype": LOSSY | {"first": 2}}, "sinks is 0, .* first 2 exact"),
        (evicts("h2o", budget=8), "budget of 8 tokens is too small: 2 sinks and .* 4 and 5 exact tokens need 11"),
        (evicts("h2o") | {"kv_cache_dtype": "kvquant4"}, "kvquant4.* 'absolute': .* no position to rotate by"),
    ],
)
def test_what_cannot_be_moved_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(**{"kv_cache_dtype": LOSSY} | settings, **TIGHT)

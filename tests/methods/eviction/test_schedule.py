"""When rows evict, against counting token by token; and settings that cannot be."""

import dataclasses

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.patterns import FAR, AttentionPattern
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.eviction import EVICTION_METHODS, read_eviction
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.kv.model_layout import layout_of


def counted(budget: int, interval: int, num_prompt: int, length: int, whole: bool, once: bool) -> tuple[int, list[int]]:
    """Number of evicted tokens of `length`, and the lengths of evictions, by counting."""
    cached, evicted, at = 0, 0, []
    for t in range(1, length + 1):
        cached += 1
        if cached > budget and not (whole and t < num_prompt) and not (once and t != num_prompt):
            while cached > budget:
                cached, evicted = cached - interval, evicted + interval
            at.append(t)
    return evicted, at


@pytest.mark.parametrize("name, prompts", [("h2o", "whole"), ("h2o", "streamed"), ("h2o", "once"), ("snapkv", "whole")])
@pytest.mark.parametrize("interval", [1, 3, 4])
def test_evictions_are_those_of_counting(name, prompts, interval):
    method = read_eviction({"method": name, "budget": 9, "interval": interval, "prompts": prompts})
    schedule, longest = EvictionSchedule(method, (1.0,), 4), 60
    for num_prompt in (1, 8, 9, 10, 23, 59):
        rows = np.array([num_prompt])
        evicted, at = counted(9, interval, num_prompt, longest, prompts == "whole", method.once)
        seen, length = [], 0
        while (following := int(schedule.next_at(np.array([length]), rows)[0, 0])) <= longest:
            assert following > length
            seen.append(length := following)
        assert seen == at
        assert schedule.num_evicted(np.array([longest]), rows)[0, 0] == evicted
        most = max(
            t - counted(9, interval, num_prompt, t - 1, prompts == "whole", method.once)[0] for t in range(1, 61)
        )
        assert most <= schedule.max_cached(0, longest, num_prompt)


def test_budgets_are_shares_of_the_prompt_or_numbers_and_hold_an_interval():
    method = read_eviction({"method": "h2o", "budget": 0.25, "sinks": 2, "recent": 0.5, "layers": "pyramid"})
    schedule = EvictionSchedule(method, (*method.shares(3), None), 4)
    # 25 tokens, of which 2 sinks and 3 to which an eviction may reduce them; 20 are shared out: 39, 20 and 1.
    assert schedule.budgets(np.array([100, 8])).tolist() == [[44, 6], [25, 6], [6, 6], [FAR, FAR]]
    assert schedule.num_recent(schedule.budgets(np.array([100])))[:3].tolist() == [[22], [12], [3]]
    assert schedule.next_at(np.array([0]), np.array([8]))[3, 0] == FAR


def pyramid(name: str = "snapkv", num_layers: int = 5, **settings) -> EvictionSchedule:
    method = read_eviction({"method": name, "layers": "pyramid", "interval": 1} | settings)
    return EvictionSchedule(method, method.shares(num_layers), 1)


@pytest.mark.parametrize("beta", [1, 2, 7.5, 20])
@pytest.mark.parametrize(("capacity", "prompt"), [(64, 1000), (300, 1000), (300, 500), (300, 320), (300, 250)])
def test_a_pyramid_has_the_budgets_of_pyramidkv(capacity, prompt, beta):
    """PyramidKVCluster of KVCache-Factory, in fractions: a line from `most` to `fewest`, and the window beside."""
    window, num_layers = 32, 5
    fewest = (capacity - window) / beta
    most = 2 * (capacity - window) - fewest
    if most >= prompt - window:
        most, fewest = prompt - window, 2 * (capacity - window) - (prompt - window)
    if prompt < capacity:  # evicts nothing
        most = fewest = capacity - window
    wanted = [most - layer * (most - fewest) / (num_layers - 1) + window for layer in range(num_layers)]
    found = pyramid(budget=capacity, recent=window, beta=beta).budgets(np.array([prompt]))[:, 0]
    np.testing.assert_allclose(found, wanted, atol=0.5 + 1e-9)  # whole tokens


@pytest.mark.parametrize("name", ["snapkv", "h2o", "knorm"])
@pytest.mark.parametrize("budget", [5, 16, 40, 0.05, 0.2, 0.5, 0.8, 1.0])
def test_a_pyramid_takes_as_many_tokens_as_equal_budgets(name, budget):
    prompts = np.array([8, 50, 51, 200, 1000])
    for layers, interval, beta in ((2, 1, 20), (5, 4, 20), (32, 4, 3)):
        schedule = pyramid(name, layers, budget=budget, recent=8, interval=interval, beta=beta)
        found = schedule.budgets(prompts)
        base = np.maximum(budget * prompts if isinstance(budget, float) else budget, schedule.least)
        np.testing.assert_allclose(found.mean(axis=0), base, atol=0.5 + 1e-9)  # each is rounded
        assert (np.diff(found, axis=0) <= 0).all() and (found >= schedule.least).all()
        if isinstance(budget, float):
            assert (found <= np.maximum(prompts, schedule.least)).all()


def test_only_layers_that_evict_share_a_pyramid():
    window = AttentionPattern(window=16)
    setting = {"method": "h2o", "budget": 8, "layers": "pyramid", "beta": 4}
    mixed = layout(setting, (window, AttentionPattern(), window, AttentionPattern()))
    assert sorted(group.share for group in mixed.groups if group.share is not None) == [0.25, 1.75]
    for other in ({"beta": 8}, {"layers": "uniform", "beta": 20}):
        with pytest.raises(ConfigError, match="make an engine for it"):
            mixed.with_eviction(read_eviction(setting | other))


MODEL = ModelConfig(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8)


def layout(setting, patterns=None, block_size=4):
    method = read_eviction(setting)
    return layout_of(MODEL, patterns, dtype="bf16", block_size=block_size, eviction=method)


def test_bytes_of_a_block_hold_what_the_method_stores():
    plain = layout_of(MODEL, dtype="bf16", block_size=4).block_bytes
    of_token = 4 * 2 * 4 * 4  # layers, kv heads, tokens, bytes
    assert layout({"method": "knorm"}).block_bytes == plain
    assert layout({"method": "h2o"}).block_bytes == plain + of_token
    assert layout({"method": "h2o", "normalised": True}).block_bytes == plain + 2 * of_token


def test_layers_with_a_window_keep_it_and_others_evict():
    window = AttentionPattern(window=16)
    mixed = layout({"method": "h2o", "budget": 8}, (window, window, AttentionPattern(), AttentionPattern()))
    assert [group.share for group in mixed.groups] == [None, 1.0]
    assert mixed.blocks_of(100, num_prompt=1) == window_blocks(window) + 3  # 9 tokens at most
    with pytest.raises(ConfigError, match="their pattern cannot change"):
        mixed.with_patterns((window,) * 4)
    with pytest.raises(ConfigError, match="does not go with patterns without a layer of full attention"):
        layout({"method": "h2o"}, (window,) * 4)


def window_blocks(pattern: AttentionPattern) -> int:
    plain = layout_of(MODEL, (pattern,) * 4, dtype="bf16", block_size=4)
    return plain.blocks_of(100)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("h2o", "must be None or a dict"),
        ({"budget": 3}, "must be None or a dict"),
        ({"method": "h20"}, "kv_eviction method is 'h20', must be one of h2o, keyformer"),
        ({"method": "h2o", "buget": 3}, "has no setting 'buget'; the nearest is 'budget'"),
        ({"method": "h2o", "budget": 0.0}, "budget is 0.0"),
        ({"method": "h2o", "budget": 1.5}, "budget is 1.5"),
        ({"method": "h2o", "budget": 0}, "budget is 0, must be an integer from 1"),
        ({"method": "h2o", "recent": -1}, "recent is -1"),
        ({"method": "h2o", "interval": 0}, "interval is 0"),
        ({"method": "h2o", "layers": "pyramid", "beta": 0.5}, "H2O: beta is 0.5, must be a finite number from 1"),
        ({"method": "h2o", "layers": "pyramid", "beta": None}, "H2O: beta is None"),
        ({"method": "h2o", "beta": 4}, "H2O: beta is 4, but layers is uniform: only a pyramid has a beta"),
        ({"method": "h2o", "prompts": "all"}, "must be one of whole, once, streamed"),
        ({"method": "chunkkv", "chunk_size": 0}, "ChunkKV: chunk_size is 0, must be an integer from 1"),
        ({"method": "rkv", "recent": 0.5}, "RKV: recent is 0.5, must be an integer"),
        ({"method": "rkv", "mix_lambda": 1.5}, "RKV: mix_lambda is 1.5, must be a number from 0 to 1"),
        ({"method": "rkv", "threshold": 2}, "RKV: threshold is 2, must be a number from 0 to 1"),
        ({"method": "d2o", "smoothing": 2}, "D2O: smoothing is 2, must be a number from 0 to 1"),
        ({"method": "d2o", "memory": "simulated"}, "hides evicted tokens, but the method merges them into others"),
        ({"method": "lagkv", "lag_size": 0}, "LagKV: lag_size is 0, must be an integer from 1"),
        ({"method": "expected_attention", "future": 2**30}, "future is 1,073,741,824, must be an integer from 1 to 16"),
        ({"method": "snapkv", "kernel": 4}, "kernel is 4, must be odd"),
        ({"method": "snapkv", "kernel": 2**30 + 1}, "kernel is 1,073,741,825, must be an integer from 1 to 255"),
        ({"method": "snapkv", "recent": 0.5}, "recent is 0.5, must be an integer"),
        ({"method": "snapkv", "kernel": "x"}, "kv_eviction 'snapkv': kernel is 'x', must be an integer"),
        ({"method": "chunkkv", "kernel": [3]}, r"kernel is \[3\], must be an integer"),
        ({"method": "qfilter", "statistics": 3}, "statistics is 3, must be a text or None"),
        ({"method": "ksana_jax.core.units:byte_size"}, "which is not a subclass of EvictionMethod"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ConfigError, match=message):
        read_eviction(setting)


@pytest.mark.parametrize("name", EVICTION_METHODS)
def test_budgets_change_nothing_that_is_compiled(name):
    one, other = (read_eviction({"method": name, "budget": budget, "interval": 2}) for budget in (0.1, 40))
    assert one != other and one.compiled == other.compiled


def test_a_budget_without_room_for_an_interval_is_refused():
    with pytest.raises(ConfigError, match="budget of 3 tokens is too small: 1 sinks and an interval of 4 need 5"):
        layout({"method": "h2o", "budget": 3, "sinks": 1})
    with pytest.raises(ConfigError, match="interval is 6, must be a multiple of block_size 4"):
        layout({"method": "h2o", "budget": 20, "interval": 6, "layers": "pyramid"})


def test_what_it_cannot_be_combined_with_is_said():
    with pytest.raises(ConfigError, match="kv_eviction"):
        EngineConfig(kv_eviction={"method": "h2o"}, shared_prefix_attention=True)


def test_layers_in_full_precision_evict_too():
    """Scores and text positions cover all layers; keys and values are in one of two leaves."""
    config = EngineConfig(block_size=4, kv_cache_dtype="int8", kv_full_precision_layers=(2,))
    config = dataclasses.replace(config, kv_eviction={"method": "h2o", "normalised": True})
    found = make_layout(MODEL, (AttentionPattern(),) * 4, config)
    assert [(group.layers, group.share) for group in found.groups] == [((2, 0, 1, 3), 1.0)]
    assert {leaf.name: leaf.shape[0] for leaf in found.leaves} == {
        "kv": 3,
        "scale": 3,
        "exact": 1,
        "score": 4,
        "text_position": 4,
    }

"""Layers that keep other positions than their neighbours have separate blocks: half of the layers of this model see
all, half a window, and the pool holds no more than that. Tokens equal the dense float64 model's, whatever happened to
the blocks."""

import dataclasses
import functools

import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.patterns import FULL
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.groups import group_layers
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.models.params import init_params
from tests.engine.small import assert_idle, model, tokens_of
from tests.engine.two_texts import BLOCK, GREEDY, LONGEST, PROMPTS, SETTINGS, TEXT, dense_greedy
from tests.reference import reference_logprobs

WINDOW = 12
SLIDING = AttentionPattern(window=WINDOW)
PATTERN = (SLIDING, FULL, SLIDING, FULL)


@functools.cache
def alternating():
    """The tiny model with four layers."""
    config = dataclasses.replace(model()[0], num_layers=4, max_position=128)
    return config, init_params(config, seed=3, std=0.4)


_programs: dict = {}


def make(**settings) -> LLM:
    config, params = alternating()
    llm = LLM.from_params(config, params, pattern=PATTERN, **SETTINGS | settings)
    key = settings.get("num_blocks"), settings.get("shared_prefix_attention")
    llm.runner._compiled = _programs.setdefault(key, llm.runner._compiled)
    return llm


@functools.cache
def expected(count: int = 16) -> list[list[int]]:
    return dense_greedy(*alternating(), PATTERN, count)


def test_log_probabilities_are_those_of_the_dense_model_and_the_pool_holds_half_of_full_and_window():
    llm, held = make(num_blocks=60), []
    llm.engine.observers.append(lambda engine: held.append(engine.records[-1].blocks_in_use))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    text = TEXT[: LONGEST - 1]
    [output] = llm.generate({"prompt_token_ids": text}, asked)
    got = [entry[int(token)].logprob for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
    config, params = alternating()
    reference = reference_logprobs(params, config, text, PATTERN)[np.arange(len(text) - 1), text[1:]]
    # float32 against float64 through four layers.
    np.testing.assert_allclose(got, reference, atol=1e-4)
    layout = llm.runner.layout
    assert [group.layers for group in layout.groups] == [(0, 2), (1, 3)]
    whole = LONGEST // BLOCK
    # A window touches a block more than it fills; the pool of one group for all layers would hold `2 * whole`.
    assert max(held[-3:]) <= whole + WINDOW // BLOCK + 1 < 0.6 * (2 * whole)
    assert (
        layout.block_bytes * 2 * len(layout.groups)
        == layout_of(
            dataclasses.replace(config, num_layers=8),
            dtype="f32",
            block_size=BLOCK,
            as_bits=tuning("cpu").stored_as_bits,
        ).block_bytes
    )


@pytest.mark.parametrize("shared_prefix_attention", [False, True])
def test_prefixes_are_found_where_every_group_has_what_later_queries_see(shared_prefix_attention):
    llm = make(num_blocks=60, enable_prefix_caching=True, shared_prefix_attention=shared_prefix_attention)
    assert [tokens_of(llm, [p], GREEDY)[0] for p in PROMPTS] == expected()
    counters = llm.engine.memory.counters
    # The second prompt takes 40 tokens over: all blocks of the full layers, and the window's of the sliding ones.
    assert (counters.hit_tokens, counters.hits_device) == (40, 10 + WINDOW // BLOCK)
    assert tokens_of(llm, PROMPTS, GREEDY) == expected()
    assert counters.hit_tokens == 40 + 56 + 48


def test_preempted_rows_are_swapped_and_come_back():
    # Together the two need 36 + 8 blocks.
    llm = make(num_blocks=34, host_cache_bytes=2**18, preempt="swap")
    assert tokens_of(llm, PROMPTS, GREEDY) == expected()
    counters = llm.engine.memory.counters
    assert counters.swapped_out == counters.swapped_in > 0


def test_prefixes_of_all_groups_survive_a_restart_on_disk(tmp_path):
    settings = {
        "num_blocks": 60,
        "enable_prefix_caching": True,
        "host_cache_bytes": 2**18,
        "disk_cache_dir": str(tmp_path),
        "cache_write": "through",
    }
    with make(**settings) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == expected()
    with make(**settings) as llm:
        llm.engine.memory.disk_reads._timeout_s = 60.0
        assert tokens_of(llm, PROMPTS, GREEDY) == expected()
        # Each takes all full blocks of its prompt over: 14 and 12 of the full layers, three each of the sliding ones,
        # and the 10 blocks that both begin with are read once.
        assert llm.engine.memory.disk.counters.read == 14 + 2 + 3 + 3
        assert llm.engine.memory.counters.hit_tokens == 56 + 48


def test_completions_of_one_prompt_and_beams_share_blocks_of_each_group_and_copy_what_they_write_to():
    llm, (config, params) = make(num_blocks=60), alternating()
    assert tokens_of(llm, PROMPTS[:1], dataclasses.replace(GREEDY, n=2)) == [expected()[0]] * 2
    assert llm.engine.memory.counters.copied == 2, "the last block of each group, for one of the two"
    asked = SamplingParams(temperature=0, beam_width=2, max_tokens=6, ignore_eos=True, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0][:58]}, asked)
    assert_idle(llm)
    assert llm.engine.memory.counters.copied > 2
    for beam in output.outputs:
        text = np.array(PROMPTS[0][:58] + beam.token_ids)
        dense = reference_logprobs(params, config, text, PATTERN)[np.arange(57, 63), beam.token_ids]
        assert beam.cumulative_logprob == pytest.approx(dense.sum(), abs=1e-3)


def test_another_pattern_keeps_the_groups_and_stays_right():
    llm, (config, params) = make(num_blocks=60), alternating()
    for pattern in (FULL, (SLIDING, SLIDING, FULL, AttentionPattern(window=5, num_sinks=1, sink_position="absolute"))):
        llm.set_pattern(pattern)
        [tokens] = tokens_of(llm, PROMPTS[:1], GREEDY)
        dense = reference_logprobs(params, config, np.array(PROMPTS[0] + tokens), pattern)
        assert tokens == dense[59:-1].argmax(-1).tolist()
    assert [group.live.window for group in llm.engine.scheduler.layout.groups] == [None, WINDOW]


@pytest.mark.parametrize(
    ("patterns", "layers"),
    [
        ((FULL,) * 3, [(0, 1, 2)]),
        ((SLIDING, FULL, SLIDING), [(0,), (2,), (1,)]),
        ((SLIDING, SLIDING, FULL) * 4, [(0, 1, 3, 4), (6, 7, 9, 10), (2, 5, 8, 11)]),
        # 22 sliding layers: five groups of four and one of two.
        (((SLIDING,) * 5 + (FULL,)) * 4 + (SLIDING,) * 2, 7),
        # 17 and 16: the second has one layer's room to spare, which is less than 33 groups.
        ((SLIDING,) * 17 + (FULL,) * 16, 2),
    ],
)
def test_layers_are_grouped_by_what_they_keep_equally_many_in_each(patterns, layers):
    groups = group_layers(patterns)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(patterns)))
    assert len({len(group.layers) for group in groups[:-1]}) <= 2
    if isinstance(layers, int):
        assert len(groups) == layers
    else:
        assert [group.layers for group in groups] == layers

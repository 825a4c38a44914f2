"""Hidden tokens: memory is simulated, and texts go on as after real evictions."""

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.reading import simulated_bytes
from tests.engine.small import VOCAB, make_llm
from tests.soak import soak_unless

SIMULATED = {"memory": "simulated"}
# Tokens of a prompt differ: equal ones have keys of equal norm in the first layer.
RNG = np.random.default_rng(5)
PROMPTS = [(2 + RNG.permutation(VOCAB - 2)[:length]).tolist() for length in (30, 13, 9)]
CASES = {
    "h2o": {"method": "h2o", "budget": 12, "recent": 0.5, "interval": 3},
    "h2o of means, streamed": {
        "method": "h2o",
        "budget": 9,
        "recent": 2,
        "sinks": 1,
        "interval": 1,
        "prompts": "streamed",
        "normalised": True,
    },
    "tova": {"method": "tova", "budget": 10, "interval": 1, "prompts": "streamed"},
    "snapkv": {"method": "snapkv", "budget": 8, "recent": 3, "interval": 1},
    "snapkv, streamed": {"method": "snapkv", "budget": 12, "recent": 3, "prompts": "streamed"},
    "pyramidkv": {"method": "snapkv", "budget": 14, "recent": 3, "layers": "pyramid"},
    "chunkkv": {"method": "chunkkv", "budget": 12, "recent": 4, "chunk_size": 3, "sinks": 1, "prompts": "streamed"},
    "kvzip": {"method": "kvzip", "budget": 8, "sinks": 1, "interval": 1, "instruction": [7, 3, 5]},
    "rkv": {"method": "rkv", "budget": 12, "recent": 3, "kernel": 3, "interval": 3},
    "knorm": {"method": "knorm", "budget": 7, "interval": 2, "prompts": "streamed"},
    "keydiff": {"method": "keydiff", "budget": 0.5, "recent": 2},
    "lagkv": {"method": "lagkv", "budget": 9, "sinks": 1, "lag_size": 3, "interval": 1, "prompts": "streamed"},
    "vatp": {"method": "vatp", "budget": 12, "sinks": 2, "recent": 2, "prompts": "once"},
    "random": {"method": "random", "budget": 8, "recent": 2, "prompts": "streamed"},
    "window": {"method": "window", "budget": 8, "interval": 1, "prompts": "streamed"},
    "expected_attention": {
        "method": "expected_attention",
        "budget": 9,
        "sinks": 1,
        "interval": 3,
        "prompts": "streamed",
    },
}


def written(setting, **given):
    asked = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    llm = make_llm(kv_eviction=setting, **{"block_size": 4, "num_blocks": 32} | given)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, asked)]
    tokens = [output.token_ids for output in outputs]
    return tokens, np.array([[step[i].logprob for step, i in zip(o.logprobs, o.token_ids)] for o in outputs])


@pytest.mark.parametrize("name", soak_unless(lambda name: name in ("h2o", "expected_attention"), CASES))
def test_hidden_tokens_give_the_text_that_evicted_ones_give(name):
    (freed, expected), (hidden, found) = written(CASES[name]), written(CASES[name] | SIMULATED)
    assert hidden == freed
    # The same numbers in float32, added up over slots in other places.
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"method": "h2o", "memory": "none"}, "memory is 'none', must be"),
        ({"method": "h2o", "positions": "cache"} | SIMULATED, "hidden tokens keep their places"),
        ({"method": "keyformer"} | SIMULATED, "its logits depend on a token's place"),
        ({"method": "adakv", "of": {"method": "tova"}, "memory": "freed"}, "but TOVA compares KV heads"),
        ({"method": "adakv", "of": {"method": "h2o"}, "prompts": "streamed"}, "prompts is 'streamed', must be 'once'"),
        ({"method": "adakv", "alpha": 2}, "alpha is 2"),
        ({"method": "adakv", "layerwise": 0}, "layerwise is 0"),
        ({"method": "adakv", "layerwise": False, "layers": "pyramid"}, "one budget for all layers has no pyramid"),
        ({"method": "adakv", "of": {"method": "kvzip"}, "prompts": "whole"}, "prompts is 'whole', must be 'once'"),
    ],
)
def test_what_cannot_be_hidden_is_refused_in_a_sentence(setting, said):
    with pytest.raises(ConfigError, match=said):
        read_eviction(setting)


def test_layers_of_different_patterns_cannot_share_one_budget():
    setting = {"method": "adakv", "of": {"method": "knorm"}, "layerwise": False, "interval": 4}
    with pytest.raises(ConfigError, match="layerwise is false, but there are 2 groups of layers"):
        make_llm(kv_eviction=setting, block_size=4, num_blocks=32, pattern=["full", {"window": 8}])


def test_simulated_bytes_are_those_of_an_engine_that_frees():
    setting = {"method": "snapkv", "budget": 14, "recent": 3, "layers": "pyramid", "interval": 4}
    freed, hidden = (make_llm(kv_eviction=s, block_size=4, num_blocks=32) for s in (setting, setting | SIMULATED))
    layout, plain = (llm.engine.scheduler.layout for llm in (hidden, freed))
    held = -(-(40 - plain.eviction.num_evicted(np.array([40]), np.array([30]))[:, 0]) // 4)
    assert simulated_bytes(layout, 40, 30) == plain.block_bytes * held.sum()
    assert layout.blocks_of(40, num_prompt=30) == 2 * 10 > held.sum()
    # No kernel reads what is hidden.
    assert hidden.engine.executor.implementation.name == "xla"

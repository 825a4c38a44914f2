"""Eviction on several devices, each with some heads: tokens are those of one device."""

import pytest

from tests.sharding.on_devices.engines import NUM_TOKENS, PROMPTS, asked, make_llm
from tests.soak import soak_unless

METHODS = {
    "h2o": {"recent": 0.5},
    "d2o": {"sinks": 1, "smoothing": 0.5},
    "mikv": {"sinks": 1, "recent": 2, "codec": "fp8_e5m2"},
    "snapkv": {"recent": 2, "kernel": 1, "prompts": "streamed"},  # windows of a kernel over few tokens have equal sums
    "keydiff": {"recent": 2},
    "rkv": {"recent": 3},
    "lagkv": {"sinks": 1, "lag_size": 4},
    "streaming_llm": {"sinks": 2},
}


@pytest.mark.parametrize("name", soak_unless("d2o".__eq__, METHODS))
def test_tokens_are_those_of_one_device(name):
    """Of eight kv heads, each device has two."""
    setting = {"method": name, "budget": 8, "interval": 4} | METHODS[name]
    more = {"kv_eviction": setting, "block_size": 4, "num_blocks": 64}
    found = []
    for num_devices in (1, 4):
        llm = make_llm("MHA", num_devices, **more)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, asked(temperature=0, logprobs=0))]
        assert llm.engine.memory.counters.evicted
        found.append([(one.token_ids, one.cumulative_logprob) for one in outputs])
    assert [ids for ids, _ in found[0]] == [ids for ids, _ in found[1]]
    # Sums over devices have another order: 1e-6 for each token.
    assert [x for _, x in found[0]] == pytest.approx([x for _, x in found[1]], abs=1e-4 * NUM_TOKENS)

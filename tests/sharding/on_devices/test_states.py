"""Recurrent layers whose heads or channels devices divide, and their states on devices, on the host and in files."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.core.config import ConfigError
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec, ShortConvSpec
from ksana_jax.engine.sessions import _copied
from ksana_jax.loading import load_config, load_model
from ksana_jax.loading.export import export_hf
from ksana_jax.models.joined import joined, separate
from ksana_jax.models.params import init_params
from ksana_jax.sharding.placing import place_on
from tests.golden.cases import golden_case
from tests.guessing import ANSWERS
from tests.machine import no_compiler
from tests.sharding.on_devices import engines
from tests.sharding.on_devices.engines import GREEDY, MHA, MIXED, PROMPTS, VOCAB, asked, make_llm, tokens_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Of two layers the first is recurrent. Four devices share two heads of keys, or one, with its norm. The eps bounds how
# far norms enlarge rounding.
KINDS = {
    "conv": ShortConvSpec((0,), 3, bias=True),
    "delta": DeltaRuleSpec((0,), 2, 8, 6, 4, eps=0.01),
    "by channel": DeltaRuleSpec((0,), 8, 8, 6, 4, eps=0.01, rank=12),
    "mamba": Mamba2Spec((0,), 1, 8, 6, 4, eps=0.01),
    "mamba in groups": Mamba2Spec((0,), 4, 8, 6, 4, bias=False, eps=0.01),
}
SMALL = {"num_blocks": 6, "host_cache_bytes": 2**20, "preempt": "swap", "enable_prefix_caching": True}
EVERY = {"state_snapshots": {"method": "every", "blocks": 1, "num_slots": 9}}


@pytest.fixture(autouse=True)
def models(monkeypatch):
    for name, spec in KINDS.items():
        monkeypatch.setitem(engines.MODELS, name, dataclasses.replace(MHA, num_kv_heads=2, recurrent=spec))


@functools.cache
def answers(name: str) -> list:
    """What one device computes, in chunks of 16 tokens and in batches."""
    return make_llm(name).generate(PROMPTS, asked(temperature=0, logprobs=2, prompt_logprobs=1))


def assert_equal(found: list, expected: list) -> None:
    one, other = ([p for output in outputs for p in logprobs_of(output)] for outputs in (found, expected))
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    # Sums of products in another order, through two layers: about 20 roundings of the largest float32 among them.
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * max(map(abs, other)))


def logprobs_of(output) -> list[float]:
    found = [*output.outputs[0].logprobs, *output.prompt_logprobs]
    return [some[token].logprob for some in found for token in sorted(some or ())]


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("delta", 4),
        ("mamba", 2),
        *(pytest.param(name, n, marks=pytest.mark.soak) for name in KINDS for n in (2, 4)),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_device(name, num_devices):
    llm = make_llm(name, num_devices)
    params = asked(temperature=0, logprobs=2, prompt_logprobs=1)
    assert_equal(llm.generate(PROMPTS, params), answers(name))
    states, whole = llm.runner.cache.states, make_llm(name).runner.cache.states
    for leaf, x in states.items():
        assert len(x.sharding.device_set) == num_devices and {shard.data.size for shard in x.addressable_shards} == {
            x.size // num_devices
        }
        assert x.shape == whole[leaf].shape or (leaf == "conv" and x.size > whole[leaf].size)
    native = llm.runner.network.states_in_place is not None
    assert native == (name != "mamba" and not no_compiler)


@pytest.mark.parametrize("name", ["mamba", *(pytest.param(name, marks=pytest.mark.soak) for name in KINDS)])
def test_states_are_swapped_cached_and_the_same_on_the_host(name):
    one, several = llms = [make_llm(name, n, **SMALL | EVERY) for n in (1, 4)]
    for _ in range(2):  # the second time from the cache
        assert tokens_of(several) == tokens_of(one)
    slots, found = several.engine.memory.states, []
    assert several.records[-1].num_preemptions > 0 and slots is not None and slots.own_counters.loaded > 0
    for llm in llms:
        [output], layout = llm.generate(PROMPTS[3:4], GREEDY), llm.engine.scheduler.layout.of_states
        session = _copied(llm.engine, output)
        assert layout is not None and session is not None
        found.append(layout.split(session.states))
    for leaf, x in found[0].items():
        np.testing.assert_allclose(x, found[1][leaf], atol=2e-5 * abs(x).max(), err_msg=leaf)
        assert abs(x).max() > 0.01


@pytest.mark.soak
def test_a_session_serves_any_number_of_devices(tmp_path):
    prompt, follows = PROMPTS[3], []
    for n in (4, 1, 2):
        llm = make_llm("delta", n, enable_prefix_caching=True, **EVERY)
        if n == 4:
            [output] = llm.generate([prompt], GREEDY)
            saved, text = (
                llm.save_session(output, tmp_path),
                [*prompt["prompt_token_ids"], *output.outputs[0].token_ids],
            )
        else:
            assert llm.restore_session(tmp_path) == saved == 32
        [output] = llm.generate([{"prompt_token_ids": [*text, 5]}], GREEDY)
        assert output.num_cached_tokens == 32
        follows.append(output.outputs[0].token_ids)
    assert follows[0] == follows[1] == follows[2]


@pytest.mark.parametrize("name", ["delta", *(pytest.param(name, marks=pytest.mark.soak) for name in KINDS)])
def test_states_follow_accepted_drafts(name):
    ANSWERS.clear()
    expected = tokens_of(make_llm(name))
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        ANSWERS[np.array(prompt["prompt_token_ids"], np.int32).tobytes()] = [tokens]
    drafts = {"method": "tests.guessing:Guessing", "guesses": "right at first", "vocab_size": VOCAB}
    llm = make_llm(name, 2, speculative_config=drafts | {"num_speculative_tokens": 3})
    assert tokens_of(llm, MIXED) == expected
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    counts = speculation.counts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


GOLDEN = ["lfm2-mha-conv-biases", "qwen3_next-gated-delta-experts", "granitemoehybrid-mamba-experts"]


@pytest.mark.parametrize("name", [*GOLDEN, "kimi_linear-delta-latent-experts"])
def test_each_device_reads_its_part_of_a_checkpoint(name, tmp_path):
    path = golden_case(name).model_dir
    if name.startswith("kimi"):  # of three heads
        config: Any = load_config(path)
        spec = dataclasses.replace(config.recurrent, num_key_heads=4, num_value_heads=4)
        export_hf(
            path := tmp_path / "model", config := dataclasses.replace(config, recurrent=spec), init_params(config)
        )
    config, whole = load_model(path)
    placement = place_on(2)
    _, read = load_model(path, placement=placement)
    placed = placement.params(config, whole)
    for params in (placed, separate(joined(read, config), config)):
        for (where, x), y in zip(jax.tree.leaves_with_path(read), jax.tree.leaves(params), strict=True):
            assert x.sharding == y.sharding, where
            np.testing.assert_array_equal(x, y, err_msg=str(where))
    settings: Any = {"max_model_len": 96, "num_blocks": 16, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    if not name.startswith("kimi"):
        case = golden_case(name)
        [output] = LLM(str(path), tensor_parallel_size=2, **settings).generate(
            [case.prompts[1].tolist()], asked(temperature=0, max_tokens=len(case.greedy[1]))
        )
        assert output.outputs[0].token_ids == case.greedy[1].tolist()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ShortConvSpec((0,)), "d_model 36 is not a multiple of it"),
        (DeltaRuleSpec((0,), 3, 6, 6, 4), "num_value_heads 6 of recurrent layers is not a .*; num_key_heads 3 of rec"),
        (Mamba2Spec((0,), 2, 8, 6, 4), "num_key_heads 2 of Mamba-2, parts that are normalised, is neither 1 nor a"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_numbers(spec, said):
    model = dataclasses.replace(MHA, d_model=36, recurrent=spec)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is 8: .*{said}"):
        place_on(8).local_model(model)

"""A method around a method: settings of all methods are the wrapper's, all else is the inner method's."""

import dataclasses

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.extend import EvictionWrapper
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.wrapper import COMMON
from ksana_jax.methods.eviction.knorm import KNorm
from ksana_jax.methods.eviction.prefill_decode import PrefillDecode
from ksana_jax.methods.eviction.snapkv import SnapKV
from ksana_jax.methods.eviction.tova import TOVA
from tests.engine.small import VOCAB, make_llm

PROMPTS = [np.random.default_rng(length).integers(2, VOCAB, length).tolist() for length in (30, 13, 9)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halved(EvictionWrapper):
    """Gives each layer half the budget of the one below."""

    def shares(self, num_layers):
        weights = 0.5 ** np.arange(num_layers)
        return tuple((weights / weights.mean()).tolist())


def around(of, **given):
    return read_eviction({"method": f"{__name__}:Halved", "of": of} | given)


@pytest.mark.parametrize(
    "name", ["h2o", "d2o", "keyformer", "snapkv", "chunkkv", "rkv", "tova", "lagkv", "vatp", "window"]
)
def test_a_wrapper_is_the_method_inside_with_settings_of_its_own(name):
    given = {"budget": 0.5, "recent": 3, "prompts": "streamed", "sinks": 1}
    method, plain = around({"method": name}, **given), read_eviction({"method": name, **given})
    assert {x: getattr(method, x) for x in COMMON} == {x: getattr(plain, x) for x in COMMON} and method.inner == plain
    for attribute in ("observes", "resets_scores", "custom_logits", "once", "counts_outputs", "stored"):
        assert getattr(method, attribute) == getattr(plain, attribute)
    assert method.shares(2) == (4 / 3, 2 / 3)
    # Programs depend on nothing that the host alone reads.
    assert method.compiled == dataclasses.replace(method, budget=0.1, recent=5, interval=3).compiled
    assert around({"method": name}).inner == read_eviction({"method": name})


def test_a_wrapper_goes_around_a_wrapper():
    method = around({"method": f"{__name__}:Halved", "of": {"method": "snapkv", "kernel": 7}}, recent=4)
    assert method.inner.inner == SnapKV(kernel=7, recent=4) and method.budget == SnapKV().budget
    assert read_eviction(method.setting) == method == read_eviction(method.compiled.setting | {"recent": 4})


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (None, "of is None, must be a method"),
        ({"method": "snapkv", "budget": 0.2, "recent": 4}, "of has budget, recent: budget and timing"),
        (KNorm(sinks=2), "of has sinks: budget"),
        ({"method": "snapkv", "kernel": 4}, "kernel is 4, must be odd"),
        ({"method": "snapkv", "window": 16}, "has no setting 'window'"),
        ({"kernel": 3}, "must be None or a dict"),
    ],
)
def test_what_is_said_inside_and_does_not_belong_there_is_refused(of, said):
    with pytest.raises(ConfigError, match=said):
        around(of)
    with pytest.raises(ConfigError, match="SnapKV: recent is"):
        around({"method": "snapkv"}, recent=0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": "streamed"}, "prompts is 'streamed', must be 'whole'"),
        ({"decode": None}, "decode is None, must be a method"),
        ({"decode": {"method": "tova", "budget": 9}}, "decode has budget: budget and timing belong next to decode"),
        ({"decode": {"method": "h2o"}}, "H2O adds up attention weights throughout a text, which SnapKV resets"),
        ({"of": {"method": "h2o"}}, "H2O adds up attention weights throughout a text, which TOVA resets"),
        ({"decode": {"method": "expected_attention"}}, "ExpectedAttention reads more than attention weights"),
        ({"of": {"method": "kvzip"}, "prompts": "once"}, "prompts is 'once', must be 'whole'"),
        ({"of": {"method": "adakv"}, "memory": "simulated"}, "prompts is 'whole', must be 'once'"),
    ],
)
def test_methods_that_cannot_follow_each_other_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        read_eviction({"method": "prefill_decode"} | given)


def test_one_method_follows_another_with_its_settings():
    method = read_eviction({"method": "prefill_decode", "of": {"method": "snapkv", "kernel": 7}, "recent": 4})
    assert isinstance(method, PrefillDecode)
    assert (method.inner, method.after) == (SnapKV(kernel=7, recent=4), TOVA(recent=4))
    assert read_eviction(method.setting) == method and method.counts_outputs
    assert method.compiled == dataclasses.replace(method, budget=0.1, recent=5, interval=3).compiled
    # SnapKV's window before an eviction at the prompt's end, then TOVA's newest query.
    until, outputs = np.array([[5, 4, 1, 9, 1]]), np.array([-4, -3, 0, 1, 2])
    assert method.query_numbers(until, outputs).tolist() == [[0, 1, 1, 0, 1]]
    assert method.query_numbers(until + 4, outputs).tolist() == [[0, 0, 0, 0, 0]]


def test_a_wrapped_method_writes_the_tokens_that_it_writes_alone():
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def written(setting):
        common = {"budget": 9, "recent": 3, "sinks": 1, "prompts": "streamed", "interval": 2}
        llm = make_llm(kv_eviction=setting | common)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, asked)]

    plain = {"method": "ksana_jax.extend:EvictionWrapper", "of": {"method": "snapkv", "kernel": 3}}
    assert written(plain) == written({"method": "snapkv", "kernel": 3})

"""Mistakes in an own class are named before an engine is built: fields it did not ask for, shapes, no dataclass."""

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.settings import check_policies
from ksana_jax.extend import EvictionMethod
from ksana_jax.kv.eviction.checking import check_priority
from tests.engine.small import make_llm

ASKED = {
    "scores": {"observes": True},
    "text_positions": {"needs_text_positions": True},
    "output_norms": {"reads_outputs": True},
    "state": {"state_shape": lambda self, num_queries, head_dim: (1,)},
    "given": {"needs_full_text": True},
}


def check(priority, **attributes):
    check_priority(type("Mine", (EvictionMethod,), {"priority": lambda self, *given: priority(*given), **attributes})())


@pytest.mark.parametrize("field", ASKED)
def test_a_field_that_the_class_did_not_ask_for_is_named_with_what_it_lacks(field):
    for read in (lambda cached, xp: getattr(cached, field), lambda cached, xp: -getattr(cached, field)):
        said = rf"priority reads cached.{field} \(test_own_class.py, line \d+\), .* needs .*{next(iter(ASKED[field]))}"
        with pytest.raises(ConfigError, match=said):
            check(read)
    check(lambda cached, xp: getattr(cached, field).sum() + cached.keys[..., 0], **ASKED[field])


def test_a_misspelt_field_or_method_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"reads cached.value \(test_own_class.py, line \d+\); .* field is 'values'"):
        check(lambda cached, xp: cached.value[..., 0])
    with pytest.raises(ConfigError, match=r"Misspelt: priority is not defined by the class"):
        check_priority(type("Misspelt", (EvictionMethod,), {"priorities": lambda self, *given: 0})())


def test_wrong_parameters_are_named():
    with pytest.raises(ConfigError, match=r"takes \(cached\), .* \(self, cached, xp\) \(test_own_class.py, line \d+\)"):
        check_priority(type("Mine", (EvictionMethod,), {"priority": lambda self, cached: cached.keys})())


def test_a_priority_has_a_number_for_each_token():
    for found, got in (
        (lambda keys: keys.mean(axis=(2, 4)), r"shape \(13, 3, 12\)"),
        (lambda keys: keys.mean(axis=(0, 4)), r"shape \(3, 5, 12\)"),
        (lambda keys: keys.mean(axis=(3, 4))[..., None], r"shape \(13, 3, 5, 1\)"),
        (lambda keys: keys.sum(), r"-?\d+.\d+"),
        (lambda keys: None, "None"),
    ):
        with pytest.raises(ConfigError, match=rf"priority returns {got}, must be \(13, 3, 5, 12\)"):
            check(lambda cached, xp, found=found: found(cached.keys))
    check(lambda cached, xp: cached.keys.mean(axis=(2, 4))[:, :, None])  # the same in all heads
    with pytest.raises(ConfigError, match=r"\(test_own_class.py, line \d+\): .*; .* need \[:, None, None, None\]"):
        check(lambda cached, xp: cached.keys[..., 0] / cached.num_tokens)
    check(lambda cached, xp: cached.keys[..., 0].at[0].set(1))  # of jax.numpy alone


def entropy(cached, xp):
    return -cached.scores * xp.log(cached.scores)


class Late(EvictionMethod):
    def priority(self, cached, xp):
        scores = cached.keys[..., 0]
        return xp.where((cached.length > 20)[:, None, None, None], xp.sqrt(-1 - scores * scores), scores)


class WithNumpy(EvictionMethod):
    def priority(self, cached, xp):
        return np.asarray(cached.keys)[..., 0]


class WithIf(EvictionMethod):
    def priority(self, cached, xp):
        return cached.keys[..., 0] if cached.length[0] > 20 else cached.keys[..., 1]


def test_a_priority_that_is_nan_on_made_up_tokens_is_an_error():
    with pytest.raises(ConfigError, match="priority is NaN for some of the made-up tokens"):
        check(entropy, observes=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Late", r"priority is NaN in layer 0 when a sequence has [23]\d tokens"),
        ("WithNumpy", r"priority \(test_own_class.py, line \d+\): .* use xp, not NumPy"),
        ("WithIf", r"priority \(test_own_class.py, line \d+\): .* use xp, not NumPy, and xp.where, not if"),
    ],
)
def test_what_only_a_step_can_find_names_the_method_and_the_place(name, said):
    llm = make_llm(kv_eviction={"method": f"{__name__}:{name}", "budget": 16, "prompts": "streamed"})
    with pytest.raises(ConfigError, match=f"kv_eviction .*:{name}: {said}"):
        llm.generate([list(range(1, 40))], SamplingParams(max_tokens=2, detokenize=False))


def test_a_dataclass_that_is_not_frozen_is_named_by_its_line(tmp_path, monkeypatch):
    lines = (
        "import dataclasses",
        "from ksana_jax.extend import EvictionMethod",
        "@dataclasses.dataclass",
        "class Loose(EvictionMethod): ...",
    )
    (tmp_path / "loose_class.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"'loose_class:Loose'.* non-frozen .*\(loose_class.py, line [34]\); .*frozen=True"
    ):
        check_policies(EngineConfig(kv_eviction={"method": "loose_class:Loose"}))


class Undecorated(EvictionMethod):
    power: float = 1.0


class Unannotated(EvictionMethod):
    recent = 32


class Unasked(EvictionMethod):
    def priority(self, cached, xp):
        return cached.scores


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Undecorated", "power is no field: it needs a type, and the class @dataclasses.dataclass"),
        ("Unannotated", "recent is no field"),
        ("Unasked", "reads cached.scores"),
    ],
)
def test_a_setting_is_checked_before_an_engine_is_built(name, said):
    for setting in ({"method": f"{__name__}:{name}"}, {"method": "adakv", "of": {"method": f"{__name__}:{name}"}}):
        with pytest.raises(ConfigError, match=said):
            check_policies(EngineConfig(kv_eviction=setting))

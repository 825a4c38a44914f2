"""Mistakes in an own class are named before an engine is built: fields it did not ask for, shapes, no dataclass."""

import pytest

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.settings import check_policies
from ksana_jax.extend import EvictionMethod
from ksana_jax.kv.eviction.checking import check_priority

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


def test_a_priority_has_a_number_for_each_token():
    for found, got in ((lambda keys: keys.mean(axis=(2, 4)), r"shape \(2, 3, 12\)"), (lambda keys: None, "None")):
        with pytest.raises(ConfigError, match=rf"priority returns {got}, must be \(2, 3, 5, 12\)"):
            check(lambda cached, xp, found=found: found(cached.keys))
    check(lambda cached, xp: cached.keys.mean(axis=(2, 4))[:, :, None])  # the same in all heads
    check(lambda cached, xp: cached.keys[..., 0].at[0].set(1))  # of jax.numpy alone


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

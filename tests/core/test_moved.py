"""What plug-ins imported before modules moved still works, and says where it is now."""

import importlib
import sys

import pytest

from ksana_jax import SamplingParams, extend
from ksana_jax.core import moved
from tests.engine.small import make_llm, tokens_of

OLD = "tests.core.old_plugin"


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.delitem(sys.modules, OLD, raising=False)
    for name in [name for name in sys.modules if moved.new_name(name)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(DeprecationWarning) as said:
        found = importlib.import_module(OLD)
    return found, [str(warning.message) for warning in said]


def test_a_plug_in_with_old_imports_has_the_present_classes(plugin):
    found, said = plugin
    for name in (
        "BaseTask",
        "Cached",
        "Codec",
        "Drafts",
        "Policy",
        "Proposer",
        "SchedulingPolicy",
        "SpeculativeMethod",
    ):
        assert getattr(found, name) is getattr(extend, name)
    assert any(line.startswith("ksana_jax.config is ksana_jax.core.config now") for line in said)


def test_an_old_attribute_of_a_method_counts_and_is_told(plugin):
    found, said = plugin
    assert found.Forgetful().resets_scores and not found.H2O().resets_scores
    assert any("Forgetful.forgets is resets_scores now" in line for line in said)


def test_an_engine_runs_it(plugin):
    llm = make_llm(
        kv_eviction={"method": f"{OLD}:Newest", "budget": 24, "recent": 8},
        policy=f"{OLD}:last_come",
        prefix_replacement=f"{OLD}:oldest",
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    assert len(tokens_of(llm, [list(range(1, 30))], params)[0]) == 8


@pytest.mark.parametrize("old", moved.MOVED)
def test_every_old_name_leads_to_a_module(old):
    new = moved.new_name(f"ksana_jax.{old}")
    assert new and importlib.util.find_spec(new)


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"ksana_jax\.kv\.tomorrow"):
        importlib.import_module("ksana_jax.kv.tomorrow")

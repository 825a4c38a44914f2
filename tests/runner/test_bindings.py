"""Names that a process binds to something else than the sources say are in the keys of programs, or keep them out."""

import importlib
import pkgutil

import pytest

import ksana_jax
import pallas_kernels
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.methods.eviction.h2o import H2O
from ksana_jax.models import mlp
from ksana_jax.runner import evicting, program_key
from ksana_jax.runner.program_key import bindings
from ksana_jax.runner.value_digest import NotStored


class TestReplaced:
    """Names of modules that a process binds to something else."""

    modules = ("ksana_jax.runner.evicting", "ksana_jax.methods.eviction.h2o", "ksana_jax.models.mlp")

    def test_a_constant_a_method_and_a_function_of_the_package_change_the_digest(self, monkeypatch):
        expected = bindings(self.modules)
        for place, name, value in (
            (evicting, "BLOCKS_AT_ONCE", 65),
            (evicting, "_moved", evicting._hidden),
            (H2O, "priority", EvictionMethod.priority),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, value)
                assert bindings(self.modules) != expected, name
            assert bindings(self.modules) == expected

    def test_an_entry_of_a_table_changes_the_digest(self, monkeypatch):
        expected = bindings(self.modules)
        monkeypatch.setitem(mlp.MLPS, "another", mlp.MLPS["swiglu"])
        assert bindings(self.modules) != expected

    @pytest.mark.parametrize("place", ["module", "class", "table"])
    def test_code_from_outside_is_refused(self, place, monkeypatch):
        if place == "module":
            monkeypatch.setattr(evicting, "evict", lambda *_: None)
        elif place == "class":
            monkeypatch.setattr(H2O, "priority", lambda *_: None)
        else:
            monkeypatch.setitem(mlp.MLPS, "mine", mlp.MLPS["swiglu"]._replace(apply=lambda *_: None))
        with pytest.raises(NotStored, match=r"was replaced: tests\.runner\.test_bindings"):
            bindings(self.modules)


def test_every_module_that_programs_may_be_traced_through_can_be_in_the_key():
    for package in (ksana_jax, pallas_kernels):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.split(".")[1] not in program_key.UNTRACED:
                importlib.import_module(found.name)
                assert len(bindings([found.name])) == 64


def test_another_thread_may_import_modules_meanwhile(monkeypatch):
    bound = program_key._bound

    def importing(*args):
        monkeypatch.setattr(evicting, f"module_{len(vars(evicting))}", mlp, raising=False)
        return bound(*args)

    monkeypatch.setattr(program_key, "_bound", importing)
    monkeypatch.setattr(program_key, "_bindings_before", {})
    assert len(bindings(["ksana_jax.runner.evicting"])) == 64

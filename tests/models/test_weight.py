"""Fields of parameters state how features treat their weights; a field that does not is refused by name."""

import dataclasses

import flax.struct
import jax
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.layer_spec import IndexerSpec
from ksana_jax.loading.load import abstract_params
from ksana_jax.models import params as model_params
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.mlp import MLP, MLPS, gated_shapes
from ksana_jax.models.params import LayerParams, init_params, param_shapes, quantised, weight_fields, weights_of
from ksana_jax.models.weight import Weight, matrix
from ksana_jax.ops.weight_packing import packed, unpacked
from ksana_jax.sharding.shares import local_model
from tests.models.own_kinds import CONFIGS, Unstated, register, triple, weights

JOINED = {weight.joins for weight in weight_fields().values() if weight is not None} - {None}
JOINED |= {f"b{name[1:]}" for name in JOINED}


def test_every_field_states_how_features_treat_its_weight():
    assert {name: w for name, w in weight_fields().items() if not isinstance(w, Weight)} == {}
    assert JOINED == {"w_qkv", "b_qkv", "w_gate_up", "b_gate_up", "w_in", "b_in"}


NAMES = ("everything", "after", "parallel", "experts", "clamped", "latent", "dense_latent")


def test_the_models_of_these_tests_have_every_weight():
    latent = dataclasses.replace(CONFIGS["latent"].latent, indexer=IndexerSpec(4, 10, 3))
    indexed = dataclasses.replace(CONFIGS["latent"], latent=latent)
    configs = [CONFIGS[name] for name in (*NAMES, "recurrent", "delta", "low_rank", "mamba")]
    shapes = [param_shapes(config) for config in (*configs, indexed)]
    found = {name for s in shapes for name in (*weights_of(s.layers[0]), *weights_of(s))}
    assert found | JOINED == weight_fields().keys()


def test_gates_and_latents_are_refused_together():
    assert "out_gate does not go with latents" in dataclasses.replace(CONFIGS["latent"], out_gate=True).problems()


def test_every_weight_has_a_name_in_some_family():
    families = FAMILIES.values()
    named = {field for f in families for field in (*f.layer_names, *f.recurrent_names, *f.top_names)}
    assert weight_fields().keys() - JOINED == named


@pytest.fixture
def registered(monkeypatch):
    register(monkeypatch)


@pytest.fixture
def unstated(monkeypatch):
    register(monkeypatch, Unstated)
    return CONFIGS["own"]


def unstated_weights():
    params = weights("own")
    return params.replace(layers=tuple(Unstated(**vars(p)) for p in params.layers))


REFUSED = {
    "tensor_parallel_size": lambda config: local_model(config, 2),
    "quantization": lambda config: abstract_params(config, quantization="w8a8"),
    "random initialisation": init_params,
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_field_that_states_nothing_is_refused_by_settings_that_need_its_statement(unstated, setting):
    with pytest.raises(ConfigError, match=f"weight w_new does not state what {setting} must know"):
        REFUSED[setting](unstated)


def test_weights_are_refused_as_their_shapes_are(unstated):
    with pytest.raises(ConfigError, match="weight w_new does not state what quantization must know"):
        quantised(unstated_weights(), "int8")


def test_a_field_that_states_nothing_stays_as_it_is_where_nothing_needs_to_know(unstated):
    given = unstated_weights()
    made = packed(given, unstated)
    assert made.layers[0].w_new is given.layers[0].w_new and made.layers[0].w_up is not given.layers[0].w_up
    jax.tree.map(np.testing.assert_array_equal, unpacked(made), given)


def test_a_statement_that_does_not_fit_the_kind_of_mlp_is_refused(registered, monkeypatch):
    @flax.struct.dataclass
    class Wrong(LayerParams):
        w_new: jax.Array | None = flax.struct.field(default=None, metadata=matrix("columns"))

    monkeypatch.setattr(model_params, "LayerParams", Wrong)
    said = r"tensor_parallel_size is 2: a part of w_new \[48, 32\] is \[48, 16\], a device needs \[24, 32\]$"
    with pytest.raises(ConfigError, match=said):
        local_model(CONFIGS["own"], 2)


def test_a_kind_with_a_weight_that_no_field_holds_is_refused(monkeypatch):
    monkeypatch.setitem(MLPS, "wider", MLP(lambda d, spec: gated_shapes(d, spec) | {"w_other": (d, d)}, triple))
    with pytest.raises(ConfigError, match="mlp 'wider' has w_other, for which LayerParams has no field"):
        param_shapes(dataclasses.replace(CONFIGS["everything"], mlp="wider"))

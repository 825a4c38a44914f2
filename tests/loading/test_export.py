"""Models written in Hugging Face form read back as they were."""

import dataclasses
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.loading import LoadError, export_hf, load_model
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.families.family import LAYER_NAMES, Family
from ksana_jax.models.params import init_params, num_params
from tests.golden.cases import golden_cases
from tests.loading.models_on_disk import TINY
from tests.models.own_kinds import CONFIGS, Stated, register, weights

CASES = list(golden_cases())


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_golden_models_survive_a_round_trip(tmp_path, case):
    config, params = load_model(case.model_dir)
    export_hf(tmp_path, config, params)
    again, reread = load_model(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, reread, params)


@pytest.mark.parametrize("kind", ["learned", "zero"])
def test_models_with_sink_logits_survive_a_round_trip(tmp_path, kind):
    config = dataclasses.replace(TINY, family="llama_sinks", sinks=kind)
    params = init_params(config, std=0.2)
    if kind == "learned":
        logits = np.linspace(-1, 3, config.num_layers * config.num_heads, dtype=np.float32).reshape(
            -1, config.num_heads
        )
        layers = [p.replace(sink_logits=jnp.asarray(x)) for p, x in zip(params.layers, logits, strict=True)]
        params = params.replace(layers=tuple(layers))
    export_hf(tmp_path, config, params)
    again, reread = load_model(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, reread, params)


def test_weights_are_written_in_their_own_dtype(tmp_path):
    params = init_params(TINY, dtype=jnp.bfloat16)
    export_hf(tmp_path, TINY, params)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path, dtype="bf16")[1], params)
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * num_params(TINY) + 4096


def test_export_replaces_what_was_there_and_leaves_no_partial_files(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    for seed in (0, 1):
        export_hf(tmp_path, TINY, init_params(TINY, seed=seed))
    config, params = load_model(tmp_path)
    assert config == TINY
    jax.tree.map(np.testing.assert_array_equal, params, init_params(TINY, seed=1))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "generation_config.json", "model.safetensors"]


def test_weights_are_as_readable_as_the_config(tmp_path):
    export_hf(tmp_path, TINY, init_params(TINY))
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_model_that_the_form_cannot_express_is_refused_and_nothing_is_written(tmp_path):
    config = dataclasses.replace(TINY, pattern=AttentionPattern(window=8, num_sinks=1))
    with pytest.raises(ConfigError, match="cannot express pattern window=8, num_sinks=1"):
        export_hf(tmp_path / "out", config, init_params(config))
    assert not (tmp_path / "out").exists()


def test_params_of_another_config_are_refused_with_every_difference(tmp_path):
    other: ModelConfig = dataclasses.replace(TINY, vocab_size=30, tie_embeddings=True, qkv_bias=True)
    with pytest.raises(LoadError) as refusal:
        export_hf(tmp_path, TINY, init_params(other))
    for part in (".embed has shape [30, 16]", ".head is missing", ".layers[1].b_v is not part of the config"):
        assert part in str(refusal.value)
    mixed = init_params(TINY).replace(final_norm=jnp.ones(16, jnp.bfloat16))
    with pytest.raises(LoadError, match="dtypes are bfloat16, float32"):
        export_hf(tmp_path, TINY, mixed)


def own_family(names) -> Family:
    return Family(
        model_type="own",
        architectures=("OwnForCausalLM",),
        defaults={},
        read=lambda fields: {"norm": "bounded", "mlp_bias": True, "rope": CONFIGS["own"].rope},
        write=lambda config: {},
        layer_names=names,
        mlps={"triple": "triple"},
    )


def test_a_model_with_an_own_weight_is_exported_and_read(monkeypatch, tmp_path):
    register(monkeypatch)
    monkeypatch.setitem(FAMILIES, "own", own_family(LAYER_NAMES | {"w_new": "mlp.new_proj.weight"}))
    config, params = dataclasses.replace(CONFIGS["own"], family="own"), weights("own")
    export_hf(tmp_path, config, params)
    again, read = load_model(tmp_path)
    assert again == config and isinstance(read.layers[0], Stated)
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_an_own_weight_that_its_family_does_not_name_is_not_written(monkeypatch, tmp_path):
    register(monkeypatch)
    monkeypatch.setitem(FAMILIES, "own", own_family(LAYER_NAMES))
    config = dataclasses.replace(CONFIGS["own"], family="own")
    with pytest.raises(ConfigError, match="family own names no tensor for weight w_new"):
        export_hf(tmp_path / "model", config, weights("own"))
    assert not (tmp_path / "model").exists()

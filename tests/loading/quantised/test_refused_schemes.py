"""Variants that are not read are refused with their field and what is supported, before weights are looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.config import ConfigError
from ksana_jax.loading import load_config
from ksana_jax.loading.quantised.formats import Format
from ksana_jax.loading.quantised.scheme import FIELDS, read_scheme
from tests.loading.models_on_disk import write_config
from tests.loading.quantised.on_disk import awq_config, compressed_config, fp8_config, gptq_config

INPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FLOAT = compressed_config(bits=8, type="float", strategy="channel") | {"format": "float-quantized"}


def with_inputs(**changes):
    return FLOAT | {"config_groups": {"a": FLOAT["config_groups"]["group_0"] | {"input_activations": INPUTS | changes}}}


def with_weights(config, **changes):
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


TWO = compressed_config()["config_groups"] | {"b": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}
REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'; supported: gptq, awq"),
    ({"quant_method": None}, "quant_method is None"),
    ({"quant_method": ["gptq"]}, "quant_method is"),
    (["gptq"], "must be an object"),
    (gptq_config(bits=3), "bits is 3; supported: 4 or 8"),
    (gptq_config(bits=4.0), "bits is 4.0"),
    (gptq_config(group=0), "group_size is 0, must be an integer from 1"),
    (gptq_config(group=-2), "group_size is -2"),
    (gptq_config(group=None), "group_size is None"),
    (gptq_config(sym="yes"), "sym is 'yes'"),
    (gptq_config(version="marlin"), "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
    (gptq_config() | {"is_marlin_format": True}, "is_marlin_format is True"),
    (gptq_config() | {"pack_dtype": "int16"}, "pack_dtype is 'int16'; supported: int32"),
    (gptq_config() | {"dynamic": {r"+:.*\.18\..*": {"bits": 8}}}, "dynamic is"),
    (awq_config() | {"version": "gemv"}, "version is 'gemv'; supported: gemm"),
    (awq_config() | {"version": "marlin"}, "version is 'marlin'"),
    (awq_config() | {"backend": "llm-awq"}, "backend is 'llm-awq'"),
    (awq_config() | {"bits": 8}, "bits is 8; supported: 4"),
    (awq_config() | {"zero_point": False}, "zero_point is False; supported: true"),
    (compressed_config() | {"format": "marlin-24"}, "format is 'marlin-24'; supported: pack-quantized, int-quantized"),
    (compressed_config() | {"format": None}, "format is None"),
    (compressed_config() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
    (compressed_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
    (compressed_config() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is"),
    (compressed_config() | {"config_groups": TWO}, "supported: groups that are quantised alike"),
    (compressed_config() | {"config_groups": {}}, "config_groups is"),
    (compressed_config() | {"config_groups": {"a": {"weights": None}}}, "config_groups is"),
    (compressed_config(bits=3), r"weights\.num_bits is 3; supported: 4 or 8"),
    (compressed_config(strategy="tensor"), r"weights\.strategy is 'tensor'; supported: channel, group"),
    (compressed_config(type="float"), r"weights\.type is 'float'; supported by pack-quantized: int"),
    (with_weights(FLOAT, symmetric=False), r"weights\.symmetric is False"),
    (with_weights(FLOAT, strategy="block"), r"weights\.block_structure is None"),
    (with_weights(FLOAT, strategy="block", block_structure="128x"), r"weights\.block_structure is '128x'"),
    (with_inputs(dynamic=False), r"input_activations\.dynamic is False; supported: true"),
    (with_inputs(dynamic="local"), r"input_activations\.dynamic is 'local'"),
    (fp8_config() | {"activation_scheme": "static"}, "activation_scheme is 'static'; supported: dynamic"),
    (fp8_config() | {"weight_block_size": None}, "weight_block_size is None"),
    (fp8_config() | {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
    (fp8_config() | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_variant_is_refused_by_its_field(settings, reason, tmp_path):
    write_config(tmp_path, quantization_config=settings)
    with pytest.raises(ConfigError, match=rf"config\.json: .*{reason}"):
        load_config(tmp_path)


def test_all_fields_concerned_are_named_at_once():
    with pytest.raises(ConfigError, match=r"bits is 3.*; .*group_size is 0"):
        read_scheme({"quantization_config": gptq_config(bits=3, group=0)}, "config.json")


def test_names_of_older_configs_are_read():
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}
    assert read_scheme({"quantization_config": older}, "") == read_scheme({"quantization_config": awq_config()}, "")
    settings = compressed_config()
    assert read_scheme({"compression_config": settings}, "") == read_scheme({"quantization_config": settings}, "")
    assert read_scheme({}, "") is read_scheme({"quantization_config": None}, "") is None


INT4 = {
    "actorder": "weight",
    "dynamic": False,
    "group_size": 128,
    "num_bits": 4,
    "observer": "mse",
    "strategy": "group",
}
INT4 |= {"symmetric": True, "type": "int", "block_structure": None, "observer_kwargs": {}}
DENSE = {"format": "dense", "global_sparsity": 0.1, "ignore": [], "sparsity_structure": "unstructured", "targets": []}
# As the model cards' checkpoints have them: Qwen2.5 in GPTQ and AWQ, Qwen3 in FP8, and W4A16 of llm-compressor.
PUBLISHED = [
    (
        {"batch_size": 1, "bits": 4, "damp_percent": 0.01, "desc_act": False, "exllama_config": {"version": 1}}
        | {"group_size": 128, "quant_method": "gptq", "sym": True, "true_sequential": True, "use_exllama": True},
        "GPTQ, 4 bits, groups of 128 share a scale",
    ),
    (
        {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"}
        | {"zero_point": True},
        "AWQ, 4 bits, groups of 128 share a scale and a zero",
    ),
    (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
        | {"modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]},
        "FP8, 8 bits, 128 x 128 share a scale",
    ),
    (
        with_weights(FLOAT, strategy="block", block_structure="128x64"),
        "compressed-tensors, 8 bits, 128 x 64 share a scale",
    ),
    (
        {"config_groups": {"group_0": {"input_activations": None, "targets": ["Linear"], "weights": INT4}}}
        | {"format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": DENSE}
        | {"quant_method": "compressed-tensors", "quantization_status": "compressed", "output_activations": None},
        "compressed-tensors, 4 bits, groups of 128 share a scale",
    ),
]


@pytest.mark.parametrize(("settings", "said"), PUBLISHED, ids=[said for _, said in PUBLISHED])
def test_configs_of_published_checkpoints_are_read(settings, said):
    assert str(read_scheme({"quantization_config": settings}, "config.json")) == said


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
SOUND = [gptq_config(), awq_config(), compressed_config(), fp8_config(), FLOAT, with_inputs(dynamic=True)]


@given(st.sampled_from(SOUND), st.data())
def test_any_config_is_read_or_refused(sound, data):
    settings, inner = dict(sound), dict(sound)
    if "config_groups" in settings and data.draw(st.booleans()):
        group = dict(next(iter(settings["config_groups"].values())))
        settings["config_groups"] = {"a": group}
        inner = group["weights"] = dict(group["weights"])
    else:
        inner = settings
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(VALUES)
    try:
        found = read_scheme({FIELDS[0]: settings}, "config.json")
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(found, Format) and found.bits in (4, 8)

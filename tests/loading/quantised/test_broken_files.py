"""Files whose tensors contradict each other or the config are refused with the tensor and the numbers."""

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana_jax.core.errors import ConfigError, LoadError
from ksana_jax.loading import load_model
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.load import open_model
from tests.loading.quantised.on_disk import (
    CONFIG,
    awq,
    awq_config,
    compressed,
    compressed_config,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
    write_quantised,
)

NAME = "model.layers.1.mlp.up_proj."  # [96, 64]
ALL = {
    "gptq": (gptq, gptq_config()),
    "desc_act": (functools.partial(gptq, desc_act=True, sym=False), gptq_config(desc_act=True, sym=False)),
    "awq": (awq, awq_config()),
    "compressed": (functools.partial(compressed, sym=False), compressed_config(sym=False)),
    "actorder": (functools.partial(compressed, actorder=True), compressed_config(actorder="group")),
    "fp8": (fp8, fp8_config()),
}


def cut(part, *index):
    def change(tensors):
        tensors[NAME + part] = tensors[NAME + part][index]

    return change


def without(part):
    return lambda tensors: tensors.pop(NAME + part)


def put(part, value):
    return lambda tensors: tensors.update({NAME + part: value})


def at(part, value):
    def change(tensors):
        tensors[NAME + part].reshape(-1)[5] = value

    return change


BROKEN = [
    ("gptq", without("qweight"), "up_proj.qweight is missing"),
    ("gptq", without("scales"), "up_proj.scales is missing"),
    ("gptq", cut("qweight", slice(7)), r"up_proj.qweight has shape \[7, 96\], the config gives \[8, 96\]"),
    ("gptq", cut("scales", slice(1)), r"up_proj.scales has shape \[1, 96\], the config gives \[2, 96\]"),
    ("gptq", cut("qzeros", slice(None), slice(3)), r"up_proj.qzeros has shape \[2, 3\]"),
    ("gptq", put("scales", np.ones((2, 96))), "up_proj.scales is F64, supported: F16, BF16, F32"),
    ("gptq", put("g_idx", np.zeros(64)), "up_proj.g_idx is F64, supported: I32"),
    (
        "gptq",
        put("weight", np.zeros((96, 64), np.int8)),
        "up_proj.weight is stored besides qweight, qzeros, scales, g_idx",
    ),
    ("gptq", at("qzeros", 0x77787777), "up_proj.qzeros has zeros other than 8, but sym is true"),
    (
        "gptq",
        lambda tensors: tensors[NAME + "qzeros"].fill(-0x77777778),  # eights
        "up_proj.qzeros stores each zero as 8, not less 1: set checkpoint_format to gptq_v2 in config.json",
    ),
    ("gptq", put("bias", np.full(96, 0.5, np.float16)), "up_proj.bias is not part of this llama config"),
    ("desc_act", without("g_idx"), "up_proj.g_idx is missing"),
    ("desc_act", at("g_idx", 2), "up_proj.g_idx has groups 0 to 2, must be from 0 to 1"),
    ("desc_act", at("g_idx", -1), "up_proj.g_idx has groups -1 to 1"),
    ("desc_act", at("scales", np.inf), "up_proj.weight has values that are NaN or infinite"),
    ("awq", cut("qweight", slice(None), slice(11)), r"up_proj.qweight has shape \[64, 11\]"),
    ("awq", without("qzeros"), "up_proj.qzeros is missing"),
    ("compressed", without("weight_zero_point"), "up_proj.weight_zero_point is missing"),
    ("compressed", without("weight_packed"), "up_proj.weight_packed is missing"),
    ("compressed", cut("weight_packed", slice(95)), r"up_proj.weight_packed has shape \[95, 8\]"),
    ("compressed", cut("weight_scale", slice(None), 0), r"weight_scale has shape \[96\], the config gives \[96, 2\]"),
    ("actorder", without("weight_g_idx"), "up_proj.weight_g_idx is missing"),
    ("fp8", without("weight_scale_inv"), "up_proj.weight_scale_inv is missing"),
    ("fp8", put("weight", np.zeros((96, 63), ml_dtypes.float8_e4m3fn)), r"up_proj.weight has shape \[96, 63\]"),
    ("fp8", put("weight", np.zeros(5, ml_dtypes.float8_e4m3fn)), r"up_proj.weight has shape \[5\]"),
    ("fp8", at("weight", np.nan), "up_proj.weight has values that are NaN or infinite"),
    ("fp8", put("weight", np.zeros((96, 64), ml_dtypes.float8_e5m2)), "up_proj.weight is F8_E5M2"),
]


@pytest.mark.parametrize(("kind", "change", "reason"), BROKEN, ids=[f"{kind}: {reason}" for kind, _, reason in BROKEN])
def test_a_broken_file_is_refused_with_the_tensor(kind, change, reason, tmp_path):
    path, _ = write_quantised(tmp_path, *ALL[kind], change=change)
    with pytest.raises(LoadError, match=reason) as caught:
        load_model(path)
    assert len(str(caught.value).splitlines()) == 1


def test_all_tensors_concerned_are_named_at_once(tmp_path):
    def change(tensors):
        without("scales")(tensors)
        cut("qweight", slice(7))(tensors)

    path, _ = write_quantised(tmp_path, *ALL["gptq"], change=change)
    with pytest.raises(LoadError, match=r"2 tensors do not fit GPTQ, 4 bits.*qweight has shape.*scales is missing"):
        load_model(path)


def test_group_sizes_that_the_tensors_do_not_have_are_refused(tmp_path):
    path, _ = write_quantised(tmp_path, gptq, gptq_config(group=16))
    with pytest.raises(LoadError, match=r"q_proj.scales has shape \[2, 64\], the config gives \[4, 64\]"):
        load_model(path)


@pytest.mark.parametrize(
    ("kind", "reason"), [("gptq", "is not a sound safetensors file"), ("fp8", "has become shorter")]
)
def test_a_file_that_became_shorter_is_refused(kind, reason, tmp_path):
    path, _ = write_quantised(tmp_path, *ALL[kind])
    stored, file = find_weights(path, CONFIG)["model.layers.1.mlp.up_proj.weight"], path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40_000])
    with pytest.raises(LoadError, match=rf"model\.safetensors.* {reason}"):
        list(stored.chunks())


def test_quantised_tensors_without_a_config_are_explained(tmp_path):
    for kind in ("gptq", "awq", "compressed", "fp8"):
        path, _ = write_quantised(tmp_path / kind, ALL[kind][0], None)
        with pytest.raises(LoadError, match=r"quantised tensors.*no quantization_config; add it"):
            load_model(path)


def test_biases_of_zeros_that_autogptq_adds_are_ignored(tmp_path):
    path, twin = write_quantised(tmp_path, *ALL["gptq"], change=put("bias", np.zeros(96, np.float16)))
    assert load_model(path)[0] == load_model(twin)[0] == CONFIG


def test_finding_tensors_reads_no_codes(tmp_path, monkeypatch):
    path, _ = write_quantised(tmp_path, *ALL["gptq"])
    monkeypatch.setattr("ksana_jax.loading.tensor_files.SafetensorsTensor.read", None)
    assert len(find_weights(path, load_config(path))) == 21


@settings(max_examples=60)
@given(st.data())
def test_any_change_of_one_part_is_read_or_refused(tmp_path_factory, data):
    kind = data.draw(st.sampled_from(sorted(ALL)))
    kinds = [np.float16, np.float32, np.int8, np.int32, np.int64, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]

    def change(tensors):
        name = data.draw(st.sampled_from(sorted(name for name in tensors if name.startswith(NAME))))
        shape = data.draw(st.lists(st.integers(0, 9), max_size=3)) if data.draw(st.booleans()) else tensors[name].shape
        dtype = data.draw(st.sampled_from([tensors[name].dtype, *kinds]))
        tensors[name] = np.full(shape, data.draw(st.integers(-100, 100))).astype(dtype)

    path, _ = write_quantised(tmp_path_factory.mktemp("changed"), *ALL[kind], change=change)
    for quantization in (None, "stored"):
        try:
            _, read = open_model(path, quantization=quantization)
            read()
        except (LoadError, ConfigError) as error:
            assert len(str(error).splitlines()) == 1

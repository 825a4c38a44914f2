"""Models written as GGUF files with matrices in blocks: numbers, names, configs and tokenizers when they are read."""

import dataclasses
import shutil
import sys

import gguf
import jax
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import read_gguf
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.sources import model_path
from ksana_jax.engine.request_factory import ending_ids
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.gguf_blocks import decode
from ksana_jax.loading.gguf_export import export_gguf
from ksana_jax.loading.gguf_writer import FLOATS, QUANTISED
from ksana_jax.loading.load import load_model
from ksana_jax.models.frequencies import make_rope
from ksana_jax.models.params import stated
from ksana_jax.tokenizers import find_tokenizer, load_tokenizer
from tests.loading.gguf_on_disk import TWINS, write_twin
from tests.loading.models_on_disk import random_tensors, write_model

WIDTHS = {"vocab_size": 1024, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "d_ff": 96}
TEXT = "def f(x):\n    return x + 1  # naïve"


def rounded(config, params, kind):
    """Parameters as they are read from a file of a kind."""

    def of(path, w):
        field = path[-1].name
        if w.ndim > 1 and field != "w_shared_gate":
            whole = kind if kind in FLOATS else "Q8_0"
            to = whole if field in ("embed", "head") else kind if stated(field, "a test").quantises else "F32"
            return decode(to, gguf.quants.quantize(np.asarray(w), gguf.GGMLQuantizationType[to]).view(np.uint8))
        stored_plus_one = config.norm == "rms_plus_one" and field.endswith("norm")
        return (w + np.float32(1)) - np.float32(1) if stored_plus_one else w

    return jax.tree_util.tree_map_with_path(of, params)


def check(path, config, params, kind):
    found_config, found = load_model(path)
    assert dataclasses.replace(found_config, family=config.family) == config
    wanted = rounded(config, params, kind)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_file_ends_texts_where_its_folder_does_whichever_of_its_files_says_so(tmp_path):
    config = dataclasses.replace(TWINS["llama"][1], **WIDTHS, eos_ids=(5,))
    folder, out = write_model(tmp_path / "model", random_tensors(config), config), tmp_path / "out.gguf"
    shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    export_gguf(folder, out, "Q4_1")
    ends = [ending_ids(load_config(path), load_tokenizer(path)) for path in (folder, out)]
    assert ends == [(9, 5, 2), (2, 9, 5)]


REFUSED = {
    "granite": "GGUF cannot express this config: ",
    "glm4": "quantize writes only weights that are whole tensors, not glm4",
    "phi3": "quantize writes only weights that are whole tensors, not phi3",
    "olmo3": "GGUF files have no architecture here for olmo3",
}


@pytest.mark.parametrize("name", sorted(TWINS.keys() - REFUSED))
def test_a_model_is_the_same_apart_from_rounding_from_a_folder_or_a_gguf_file(name, tmp_path):
    architecture, config = TWINS[name]
    config = dataclasses.replace(config, **WIDTHS, eos_ids=(2,), max_position=64)
    if architecture.startswith("gemma"):
        scale = None if architecture == "gemma" else 32**-0.5
        config = dataclasses.replace(config, embed_scale=8.0, attention_scale=scale)
    tensors = random_tensors(config)
    folder = write_model(tmp_path / "model", tensors, config)
    shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
    config, params = load_model(folder)
    export_gguf(folder, tmp_path / "of_folder.gguf", "Q4_1")
    check(tmp_path / "of_folder.gguf", config, params, "Q4_1")
    assert load_tokenizer(tmp_path / "of_folder.gguf").encode(TEXT) == load_tokenizer(folder).encode(TEXT)
    twin = write_twin(tmp_path / "twin.gguf", architecture, config, tensors)
    export_gguf(twin, tmp_path / "of_file.gguf", "Q8_0")
    check(tmp_path / "of_file.gguf", load_model(twin)[0], params, "Q8_0")
    given, made = read_gguf(twin).metadata, read_gguf(tmp_path / "of_file.gguf").metadata
    assert made == given | {"general.quantization_version": 2}


@pytest.mark.parametrize("kind", (*FLOATS, *QUANTISED))
def test_each_type_is_read_as_it_was_rounded(kind, tmp_path):
    _, config = TWINS["llama"]
    config = dataclasses.replace(config, **WIDTHS)
    path = write_twin(tmp_path / "model.gguf", "llama", config, random_tensors(config))
    export_gguf(path, tmp_path / "out.gguf", kind)
    check(tmp_path / "out.gguf", *load_model(path), kind)


def test_a_folder_without_a_tokenizer_gives_a_file_without(tmp_path):
    config = dataclasses.replace(TWINS["llama"][1], **WIDTHS, eos_ids=())
    folder = write_model(tmp_path / "model", random_tensors(config), config)
    export_gguf(folder, tmp_path / "out.gguf", "F16")
    assert find_tokenizer(tmp_path / "out.gguf") is None
    config, params = load_model(folder)
    check(tmp_path / "out.gguf", dataclasses.replace(config, bos_id=None), params, "F16")


def test_without_the_package_an_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"needs the package gguf: pip install 'ksana-jax\[gguf\]'"):
        export_gguf("ksana-tiny", tmp_path / "out.gguf", "Q4_1")


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_written_are_refused(name, tmp_path):
    rope = RopeConfig() if name == "phi3" else TWINS[name][1].rope  # its factors are of another width
    config = dataclasses.replace(TWINS[name][1], **WIDTHS, rope=rope, eos_ids=(2,))
    folder = write_model(tmp_path / "model", random_tensors(config), config)
    shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        export_gguf(folder, tmp_path / "out.gguf", "Q4_1")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_layers_without_experts_cannot_be_written(name, tmp_path):
    config = dataclasses.replace(TWINS[name][1], **WIDTHS)
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, plain_layers=(1,), plain_d_ff=64))
    folder = write_model(tmp_path / "model", random_tensors(config), config)
    assert load_config(folder).experts.plain_layers == (1,)
    shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
    with pytest.raises(ConfigError, match="GGUF cannot express this config: experts ExpertsSpec"):
        export_gguf(folder, tmp_path / "out.gguf", "Q4_1")
    assert not (tmp_path / "out.gguf").exists()


def test_a_rope_of_llama_3_becomes_divisors_with_its_frequencies(tmp_path):
    rope = RopeConfig("llama3", 5e5, 8.0, original_max_len=32)
    config = dataclasses.replace(TWINS["llama"][1], **WIDTHS, rope=rope)
    folder = write_model(tmp_path / "model", random_tensors(config), config)
    shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
    for source, out in ((folder, "of_folder.gguf"), (tmp_path / "of_folder.gguf", "again.gguf")):
        export_gguf(source, tmp_path / out, "Q8_0")
        found = load_config(tmp_path / out)
        assert dataclasses.replace(found, rope=rope) == config and found.rope.kind == "factors"
        wanted = make_rope(rope, 32).inv_freq
        np.testing.assert_allclose(make_rope(found.rope, 32).inv_freq, wanted, rtol=3e-7)  # three roundings
        assert (make_rope(RopeConfig(theta=5e5), 32).inv_freq > wanted * 7.9).any()


def test_rows_that_are_not_whole_blocks_stay_in_float32(tmp_path):
    path = write_twin(tmp_path / "model.gguf", *TWINS["llama"], random_tensors(TWINS["llama"][1]))
    export_gguf(path, tmp_path / "out.gguf", "Q5_0")
    kinds = {name: info.type.name for name, info in read_gguf(tmp_path / "out.gguf").tensors.items()}
    assert kinds["blk.0.attn_output.weight"] == "Q5_0" and kinds["blk.0.ffn_down.weight"] == "F32"
    for a, b in zip(
        *(jax.tree.leaves(load_model(p)[1].final_norm) for p in (path, tmp_path / "out.gguf")), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_what_gguf_cannot_express_is_refused_and_nothing_is_written(tmp_path):
    _, config = TWINS["llama"]
    config = dataclasses.replace(config, **WIDTHS)
    config = dataclasses.replace(config, rope=RopeConfig("dynamic", factor=2.0, original_max_len=64))
    folder = write_model(tmp_path / "model", random_tensors(config), config)
    shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
    out = tmp_path / "out.gguf"
    with pytest.raises(ConfigError, match=r"rope\.scaling\.type is 'dynamic'"):
        export_gguf(folder, out, "Q4_1")
    config = dataclasses.replace(config, rope=RopeConfig())
    large = random_tensors(config)
    large["model.layers.1.mlp.up_proj.weight"][3, 40] = 1e7
    with pytest.raises(
        LoadError, match=r"blk\.1\.ffn_up\.weight: values of up to 1e\+07 exceed float16, the range of Q4_1"
    ):
        export_gguf(write_model(tmp_path / "model", large, config), out, "Q4_1")
    with pytest.raises(
        ConfigError, match="kind is 'Q4_K', must be one of F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"
    ):
        export_gguf(folder, out, "Q4_K")
    with pytest.raises(ConfigError, match=r"must end in \.gguf"):
        export_gguf(folder, tmp_path / "out", "Q4_1")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("model", "model.gguf")]

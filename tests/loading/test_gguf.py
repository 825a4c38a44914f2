"""Models in GGUF files: equal to their safetensors twins, in every type and piece, within the memory they need."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import TYPES, read_gguf
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.devices.tuning import Tuning
from ksana_jax.lab.runs.models import num_layers, training_context
from ksana_jax.loading import load, load_config, load_model, stored_tensor
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.gguf_blocks import decode
from ksana_jax.loading.gguf_tensors import find_gguf_tensors
from ksana_jax.loading.load import auto_dtype, read_weight
from ksana_jax.loading.tensor_files import has_weights
from ksana_jax.models.frequencies import make_rope
from ksana_jax.models.params import num_params
from ksana_jax.runner.planner.solve import read_model
from ksana_jax.sharding.shares import Share
from tests.gguf_writer import write_gguf
from tests.loading.gguf_on_disk import TWINS, gguf_metadata, gguf_name, gguf_tensors, permuted, write_twin
from tests.loading.models_on_disk import TINY, random_tensors, write_model


def tensors_of_twin(config, stored="BF16", seed=0):
    """Weights of 8 bits, whose norms plus one are exact in float32, as in a real bfloat16 checkpoint."""
    return random_tensors(config, stored, seed)


@pytest.mark.parametrize("name", TWINS)
def test_gguf_gives_the_config_and_weights_of_its_safetensors_twin(tmp_path, name):
    architecture, config = TWINS[name]
    tensors = tensors_of_twin(config)
    twin = load_model(write_model(tmp_path / "twin", tensors, config))
    path = write_twin(tmp_path / "model.gguf", architecture, config, tensors)
    found, params = load_model(path)
    assert found == twin[0] == config
    jax.tree.map(np.testing.assert_array_equal, params, twin[1])
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path)[1], params)  # the folder of one GGUF file


def test_rows_of_queries_and_keys_would_be_wrong_in_the_stored_order(tmp_path):
    architecture, config = TWINS["llama"]
    tensors = tensors_of_twin(config)
    path = write_twin(tmp_path / "model.gguf", architecture, config, tensors)
    found = find_gguf_tensors(read_gguf(path), config)
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        full = f"model.layers.0.self_attn.{name}_proj.weight"
        stored = decode("BF16", dataclasses.replace(found[full], num_heads=None).blocks())
        np.testing.assert_array_equal(stored, permuted(tensors[full], heads))
        assert not np.array_equal(stored, tensors[full])
        np.testing.assert_array_equal(decode("BF16", found[full].blocks()), tensors[full])
        np.testing.assert_array_equal(decode("BF16", found[full].blocks(slice(3, 13))), tensors[full][3:13])


QUANTISED = dataclasses.replace(TINY, d_model=512, num_heads=8, head_dim=32, d_ff=256, num_layers=2, vocab_size=16)


def write_quantised(path, seed=0):
    """A model whose matrices cycle through all types; and all tensors' float32 values, by Hugging Face name."""
    rng = np.random.default_rng(seed)
    stored, values = {}, {}
    kinds = itertools.cycle(kind for kind in TYPES.values() if kind.num_values > 1)
    for name, tensor in random_tensors(QUANTISED).items():
        if tensor.ndim == 1:
            stored[gguf_name(name)] = values[name] = tensor
            continue
        kind = next(kinds)
        rows, columns = tensor.shape
        blocks = rng.integers(0, 256, (rows, columns // kind.num_values, kind.num_bytes), np.uint8)
        halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(kind.name, (0, 2))
        for at in halves[: 1 if kind.name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL") else 2]:
            blocks[..., at + 1] = blocks[..., at + 1] & 0x83 | 0x20  # scales of about 0.01
        if kind.name == "MXFP4":
            blocks[..., 0] = 120 + blocks[..., 0] % 8
        blocks = blocks.reshape(rows, -1)
        values[name] = decode(kind.name, blocks)
        if "q_proj" in name or "k_proj" in name:
            blocks = permuted(blocks, QUANTISED.num_heads if "q_proj" in name else QUANTISED.num_kv_heads)
        stored[gguf_name(name)] = (kind.name, tensor.shape, blocks.tobytes())
    write_gguf(path, gguf_metadata("llama", QUANTISED), stored)
    return path, values


@pytest.mark.parametrize("chunk_bytes", [2**23, 5000])
def test_every_type_is_decoded_where_it_is_stored(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(stored_tensor, "CHUNK_BYTES", chunk_bytes)
    path, values = write_quantised(tmp_path / "model.gguf")
    found = find_gguf_tensors(read_gguf(path), load_config(path))
    assert {tensor.dtype for tensor in found.values()} == {k.name for k in TYPES.values()} - {"F16", "BF16"}
    assert auto_dtype(path) == "f32"
    twin = load_model(write_model(tmp_path / "twin", values, QUANTISED))
    jax.tree.map(np.testing.assert_array_equal, load_model(path)[1], twin[1])
    rounded = load_model(path, dtype="bf16")[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(ml_dtypes.bfloat16)), rounded, twin[1])


def test_parts_of_quantised_matrices_are_read_alone(tmp_path):
    """Also where columns begin and end within a block, as on one of several devices."""
    path, values = write_quantised(tmp_path / "model.gguf")
    found = find_gguf_tensors(read_gguf(path), QUANTISED)
    for name, tensor in values.items():
        if tensor.ndim < 2:
            continue
        rows, columns = tensor.shape
        parts = [
            (slice(0, rows // 2), slice(None)),
            (slice(None), slice(40, columns - 100)),
            (slice(3, 9), slice(0, 7)),
        ]
        for part in parts:
            read = read_weight([found[name]], tensor.shape, np.float32, Share(*part))
            np.testing.assert_array_equal(read, tensor[part])


@pytest.mark.parametrize("stored, dtype", [("F32", "f32"), ("BF16", "bf16"), ("F16", "f16")])
def test_auto_dtype_is_that_of_the_matrices(tmp_path, monkeypatch, stored, dtype):
    tensors = random_tensors(TINY, stored)
    path = write_twin(tmp_path / "model.gguf", "llama", TINY, tensors)
    assert auto_dtype(path) == ("f32" if stored == "F16" else dtype)  # a CPU multiplies float16 slowly
    monkeypatch.setattr(load, "tuning", lambda _: Tuning(slow_dtypes=()))
    assert auto_dtype(path) == dtype


def test_file_without_an_output_head_is_tied(tmp_path):
    tensors = tensors_of_twin(TINY)
    untied = write_twin(tmp_path / "untied.gguf", "llama", TINY, tensors)
    del tensors["lm_head.weight"]
    tied = write_twin(tmp_path / "tied.gguf", "llama", TINY, tensors)
    assert not load_config(untied).tie_embeddings and load_config(tied).tie_embeddings
    assert load_model(tied)[1].head is None


def test_divisors_of_frequencies_give_llama3s_rope(tmp_path):
    config = dataclasses.replace(TINY, head_dim=64, rope=RopeConfig("llama3", 5e5, 8.0, 8192))
    plain = make_rope(RopeConfig(theta=5e5), 64).inv_freq
    wanted = make_rope(config.rope, 64).inv_freq
    tensors = gguf_tensors("llama", config, tensors_of_twin(config))
    tensors["rope_freqs.weight"] = (np.float64(plain) / np.float64(wanted)).astype(np.float32)
    assert tensors["rope_freqs.weight"].max() == 8 and tensors["rope_freqs.weight"].min() == 1
    metadata = gguf_metadata("llama", config, rope__scaling__type=None, rope__scaling__factor=None)
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    found, _ = load_model(path)
    assert found.rope.kind == "factors"
    # Each of the two float32 divisions rounds by half a unit in the last place, 6e-8.
    np.testing.assert_allclose(make_rope(found.rope, 64).inv_freq, wanted, rtol=2e-7)


def test_split_model_loads_as_the_whole_one(tmp_path):
    tensors = gguf_tensors("llama", TINY, tensors_of_twin(TINY))
    metadata = gguf_metadata("llama", TINY)
    whole = load_model(write_gguf(tmp_path / "whole.gguf", metadata, tensors))
    folder = tmp_path / "split"
    folder.mkdir()
    for index in range(2):
        split = {"split.no": np.uint16(index), "split.count": np.uint16(2)}
        split["split.tensors.count"] = np.int32(len(tensors))
        part = {name: tensors[name] for name in list(tensors)[index::2]}
        write_gguf(folder / f"m-{index + 1:05}-of-00002.gguf", (metadata if index == 0 else {}) | split, part)
    for path in (folder, *folder.iterdir()):
        found = load_model(path)
        assert found[0] == whole[0]
        jax.tree.map(np.testing.assert_array_equal, found[1], whole[1])


def test_file_cut_off_in_its_data_is_refused_before_weights_are_read(tmp_path):
    path = write_twin(tmp_path / "model.gguf", "llama", TINY, tensors_of_twin(TINY))
    content = path.read_bytes()
    start = min(info.offset for info in read_gguf(path).tensors.values())
    for length in (*range(start, len(content), 997), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(LoadError, match="the file is truncated or damaged"):
            load_config(path)
    path.write_bytes(content)
    found = find_gguf_tensors(read_gguf(path), TINY)
    path.write_bytes(content[: start + 100])
    with pytest.raises(LoadError, match="the file has become shorter"):
        for tensor in found.values():
            list(tensor.chunks())


def test_tensors_that_do_not_fit_and_numbers_that_are_none_are_named(tmp_path):
    def refusal(change) -> str:
        tensors = gguf_tensors("llama", TINY, random_tensors(TINY))
        change(tensors)
        with pytest.raises(LoadError) as caught:
            load_model(write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", TINY), tensors))
        return str(caught.value)

    gate = "blk.1.ffn_gate.weight"
    assert "model.layers.1.mlp.gate_proj.weight is missing" in refusal(lambda t: t.pop(gate))
    said = refusal(lambda t: t.update({gate: t[gate][:-1]}))
    assert "model.layers.1.mlp.gate_proj.weight has shape [23, 16], the config gives [24, 16]" in said
    extra = np.zeros((4, 4), np.float32)
    for name in ("blk.0.ffn_gate_exps.weight", "blk.00.attn_q.weight", "rope_factors_long.weight"):
        assert f"{name} is not part of this llama config" in refusal(lambda t: t.update({name: extra}))  # noqa: B023  called at once
    nan = np.full((24, 16), np.nan, np.float32)
    assert "gate_proj.weight has values that are NaN or infinite" in refusal(lambda t: t.update({gate: nan}))


@pytest.mark.parametrize("layer", ["1", "2", "9" * 5000])
def test_stacks_of_more_experts_or_layers_than_a_config_has_are_not_taken_apart(tmp_path, layer):
    metadata = gguf_metadata("llama", TWINS["mixtral"][1])
    name = f"blk.{layer}.ffn_gate_exps.weight"
    path = write_gguf(tmp_path / "model.gguf", metadata, {name: np.zeros((50_001, 1, 1), np.float32)})
    assert len(find_gguf_tensors(read_gguf(path), TWINS["mixtral"][1])) == 1


def test_digest_tells_models_apart_by_header_and_weights(tmp_path):
    tensors = tensors_of_twin(TINY)
    (tmp_path / "folder").mkdir()
    path = write_twin(tmp_path / "folder" / "model.gguf", "llama", TINY, tensors)
    digest, dummy = digest_of_files(path), digest_of_files(path, "dummy")
    assert digest_of_files(path.parent) == digest != dummy
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert digest_of_files(path) != digest and digest_of_files(path, "dummy") == dummy
    write_twin(path, "llama", TINY, tensors, context_length=128)
    assert digest_of_files(path) != digest and digest_of_files(path, "dummy") != dummy


def test_planner_and_experiments_read_a_gguf_file_and_its_folder(tmp_path):
    path = write_twin(tmp_path / "small.gguf", "llama", TINY, tensors_of_twin(TINY))
    for given in (path, tmp_path):
        assert read_model(given) == (TINY, "small")
        assert (training_context(str(given)), num_layers(str(given))) == (TINY.max_position, TINY.num_layers)
        assert has_weights(given)
    with pytest.raises(LoadError, match=r"there is no model '.*absent\.gguf'"):
        load_config(tmp_path / "absent.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"has no weights; supported: .*, or the path of small\.gguf"):
        write_model(tmp_path, {}).joinpath("model.safetensors").unlink()
        load_model(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from Linux's /proc")
def test_loading_a_quantised_file_takes_at_most_1_3_times_the_weights(tmp_path):
    # 32M weights, 130 MB in float32 from 20 MB, as in the test of safetensors.
    config = dataclasses.replace(TINY, vocab_size=8_000, d_model=1024, num_layers=2, num_kv_heads=4, d_ff=2624)
    config = dataclasses.replace(config, num_heads=4, head_dim=32)
    block, stored = bytes.fromhex("0024 003c") + bytes(range(16)), {}
    for name, tensor in gguf_tensors("llama", config, random_tensors(config)).items():
        quantised = ("Q4_1", tensor.shape, block * (tensor.size // 32))
        stored[name] = tensor if tensor.ndim == 1 else quantised
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", config), stored)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("memory_probe.py"), path, "f32", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    peak, weights, num_read = map(int, done.stdout.split())
    assert num_read == weights == 4 * num_params(config)
    assert peak <= 1.3 * weights

"""Model directories that are refused, each with one line that names the file and what is supported."""

import dataclasses
import json
import os
import re
import struct
import types

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.loading import LoadError, check_tokenizer, load_config, load_model
from tests.loading.models_on_disk import (
    TINY,
    random_tensors,
    read_index,
    write_config,
    write_index,
    write_model,
    write_shards,
)


@pytest.fixture
def tensors():
    return random_tensors(TINY)


def refusal(model_dir, kind: type[ValueError] = LoadError) -> str:
    with pytest.raises(kind) as caught:
        load_model(model_dir)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_directory(tmp_path):
    assert f"there is no model '{tmp_path / 'nowhere'}'" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"model_type": "llama", "rope_theta": 1e999}', "rope_theta is inf, must be a finite number"),
        (b'{"model_type": "bert"}', "model_type is 'bert'; supported: llama"),
        (b" " * (16 * 2**20 + 1), "16,777,217 bytes; supported: at most 16,777,216"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_config_file_that_cannot_be_read(tmp_path, content, named):
    (tmp_path / "config.json").write_bytes(content)
    message = refusal(tmp_path, ConfigError)
    assert named in message and str(tmp_path / "config.json") in message


def test_missing_config_file(tmp_path):
    assert "config.json is missing" in refusal(tmp_path, ConfigError)


def test_ids_of_generation_config_outside_the_vocabulary(tmp_path):
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 32]}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is \[2, 32\]"):
        load_config(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_all_listed(tmp_path, tensors):
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq.more"] = np.zeros(4, np.float32)
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((32, 16), np.float32)
    tensors["model.norm.weight"] = np.zeros(16, np.int8)
    message = refusal(write_model(tmp_path, tensors))
    assert "7 tensors do not fit" in message and str(tmp_path) in message
    for part in (
        "model.layers.0.mlp.up_proj.weight is missing",
        "lm_head.weight is missing",
        "model.layers.2.mlp.up_proj.weight is not part of this llama config",
        "model.layers.0.self_attn.q_proj.bias is not part of this llama config",
        "inv_freq.more is not part of this llama config",
        "model.layers.1.self_attn.k_proj.weight has shape [32, 16], the config gives [16, 16]",
        "model.norm.weight is I8, supported: F32, BF16, F16",
    ):
        assert part in message


@pytest.mark.parametrize("name", ["d_model", "head_dim", "d_ff", "vocab_size"])
@pytest.mark.parametrize("config", [TINY, dataclasses.replace(TINY, family="phi3")])
def test_sizes_far_beyond_the_files_are_refused_before_anything_of_them_is_made(tmp_path, tensors, config, name):
    path = write_model(tmp_path, tensors)
    write_config(path, dataclasses.replace(config, **{name: 2**31 - 4}))
    assert re.search(r"the config gives [\d,]+ weights, the tensors of its files at most \d\d,\d\d\d", refusal(path))


def test_transposed_matrix_is_misshapen(tmp_path, tensors):
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"].T)
    assert "lm_head.weight has shape [16, 32], the config gives [32, 16]" in refusal(write_model(tmp_path, tensors))


def test_head_of_a_tied_model_that_differs_from_its_embedding(tmp_path, tensors):
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    message = refusal(write_model(tmp_path, tensors, tied))
    assert "lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true" in message
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:30]
    assert "lm_head.weight has shape [30, 16]" in refusal(write_model(tmp_path, tensors, tied))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights(tmp_path, name):
    write_config(tmp_path)
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    message = refusal(tmp_path)
    assert "pickled weights" in message and name in message and "model.safetensors" in message


def test_directory_without_weights(tmp_path):
    write_config(tmp_path)
    assert "has no weights; supported: model.safetensors or model.safetensors.index.json" in refusal(tmp_path)


def test_missing_shard(tmp_path, tensors):
    folder = write_shards(tmp_path, tensors)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "shard 'model-00002-of-00003.safetensors' is missing" in refusal(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": ["b"]}], ids=str)
def test_index_of_another_form(tmp_path, tensors, weight_map):
    write_index(write_shards(tmp_path, tensors), weight_map)
    assert "weight_map must be an object" in refusal(tmp_path)


def test_index_that_names_a_tensor_its_shard_lacks(tmp_path, tensors):
    folder = write_shards(tmp_path, tensors)
    write_index(
        folder,
        read_index(folder)
        | {"lm_head.weight": "model-00001-of-00003.safetensors", "more": "model-00001-of-00003.safetensors"},
    )
    message = refusal(folder)
    assert "more in model-00001-of-00003.safetensors" in message
    assert "lm_head.weight in model-00001-of-00003.safetensors" in message


def spoil(path, how):
    """Rewrites a safetensors file with something wrong."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if how == "empty":
        content = b""
    elif how == "cut in the length":
        content = content[:5]
    elif how == "cut in the header":
        content = content[:50]
    elif how == "cut in the data":
        content = content[:-1]
    elif how == "longer than it says":
        content += b"\0"
    elif how == "header not JSON":
        content = struct.pack("<Q", 4) + b"{ab}" + data
    elif how == "pickle":
        content = b"\x80\x04\x95" + content[3:]
    else:
        entry = header["lm_head.weight"]
        if how == "offsets beyond the data":
            entry["data_offsets"][1] += 2**40
        elif how == "offsets backwards":
            entry["data_offsets"].reverse()
        elif how == "negative offset":
            entry["data_offsets"][0] = -1
        elif how == "overlap":
            entry["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"]
        elif how == "shape and offsets differ":
            entry["shape"][0] += 1
        elif how == "huge shape":
            entry["shape"] = [2**63, 2**63]
        elif how == "unknown dtype":
            entry["dtype"] = "PICKLE"
        elif how == "nested header":
            entry["dtype"] = {"a": {"b": {}}}
        new = json.dumps(header).encode()
        content = struct.pack("<Q", len(new)) + new + data
    path.write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "cut in the length",
        "cut in the header",
        "cut in the data",
        "longer than it says",
        "header not JSON",
        "pickle",
        "offsets beyond the data",
        "offsets backwards",
        "negative offset",
        "overlap",
        "shape and offsets differ",
        "huge shape",
        "unknown dtype",
        "nested header",
    ],
)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shard"])
def test_truncated_or_malformed_safetensors(tmp_path, tensors, how, sharded):
    folder = write_shards(tmp_path, tensors, num_shards=1) if sharded else write_model(tmp_path, tensors)
    path = next(folder.glob("*.safetensors"))
    load_model(folder)
    spoil(path, how)
    message = refusal(folder)
    assert str(path) in message
    assert "not a sound safetensors file, or truncated" in message


def test_directory_or_pipe_in_place_of_the_weights(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    assert "model.safetensors is not a file" in refusal(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors")
    assert "model.safetensors is not a file" in refusal(tmp_path)


def test_tokenizer_of_another_model(caplog):
    def tokenizer(vocab_size):
        return types.SimpleNamespace(vocab_size=vocab_size)

    check_tokenizer(TINY, tokenizer(32))
    check_tokenizer(TINY, tokenizer(30))  # embeddings are often padded
    check_tokenizer(dataclasses.replace(TINY, bos_id=31), tokenizer(30))
    assert not caplog.messages
    with pytest.raises(ConfigError, match="eos_token_id 31 is beyond the tokenizer's 30 ids"):
        check_tokenizer(dataclasses.replace(TINY, eos_ids=(2, 31)), tokenizer(30))


def test_tokenizer_with_more_ids_than_rows_is_used_and_said(caplog):
    check_tokenizer(TINY, types.SimpleNamespace(vocab_size=33))
    assert caplog.messages == [
        "the tokenizer has 33 ids, the embedding 32 rows: prompts with an id from 32 on are refused"
    ]

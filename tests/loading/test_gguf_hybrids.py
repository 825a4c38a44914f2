"""GGUF files of models with recurrent layers by llama.cpp's converter: its own logits, and written as they were."""

import gguf
import jax
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import read_gguf
from ksana_jax.loading import gguf_export, load_config, load_model
from ksana_jax.loading.export import export_hf
from ksana_jax.loading.gguf_export import export_gguf
from ksana_jax.loading.load import open_model
from ksana_jax.models.dense import dense_logits
from tests.gguf_writer import write_gguf
from tests.golden.cases import HERE

pytestmark = pytest.mark.usefixtures("quick_compiles")
FILES = {path.stem: path for path in sorted((HERE / "gguf_hybrids").glob("*.gguf"))}


def assert_equal(params, others) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.parametrize("name", FILES)
def test_log_probabilities_are_those_of_llama_cpp(name):
    config, params = load_model(FILES[name])
    with np.load(HERE / "gguf_hybrids" / "logprobs.npz") as expected:
        scores = jax.jit(dense_logits, static_argnames="config")(params, expected["tokens"], config=config)
        # It computes delta rules in chunks, whose rounding differs.
        np.testing.assert_allclose(jax.nn.log_softmax(scores), expected[name], atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", FILES)
def test_a_model_is_written_as_the_converter_does_from_a_file_or_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_export, "gguf_tokens", lambda *arguments: {})
    (config, params), theirs = load_model(FILES[name]), {t.name: t for t in gguf.GGUFReader(FILES[name]).tensors}
    export_hf(tmp_path / "folder", config, params)
    for source in (FILES[name], tmp_path / "folder"):
        export_gguf(source, out := tmp_path / "out.gguf", "Q8_0")
        assert load_config(out) == config
        ours = {t.name: t for t in gguf.GGUFReader(out).tensors}
        assert theirs.keys() == ours.keys()
        for tensor, x in theirs.items():
            y = ours[tensor]
            if not tensor.endswith("inp_shexp.weight"):  # [D] here, [1, D] there
                assert x.shape.tolist() == y.shape.tolist()
            rounded = gguf.quants.quantize(np.asarray(x.data), y.tensor_type).reshape(-1).view(y.data.dtype)
            # The logarithm is rounded once, the power once more.
            tolerance = 3e-7 if tensor.endswith("ssm_a") else 0
            np.testing.assert_allclose(y.data.reshape(-1), rounded, rtol=tolerance)
    export_gguf(out, again := tmp_path / "again.gguf", "Q8_0")
    assert_equal(load_model(again)[1], load_model(out)[1])


def test_heads_in_another_order_keep_their_blocks(tmp_path):
    export_gguf(FILES["qwen35"], out := tmp_path / "out.gguf", "Q8_0")
    config, read = open_model(out, "f32", quantization="stored")
    plain, kept = load_model(out)[1].layers[0], read().layers[0]
    for name in ("w_q", "w_k", "w_v", "w_out_gate"):
        np.testing.assert_array_equal(getattr(kept, name).numbers(), getattr(plain, name))
    # Columns of w_o change places within blocks.
    assert isinstance(kept.w_o, jax.Array) and config.kept


def changed(name: str, out, change):
    """A file with other metadata or tensors."""
    metadata = dict(read_gguf(FILES[name]).metadata)
    tensors = {t.name: t.data.reshape(t.shape.tolist()[::-1]) for t in gguf.GGUFReader(FILES[name]).tensors}
    change(metadata, tensors)
    return write_gguf(out, metadata, {k: np.ascontiguousarray(x) for k, x in tensors.items()})


def test_layers_that_guess_further_tokens_are_left_out(tmp_path):
    def change(metadata, tensors):
        metadata |= {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
        metadata["qwen35.attention.recurrent_layers"] = np.array([True, False, True, False])
        tensors |= {f"blk.3.{part}.weight": np.zeros((4, 4), np.float32) for part in ("nextn.eh_proj", "attn_q")}

    more = changed("qwen35", tmp_path / "more.gguf", change)
    (config, params), (found, read) = load_model(FILES["qwen35"]), load_model(more)
    assert found == config
    assert_equal(params, read)
    export_gguf(more, out := tmp_path / "out.gguf", "Q8_0")
    assert read_gguf(out).metadata["qwen35.block_count"] == 3 and load_config(out) == config


def test_queries_keys_values_and_gates_of_older_files_are_read(tmp_path):
    def change(metadata, tensors):
        del metadata["qwen3next.attention.recurrent_layers"]  # as good, for each second layer is full
        metadata["qwen3next.full_attention_interval"] = 2
        for layer in (0, 2):
            qkv, z = (tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in ("qkv", "gate"))
            parts = [part.reshape(2, -1, 32) for part in (*np.split(qkv, [16, 32]), z)]
            tensors[f"blk.{layer}.ssm_in.weight"] = np.concatenate(parts, axis=1).reshape(-1, 32)

    older = changed("qwen3next", tmp_path / "older.gguf", change)
    assert load_config(older) == load_config(FILES["qwen3next"])
    assert_equal(load_model(older)[1], load_model(FILES["qwen3next"])[1])


KEYS = {
    "qwen35.nextn_predict_layers is 3; not supported": ("qwen35", "nextn_predict_layers", 3),
    "linear_value_head_dim": ("qwen35", "ssm.inner_size", 47),
    "head_count_kv is array([0, 2, 1]": ("lfm2", "attention.head_count_kv", np.array([0, 2, 1], np.int32)),
    "older converters of llama.cpp wrote them expanded": ("kimi-linear", "attention.key_length", 72),
    "moe_router_activation_func is 'softmax'": ("kimi-linear", "expert_gating_func", 1),
    "layer_types": ("qwen35", "attention.recurrent_layers", np.array([True, False])),
}


@pytest.mark.parametrize("said", KEYS)
def test_keys_that_cannot_be_read_right_are_refused(said, tmp_path):
    name, key, value = KEYS[said]
    with pytest.raises(ConfigError) as refusal:
        load_config(changed(name, tmp_path / "a.gguf", lambda metadata, _: metadata.update({f"{name}.{key}": value})))
    assert said in str(refusal.value)


def test_tensors_that_cannot_be_read_right_are_refused(tmp_path):
    bias = {"blk.0.shortconv.conv.bias": np.zeros(32, np.float32)}
    with pytest.raises(LoadError, match=r"blk\.0\.shortconv\.conv\.bias is not part"):
        load_model(changed("lfm2", tmp_path / "a.gguf", lambda _, tensors: tensors.update(bias)))
    with pytest.raises(LoadError, match="A_log has values that are NaN"):
        positive = {"blk.0.ssm_a": np.ones(6, np.float32)}
        load_model(changed("qwen35", tmp_path / "a.gguf", lambda _, tensors: tensors.update(positive)))

"""llama.cpp as a peer: the loop over a fake of its functions, and the file that it reads through a fake of gguf."""

import importlib
import json
import sys
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from experiments.benches import peers

VOCAB = 50


class FakeWriter:
    """Keeps what is added."""

    last: "FakeWriter"

    def __init__(self, path, architecture):
        self.tensors, self.fields = {}, {"architecture": architecture}
        FakeWriter.last = self

    def add_tensor(self, name, array, raw_dtype):
        self.tensors[name] = (array, raw_dtype)

    def __getattr__(self, name):
        return lambda *value: self.fields.update({name: value})


def fake_gguf():
    kinds = types.SimpleNamespace(F32="0", BF16="30", F16="1")
    quants = types.SimpleNamespace(quantize=lambda array, kind: array)
    return types.SimpleNamespace(GGMLQuantizationType=kinds, GGUFWriter=FakeWriter, quants=quants)


class FakeLlama(types.SimpleNamespace):
    """llama.cpp whose next token is the sum of a sequence's tokens; it refuses gaps, and sequences that it has not."""

    def __init__(self, batch_tokens):
        super().__init__(cached=defaultdict(list), calls=[], batch_tokens=batch_tokens, __version__="1")

    def llama_decode(self, context, batch):
        assert 0 < batch.n_tokens <= self.batch_tokens
        sequences, logits = [], []
        for i in range(batch.n_tokens):
            (sequence,) = batch.seq_id[i][: batch.n_seq_id[i]]
            assert sequence < context.n_seq_max and batch.pos[i] == len(self.cached[sequence])
            self.cached[sequence].append(batch.token[i])
            if batch.logits[i]:
                sequences.append(sequence)
                logits.append(np.eye(VOCAB, dtype=np.float32)[sum(self.cached[sequence]) % VOCAB])
        self.calls.append(sequences)
        self.logits = np.ctypeslib.as_ctypes(np.concatenate(logits))
        return 0

    def llama_get_logits(self, context):
        import ctypes

        return ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float))

    def llama_memory_seq_rm(self, memory, sequence, first, last):
        assert (first, last) == (-1, -1) and self.cached[sequence]
        self.cached[sequence] = []

    def llama_batch_init(self, size, embeddings, sequences):
        def column():
            return [0] * size

        return types.SimpleNamespace(
            token=column(), pos=column(), n_seq_id=column(), seq_id=[[0] for _ in range(size)], logits=column()
        )

    def llama_context_default_params(self):
        return types.SimpleNamespace()

    def llama_init_from_model(self, model, params):
        return params

    def llama_vocab_n_tokens(self, vocab):
        return VOCAB

    def llama_log_callback(self, function):
        return function

    def __getattr__(self, name):
        return lambda *_: types.SimpleNamespace()


@pytest.fixture
def scripts(monkeypatch):
    """Imports scripts of the peers with fakes of their imports."""
    llama = FakeLlama(batch_tokens=20)
    monkeypatch.syspath_prepend(str(Path(peers.__file__).parent))
    for name, module in (("gguf", fake_gguf()), ("llama_cpp", llama)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("gguf_file", "of_llama_cpp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield llama, importlib.import_module("gguf_file"), importlib.import_module("of_llama_cpp")
    for name in ("gguf_file", "of_llama_cpp"):
        sys.modules.pop(name)


def test_every_request_gets_its_own_tokens_in_as_many_sequences_as_there_are(scripts, monkeypatch):
    llama, gguf_file, of_llama_cpp = scripts
    monkeypatch.setattr(of_llama_cpp, "BATCH_TOKENS", 20)
    monkeypatch.setattr(gguf_file, "write_gguf", lambda *_: None)
    engine = of_llama_cpp.Engine("model", "f32", threads=2, rows=3, max_model_len=64)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCAB, n).tolist() for n in (9, 4, 11, 1, 20, 7)]
    lengths = [5, 1, 8, 3, 2, 6]
    expected = []
    for prompt, length in zip(prompts, lengths, strict=True):
        text = list(prompt)
        for _ in range(length):
            text.append(sum(text) % VOCAB)
        expected.append(text[len(prompt) :])
    assert engine.generate(prompts, lengths) == expected
    assert max(map(len, llama.calls)) == 3 and not any(llama.cached.values())
    assert engine.generate(prompts[:1], lengths[:1]) == expected[:1]


def test_a_gguf_file_is_read_as_it_is(scripts, monkeypatch):
    llama, gguf_file, of_llama_cpp = scripts
    read = []
    llama.llama_model_load_from_file = lambda path, params: read.append(path.decode()) or llama
    monkeypatch.setattr(gguf_file, "write_gguf", lambda model, out, dtype: read.append(f"{model} in {dtype}"))
    for model in ("a/model.gguf", "a/folder"):
        of_llama_cpp.Engine(model, "f32", threads=2, rows=3, max_model_len=64)
    assert read[:2] == ["a/model.gguf", "a/folder in f32"] and read[2].endswith("/model.gguf") and read[2] != read[0]


def write_checkpoint(folder, tensors, **config):
    """Writes safetensors by hand: 8 bytes of length, a header, and bfloat16."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    default = {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 6, "vocab_size": VOCAB}
    limits = {"max_position_embeddings": 64, "rope_theta": 100.0, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(default | sizes | limits | config))


def test_neighbours_rotate_as_halves_do_and_bfloat16_is_read(scripts, tmp_path):
    _, gguf_file, _ = scripts
    rows = np.arange(12 * 8).reshape(12, 8) % 61  # integers that bfloat16 has
    attention = "model.layers.0.self_attn"
    given = {f"{attention}.q_proj.weight": rows, f"{attention}.v_proj.weight": rows[:4], "model.norm.weight": rows[0]}
    write_checkpoint(tmp_path, given)
    gguf_file.write_gguf(tmp_path, tmp_path / "out.gguf", "bf16")
    made = FakeWriter.last.tensors
    assert {name: kind for name, (_, kind) in made.items()} == {
        "blk.0.attn_q.weight": "30",
        "blk.0.attn_v.weight": "30",
        "output_norm.weight": "0",
    }
    np.testing.assert_array_equal(made["blk.0.attn_v.weight"][0], rows[:4])
    x, angles = np.linspace(-1, 1, 8), np.array([0.3, 0.7])
    halves = (rows @ x).reshape(3, 2, 2)  # head, half, frequency
    pairs = (made["blk.0.attn_q.weight"][0] @ x).reshape(3, 2, 2)  # head, frequency, neighbour
    turned = (halves[:, 0] + 1j * halves[:, 1]) * np.exp(1j * angles)
    np.testing.assert_allclose((pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles), turned)


@pytest.mark.parametrize(
    "config",
    [{"model_type": "gemma2"}, {"rope_scaling": {"rope_type": "llama3"}}, {"rope_scaling": {"type": "linear"}}],
)
def test_a_model_that_is_not_written_is_refused(scripts, tmp_path, config):
    write_checkpoint(tmp_path, {}, **config)
    with pytest.raises(ValueError, match="only Llama models without scaled rotations"):
        scripts[1].write_gguf(tmp_path, tmp_path / "out.gguf", "f32")

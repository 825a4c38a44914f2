"""llama.cpp as a peer: the loop over a fake of its functions."""

import importlib
import sys
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from experiments.benches import peers

VOCAB = 50


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
def llama(monkeypatch):
    """Stands for llama.cpp's package."""
    fake = FakeLlama(batch_tokens=20)
    monkeypatch.syspath_prepend(str(Path(peers.__file__).parent))
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.delitem(sys.modules, "of_llama_cpp", raising=False)
    yield fake
    sys.modules.pop("of_llama_cpp")


def test_every_request_gets_its_own_tokens_in_as_many_sequences_as_there_are(llama, monkeypatch):
    of_llama_cpp = importlib.import_module("of_llama_cpp")
    monkeypatch.setattr(of_llama_cpp, "BATCH_TOKENS", 20)
    engine = of_llama_cpp.Engine("model.gguf", "f32", threads=2, rows=3, max_model_len=64)
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

"""A GGUF file alone is a model: weights, configuration, tokenizer, chat template."""

import dataclasses
import json
from pathlib import Path

from ksana_jax import LLM, SamplingParams
from ksana_jax.core import gguf_file
from ksana_jax.core.gguf_file import read_gguf
from tests.gguf_writer import write_gguf
from tests.loading.gguf_on_disk import gguf_metadata, gguf_tensors
from tests.loading.models_on_disk import TINY, random_tensors, write_model

TOKENIZER = Path(__file__).parents[1] / "golden" / "gguf_tokenizers" / "byte_level.json"
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def test_gguf_file_and_its_folder_serve_the_tokens_of_the_safetensors_twin(tmp_path, few_shapes, monkeypatch):
    stored = json.loads(TOKENIZER.read_text()) | {"tokenizer.ggml.pre": "qwen2"}
    stored["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = dataclasses.replace(TINY, vocab_size=len(stored["tokenizer.ggml.tokens"]))
    tensors = random_tensors(config)
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "model.gguf"
    write_gguf(path, gguf_metadata("llama", config) | stored, gguf_tensors("llama", config, tensors))
    assert read_gguf(path).metadata["tokenizer.ggml.model"] == "gpt2"
    twin = LLM(write_model(tmp_path / "twin", tensors, config), tokenizer=path, max_num_seqs=2)
    wanted = [output.outputs[0] for output in twin.generate(["the cache", "a b"], GREEDY)]
    assert len({tuple(output.token_ids) for output in wanted}) == 2 and wanted[0].text
    parsed, parse = [], gguf_file._Header
    monkeypatch.setattr(gguf_file, "_Header", lambda *given: parsed.append(given) or parse(*given))
    for model in (path, path.parent):
        parsed.clear()
        llm = LLM(model, dtype="auto", max_num_seqs=2)
        assert len(parsed) == 1  # for the config, the tokenizer, the weights and their digest
        assert llm.config.dtype == "f32"
        found = [output.outputs[0] for output in llm.generate(["the cache", "a b"], GREEDY)]
        assert [(f.text, f.token_ids) for f in found] == [(w.text, w.token_ids) for w in wanted]
    [said] = llm.chat([{"role": "user", "content": "the cache"}], GREEDY)
    assert said.outputs[0].token_ids == wanted[0].token_ids

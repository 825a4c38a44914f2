"""Packed weights that a process keeps in a file and later ones map: the same numbers and tokens, and never others'."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.engine import packed_weights
from ksana_jax.loading import load, packed_file
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.int8_matrix import QUANTISERS, quantise
from tests.gguf_writer import write_gguf
from tests.loading.gguf_on_disk import gguf_metadata, gguf_name
from tests.loading.models_on_disk import TINY, random_tensors, write_model
from tests.machine import native_products
from tests.models.blocks import drawn_blocks

pytestmark = [native_products, pytest.mark.usefixtures("few_shapes")]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the files, which small models have too."""
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)
    monkeypatch.setattr(packed_file, "cache_folder", (tmp_path / "cache").joinpath)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def reads(monkeypatch):
    """How often weights are read from a model's files."""
    found, read = [], load.read_params
    monkeypatch.setattr(load, "read_params", lambda *given: found.append(given) or read(*given))
    return found


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", random_tensors(TINY))


def llm(model: Path, **settings) -> LLM:
    return LLM(model, **{"max_num_seqs": 2, "max_model_len": 32, "num_blocks": 8} | settings)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompt_token_ids=[list(range(3, 11)), [5, 4]], sampling_params=GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


def are_equal(one: LLM, other: LLM) -> bool:
    a, b = (jax.tree.leaves(each.runner.params) for each in (one, other))
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def num_files(folder: Path) -> int:
    return sum(not path.suffix for path in folder.iterdir())


def blocks_of_gguf(folder: Path) -> Path:
    config = dataclasses.replace(TINY, d_model=64, d_ff=96, head_dim=16, num_layers=6)
    stored = {gguf_name(name): values for name, values in random_tensors(config).items()}
    for name, values in list(stored.items()):
        if values.ndim == 2:
            # Many files give some layers another type. Three layers that are alike share a program.
            kind = "Q4_1" if name.startswith(("blk.3.", "blk.4.", "blk.5.")) else "Q4_0"
            stored[name] = kind, values.shape, drawn_blocks(kind, *values.shape, seed=0).tobytes()
    return write_gguf(folder / "model.gguf", gguf_metadata("llama", config), stored)


CASES = [{}, {"dtype": "bf16"}, {"quantization": "int8"}, {"quantization": "w8a8"}, {"quantization": "stored"}]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_mapped_weights_are_those_that_were_read_bit_for_bit(tmp_path, model, settings, folder, reads, monkeypatch):
    if settings.get("quantization") == "stored":
        model = blocks_of_gguf(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv(packed_weights.SWITCH, "off")
        plain = llm(model, **settings)
    assert not folder.exists()
    first, second = llm(model, **settings), llm(model, **settings)
    assert len(reads) == 2 and num_files(folder) == 1
    assert are_equal(first, plain) and are_equal(second, plain)
    assert tokens(plain) == tokens(second)


def test_adapters_and_engines_that_have_slept_take_mapped_weights(model, folder, reads):
    wanted, adapted = tokens(llm(model)), llm(model, enable_lora=True)
    assert tokens(adapted) == wanted and len(reads) == 1
    adapted.sleep(2)
    adapted.wake_up()
    assert tokens(adapted) == wanted and len(reads) == num_files(folder) == 1


def test_mapped_weights_have_the_digest_of_the_files(model, reads, monkeypatch):
    found = [llm(model, enable_prefix_caching=True).engine.memory.index.scope.model for _ in range(2)]
    monkeypatch.setenv(packed_weights.SWITCH, "off")
    found.append(llm(model, enable_prefix_caching=True).engine.memory.index.scope.model)
    assert len(set(found)) == 1 and found[0] and len(reads) == 2


def test_a_file_has_the_weights_of_one_model_and_one_set_of_settings(model, folder, reads):
    before = llm(model)
    write_model(model, random_tensors(TINY, seed=1))
    assert not are_equal(llm(model), before) and num_files(folder) == 2
    write_model(model, random_tensors(TINY))
    assert are_equal(llm(model), before) and len(reads) == num_files(folder) == 2
    for number, settings in enumerate(CASES[1:4], 3):
        llm(model, **settings)
        assert num_files(folder) == number
    write_model(model, random_tensors(TINY), rms_norm_eps=0.5)
    llm(model)
    assert num_files(folder) == 6


def test_another_library_or_version_of_the_code_reads_no_older_file(model, folder, monkeypatch):
    llm(model)
    for number, name in enumerate(("library", "sources"), 2):
        with monkeypatch.context() as patch:
            patch.setattr(packed_weights, name, lambda: Path("another"))
            llm(model)
        assert num_files(folder) == number


def test_a_family_that_names_other_tensors_reads_no_older_file(tmp_path, folder, monkeypatch):
    config = dataclasses.replace(TINY, num_kv_heads=TINY.num_heads)
    model = write_model(tmp_path / "model", random_tensors(config), config)
    before, names = llm(model), FAMILIES["llama"].layer_names
    swapped = names | {"w_q": names["w_k"], "w_k": names["w_q"]}
    monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(FAMILIES["llama"], layer_names=swapped))
    assert not are_equal(llm(model), before) and num_files(folder) == 2


@pytest.mark.parametrize("registry", ["quantiser", "family"])
def test_weights_that_code_of_a_user_may_change_are_not_kept(model, folder, monkeypatch, registry):
    if registry == "quantiser":
        monkeypatch.setitem(QUANTISERS, "mine", lambda w: quantise(w))
    else:
        monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(FAMILIES["llama"], read=lambda fields: {}))
    llm(model)
    assert not folder.exists()

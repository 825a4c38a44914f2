"""Digests of weights: any one number counts, in memory and in files, and with it whatever decides keys and values."""

import dataclasses
import os
import time

import jax
import numpy as np
import pytest

from ksana_jax.core.errors import LoadError
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.engine.fingerprint import digest_of_params, fingerprint
from ksana_jax.loading import digest as digests
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.load import WeightReader, load_model, open_model
from ksana_jax.models.params import init_params, quantised
from tests.engine.test_sleeping import GREEDY, engine
from tests.loading.models_on_disk import TINY, random_tensors, write_model

LONGROPE = RopeConfig("longrope", factor=2.0, original_max_len=16, factors=(1.0,) * 4, short_factors=(1.0,) * 4)


@pytest.mark.parametrize(
    ("rope", "differ"),
    [(RopeConfig(), False), (RopeConfig("dynamic", factor=2.0, original_max_len=16), True), (LONGROPE, True)],
    ids=lambda value: value.kind if isinstance(value, RopeConfig) else "",
)
def test_max_model_len_counts_where_it_decides_the_frequencies(rope, differ):
    config, same = dataclasses.replace(TINY, rope=rope), {"dtype": "f32", "kv_dtype": "f32", "quantization": None}
    assert len({fingerprint(config, "weights", max_model_len=n, **same) for n in (16, 32)}) == 1 + differ


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_number_of_each_weight_in_memory_counts(dtype, quantization):
    params = quantised(init_params(TINY, dtype=dtype), quantization)
    leaves, tree = jax.tree.flatten(params)
    rng, found = np.random.default_rng(0), {digest_of_params(params)}
    for at, leaf in enumerate(leaves):
        changed = np.array(leaf)
        changed.reshape(-1).view(np.uint8)[rng.integers(changed.nbytes)] ^= 1
        found.add(digest_of_params(jax.tree.unflatten(tree, [*leaves[:at], changed, *leaves[at + 1 :]])))
    assert len(found) == 1 + len(leaves)
    assert digest_of_params(jax.tree.map(np.array, params)) in found


def test_each_byte_of_a_file_counts_and_digests_are_kept_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wide = dataclasses.replace(TINY, vocab_size=40_000)
    file = write_model(tmp_path / "model", random_tensors(wide), wide) / "model.safetensors"
    content, rng = bytearray(file.read_bytes()), np.random.default_rng(0)
    assert len(content) > digests._KEPT_BYTES
    found = {digest_of_files(file.parent)}
    for at in (0, len(content) - 1, *rng.integers(len(content), size=6)):
        content[at] ^= 1
        file.write_bytes(content)
        found.add(digest_of_files(file.parent))
    assert len(found) == 9 and not (tmp_path / "cache").exists(), "a file that may still change is read each time"

    monkeypatch.setattr(digests, "_TICK_NS", 0)
    time.sleep(0.02)
    before = digest_of_files(file.parent)
    [kept] = (tmp_path / "cache/ksana_jax/digests").iterdir()
    monkeypatch.setattr(digests.hashlib, "file_digest", None)  # a second reading would fail
    assert digest_of_files(file.parent) == before
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept.write_text("damaged")
    assert digest_of_files(file.parent) == before
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    content[0] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=times)
    assert digest_of_files(file.parent) != before, "a file with its old times is another one by its change time"


def test_files_that_change_while_they_are_read_are_refused():
    seen = iter("ab")
    with pytest.raises(LoadError, match="changed while their weights were read: load the model again"):
        WeightReader(lambda: init_params(TINY), lambda: next(seen)).read_with_digest()


def test_no_block_of_other_weights_is_found_on_disk_in_a_session_or_after_an_update(tmp_path):
    wide, rng = dataclasses.replace(TINY, d_ff=4096), np.random.default_rng(1)
    tensors = random_tensors(wide)
    first = write_model(tmp_path / "first", tensors, wide)
    prompt = rng.integers(3, 32, 20).tolist()
    shared = {"enable_prefix_caching": True, "host_cache_bytes": 2**20}
    disk = {"disk_cache_dir": str(tmp_path / "disk")}

    def cached(llm):
        [output] = llm.generate(prompt_token_ids=[prompt], sampling_params=GREEDY)
        return output.num_cached_tokens

    with engine(first, **shared, **disk) as llm:
        assert cached(llm) == 0
        [output] = llm.generate(prompt_token_ids=[prompt], sampling_params=GREEDY)
        llm.save_session(output, tmp_path / "session")
    with engine(first, **shared, **disk) as llm:
        assert cached(llm) == 16
    for name in ("mlp.gate_proj", "self_attn.k_proj"):
        name = f"model.layers.0.{name}.weight"
        changed = tensors[name].copy()
        changed.reshape(-1)[rng.integers(changed.size) | 1] *= -1.5
        folder = write_model(tmp_path / name, tensors | {name: changed}, wide)
        with engine(folder, **shared, **disk) as llm:
            assert cached(llm) == 0
        with engine(folder, **shared) as llm:
            with pytest.raises(ValueError, match="weights"):
                llm.restore_session(tmp_path / "session")
            llm.sleep(1)
            llm.update_weights(load_model(first)[1])
            assert cached(llm) == 0
            llm.sleep(1)
            llm.update_weights(load_model(folder)[1])
            assert cached(llm) == 0


def test_a_reader_of_files_and_weights_in_memory_have_digests_of_their_own(tmp_path):
    folders = [write_model(tmp_path / str(seed), random_tensors(TINY, seed=seed)) for seed in (0, 1)]
    readers = [open_model(folder)[1] for folder in folders]
    drawn = [open_model(TINY, load_format="dummy", seed=seed)[1] for seed in (0, 1)]
    assert len({reader.digest() for reader in readers + drawn}) == 4

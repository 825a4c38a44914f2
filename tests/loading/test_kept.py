"""`quantization: stored`: GGUF matrices stay in memory as the file has them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.export import export_hf
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.kept import keeping, with_kept
from ksana_jax.loading.load import load_model, open_model
from ksana_jax.models.block_matrix import BlockMatrix
from ksana_jax.models.params import weights_of
from ksana_jax.runner.planner.solve import NO_STEP, plan
from ksana_jax.runner.planner.terms import weights_bytes
from tests.gguf_writer import write_gguf
from tests.loading.gguf_on_disk import TWINS, gguf_metadata, gguf_name, gguf_tensors
from tests.loading.models_on_disk import random_tensors
from tests.models.blocks import KINDS, drawn_blocks

SHAPE = {"d_model": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "d_ff": 96}
CONFIG = ModelConfig(vocab_size=70, tie_embeddings=True, bos_id=1, eos_ids=(2,), **SHAPE)
# Rows of whole superblocks.
WIDE = dataclasses.replace(CONFIG, d_model=256, num_layers=2, head_dim=64, d_ff=256)
PROMPT = {"prompt_token_ids": list(range(5, 45))}
SETTINGS = {"max_num_seqs": 2, "max_model_len": 64, "dtype": "f32"}
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False)


def written(path, kinds, config=CONFIG, scale=None):
    """A file whose matrices are in blocks, of types that follow one another; norms are F32.

    scale: first bytes of the first block of each matrix, in place of drawn ones.
    """
    stored, following = {}, itertools.cycle(kinds)
    for i, (name, values) in enumerate(random_tensors(config, "F32", 0).items()):
        name = gguf_name(name)
        stored[name] = values.astype(np.float32)
        if values.ndim == 2 and (kind := next(following)) != "F32":
            blocks = drawn_blocks(kind, *values.shape, seed=i)
            if scale is not None:
                blocks[0, : len(scale)] = np.frombuffer(scale, np.uint8)
            stored[name] = kind, values.shape, blocks.tobytes()
    architecture = config.family if config.family in ("glm4", "phi3") else "llama"
    return write_gguf(path / "model.gguf", gguf_metadata(architecture, config), stored)


def opened(path, **options):
    config, read = open_model(path, "f32", quantization="stored", **options)
    return config, read()


def matrices(params):
    found = [*weights_of(params).items(), *(w for layer in params.layers for w in weights_of(layer).items())]
    return [(name, w) for name, w in found if len(w.shape) == 2]


def logprobs(llm) -> np.ndarray:
    [output] = llm.generate([PROMPT], SCORED)
    return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])


HALF = RopeConfig(partial_rotary_factor=0.5)
PHI3 = dataclasses.replace(WIDE, family="phi3", rope=HALF)
GLM4 = dataclasses.replace(WIDE, family="glm4", norm_placement="both", rope=HALF)


@pytest.mark.parametrize("config", [WIDE, PHI3, GLM4], ids=lambda config: config.family)
def test_numbers_are_those_of_dequantised_weights_bit_for_bit(tmp_path, config):
    """Also of weights that are parts of a tensor, or whose rows are in another order."""
    path = written(tmp_path, KINDS, config)
    (config, kept), (plain, dequantised) = opened(path), load_model(path)
    assert dataclasses.replace(config, kept=()) == plain and not plain.kept
    for (name, w), (_, wanted) in zip(matrices(kept), matrices(dequantised), strict=True):
        assert isinstance(w, BlockMatrix), name
        np.testing.assert_array_equal(np.asarray(w.numbers()).view(np.uint32), np.asarray(wanted).view(np.uint32))
    assert {kind for _, kind in config.kept} == {*KINDS[: 15 if config.family != "phi3" else 9]}
    assert len(config.kept) == 15


MOE = dataclasses.replace(TWINS["mixtral"][1], vocab_size=70, d_model=256, d_ff=256, num_layers=2)


def written_experts(path, kinds, config=MOE):
    """A file whose stacks of experts are in blocks, of types that follow one another."""
    stored, following = gguf_tensors("llama", config, random_tensors(config, "F32", 0)), itertools.cycle(kinds)
    for i, (name, values) in enumerate(sorted(stored.items())):
        if "_exps" in name and (kind := next(following)) != "F32":
            blocks = drawn_blocks(kind, values[..., 0].size, values.shape[-1], seed=i)
            stored[name] = kind, values.shape, blocks.tobytes()
    return write_gguf(path / "model.gguf", gguf_metadata("llama", config), stored)


def stacks(params):
    return [(name, w) for layer in params.layers for name, w in weights_of(layer).items() if len(w.shape) == 3]


@pytest.mark.parametrize("kinds", [KINDS[:6], KINDS[6:]])
def test_numbers_of_experts_are_those_of_dequantised_weights_bit_for_bit(tmp_path, kinds):
    path = written_experts(tmp_path, kinds)
    (config, kept), (_, dequantised) = opened(path), load_model(path)
    for (name, w), (_, wanted) in zip(stacks(kept), stacks(dequantised), strict=True):
        assert isinstance(w, BlockMatrix), name
        np.testing.assert_array_equal(np.asarray(w.numbers()).view(np.uint32), np.asarray(wanted).view(np.uint32))
    assert [kind for _, kind in config.kept] == [kinds[i] for i in (1, 2, 0, 4, 5, 3)]  # down, gate, up in the file


def test_an_engine_of_experts_computes_with_the_numbers_that_blocks_stand_for(tmp_path):
    path = written_experts(tmp_path, ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "Q5_0"])
    for linear, bound in {"xla": 1e-6, "auto": 0.05}.items():
        settings = SETTINGS | {"operators": {"linear": linear}}
        plain, llm = logprobs(LLM(path, **settings)), LLM(path, quantization="stored", **settings)
        packs = llm.config.operators.linear == "packed"
        kinds = {type(w).__name__ for _, w in stacks(llm.runner.params)}
        assert kinds == {"PackedBlocks" if packs else "BlockMatrix"}
        apart = np.abs(logprobs(llm) - plain).mean() / plain.std()
        assert apart < bound and (apart > 1e-4) == packs
        used = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.params))
        assert llm.memory_plan.weights_bytes == used
        assert used == weights_bytes(llm.model_config, "f32", quantization="stored", packs=packs)


def test_experts_in_other_blocks_than_others_are_dequantised_and_said(tmp_path, caplog):
    path = written_experts(tmp_path, ["Q4_1", "Q8_0", "Q4_K"])
    config, found = load_config(path), find_weights(path, load_config(path))
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    other = dataclasses.replace(found[name], dtype="F32")
    caplog.set_level("INFO", "ksana_jax")
    kept = keeping(config, {**found, name: other}, "mixed blocks")
    assert len(kept.kept) == 5 and "are dequantised: 1 have other blocks than other experts" in caplog.text


def test_an_engine_computes_with_the_numbers_that_blocks_stand_for(tmp_path, caplog):
    path = written(tmp_path, ["Q4_1", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
    plain = logprobs(LLM(path, **SETTINGS))
    for linear in ("xla", "auto"):
        llm = LLM(path, quantization="stored", operators={"linear": linear}, **SETTINGS)
        packs = llm.config.operators.linear == "packed"
        assert packs != any("unpacks matrices in every step" in message for message in caplog.messages)
        caplog.clear()
        # XLA's products are those of dequantised weights; native ones round activations to codes.
        apart = np.abs(logprobs(llm) - plain).mean() / plain.std()
        assert (1e-4 < apart < 0.05) if packs else apart < 1e-6  # measured: 0.024 and 4e-7
        used = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.params))
        assert llm.memory_plan.weights_bytes == used
        assert used == weights_bytes(llm.model_config, "f32", quantization="stored", packs=packs)


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_1", 5), ("Q5_0", 5.5), ("Q4_K", 4.625), ("Q5_K", 5.625), ("Q6_K", 6.5625)]
)
def test_a_plan_knows_the_bytes_of_the_forms_in_memory(kind, bits, tmp_path):
    path = written(tmp_path, [kind], WIDE)
    numbers = sum(w.size for _, w in matrices(load_model(path)[1]))
    found = plan(str(path), "24GiB", dtype="f32", quantization="stored", context=64, batch=1, step=NO_STEP)
    assert found.weights_bytes == numbers * bits / 8 + 5 * WIDE.d_model * 4


def test_an_embedding_that_is_no_head_is_kept_unless_it_is_on_the_host(tmp_path):
    path = written(tmp_path, ["Q8_0"], dataclasses.replace(CONFIG, tie_embeddings=False))
    _, params = opened(path)
    assert isinstance(params.embed, BlockMatrix) and isinstance(params.head, BlockMatrix)
    _, params = opened(path, embedding_device="host")
    assert isinstance(params.embed, np.ndarray) and isinstance(params.head, BlockMatrix)


@pytest.mark.parametrize(("kind", "scale"), [("Q8_0", b"\x00\x7c"), ("Q4_K", b"\x00\x00\xff\xff"), ("MXFP4", b"\xff")])
def test_scales_that_are_not_finite_are_refused(kind, scale, tmp_path):
    with pytest.raises(LoadError, match="has scales that are NaN or infinite"):
        opened(written(tmp_path, [kind], WIDE, scale=scale))


def test_models_without_blocks_and_settings_that_do_not_serve_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="stores no matrix in Q4_0, Q4_1, Q5_0"):
        opened(written(tmp_path, ["F32"]))
    with pytest.raises(ConfigError, match="stores no matrix in Q4_0, Q4_1, Q5_0"):
        with_kept(CONFIG, "ksana-tiny")
    kept = opened(written(tmp_path, ["Q4_1"]))
    with pytest.raises(LoadError, match="load the model without quantization to export it"):
        export_hf(tmp_path / "out", *kept)
    with pytest.raises(ConfigError, match="weights that no file stores"):
        opened(CONFIG, load_format="dummy")
    with pytest.raises(ConfigError, match="a ModelConfig has no file"):
        plan(CONFIG, "24GiB", quantization="stored")

"""Engines that store keys and values in another type than they compute in."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ksana_jax import AttentionPattern, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.devices.tuning import tuning
from ksana_jax.engine.inspect import take_snapshot
from ksana_jax.kv.codecs.registry import CODECS, find_codec
from ksana_jax.kv.model_layout import layout_of
from tests.engine.small import VOCAB, make_llm, model, tokens_of
from tests.machine import compiled
from tests.reference import reference_logprobs
from tests.soak import soak_unless

RNG = np.random.default_rng(4)
PROMPTS = [{"prompt_token_ids": RNG.integers(2, VOCAB, n)} for n in (3, 17, 30, 9)]
MIXED = (AttentionPattern(), AttentionPattern(window=8))
# Small blocks and chunks; what they compile is shared.
TIGHT = {"block_size": 4, "num_blocks": 14, "max_num_batched_tokens": 7, "query_tile": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


class Definition:
    """Codecs in float64, one rounding. Records whether float32 could round a number the other way."""

    def __init__(self, name: str, exact: tuple[int, ...] = ()):
        self.name, self.exact, self.certain, self.num_calls = name, exact, True, 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        layer, self.num_calls = self.num_calls // 2, self.num_calls + 1  # keys and values of each layer
        if layer in self.exact:
            return x
        turned = np.eye(x.shape[-1])
        if self.name.startswith("hadamard"):
            turned = np.float64(find_codec(self.name).transform(turned, np))
        x = x @ turned
        top = np.abs(x).max(-1, keepdims=True)
        # Keys and values of the engine are off by about 1e-6 of their vector's largest number.
        low, x, high = (self._rounded(x + way * 2e-6 * top, top) for way in (-1, 0, 1))
        self.certain &= bool((low == high).all())
        return x @ turned.T

    def _rounded(self, x, top):
        if self.name == "int8":
            return np.round(x / top * 127) * top / 127
        if self.name[-1] in "34" and self.name != "fp8_e4m3":
            most, low = 2 ** int(self.name[-1]) - 1, x.min(-1, keepdims=True)
            first, step = (np.float64(np.float16(a)) for a in (low, (x.max(-1, keepdims=True) - low) / most))
            return first + np.clip(np.round((x - first) / step), 0, most) * step
        if self.name == "fp8_e4m3":
            return np.clip(x / top * 448, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * top / 448
        return x.astype(ml_dtypes.float8_e5m2).astype(np.float64)


def text_without_ties(name: str, exact: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """A text whose keys and values float32 and float64 round alike, and its log-probabilities."""
    config, params = model()
    for seed in range(200):
        text, stored = np.random.default_rng(seed).integers(2, VOCAB, 10), Definition(name, exact)
        expected = reference_logprobs(params, config, text, stored=stored)
        if stored.certain:
            return text, expected
    raise AssertionError("no such text")


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("int8", ()),
        ("fp8_e4m3", ()),
        ("fp8_e5m2", ()),
        ("int3", ()),
        ("int3", (0,)),
        ("int8", (1,)),
        ("hadamard4", ()),
        ("hadamard4", (0,)),
    ],
)
def test_an_engine_computes_what_a_dense_model_does_with_keys_and_values_by_definition(name, exact):
    config, params = model()
    text, expected = text_without_ties(name, exact)
    # In chunks of 7: a query reads the codes also of its own step.
    llm = make_llm(kv_cache_dtype=name, kv_full_precision_layers=exact, **TIGHT)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": text}, asked)
    got = [entry[int(token)].logprob for token, entry in zip(text[1:], (output.prompt_logprobs or [])[1:], strict=True)]
    # float32 against float64 through two layers, as for an engine that stores float32.
    np.testing.assert_allclose(got, [expected[t, text[t + 1]] for t in range(len(text) - 1)], atol=1e-4)
    full = reference_logprobs(params, config, text)
    assert np.abs(full - expected).max() > 1e-3


def test_attention_multiplies_queries_and_results_instead_of_transformed_keys_and_values(monkeypatch):
    codec, shapes = type(find_codec("hadamard4")), []
    monkeypatch.setattr(codec, "inverse", lambda self, x, xp: shapes.append(x.shape) or x)
    llm = make_llm(kv_cache_dtype="hadamard4", **TIGHT)
    tokens_of(llm, PROMPTS[:1], GREEDY)
    config, _ = model()
    assert shapes and {shape[1:] for shape in shapes} == {(config.num_heads, config.head_dim)}


@compiled
@pytest.mark.cpu("a plugin may lack native attention")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("turboquant4", {"kv_eviction": {"method": "h2o", "budget": 20}}),
        pytest.param(
            "int3", {"kv_selection": {"method": "quest", "budget": 32, "full_layers": 0}}, marks=pytest.mark.soak
        ),
        ("hadamard4", {"pattern": AttentionPattern(window=8, num_sinks=4, sink_position="cache")}),
    ],
)
def test_packed_codes_give_the_same_tokens_in_cpp_and_by_xla(name, settings):
    native, xla = (make_llm(kv_cache_dtype=name, operators={"attention": n}, **settings) for n in ("native", "xla"))
    assert tokens_of(native, PROMPTS, GREEDY) == tokens_of(xla, PROMPTS, GREEDY)


@functools.cache
def alone(name: str) -> list[list[int]]:
    llm = make_llm(kv_cache_dtype=name)
    return [tokens_of(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]


VARIANTS = {
    "swapped": TIGHT | {"preempt": "swap", "host_cache_bytes": 2**16},
    "one token a step": {"max_num_batched_tokens": 1},
    "whole prompts": {"max_num_batched_tokens": 128, "query_tile": 64, "block_size": 8, "num_blocks": 40},
}


@pytest.mark.parametrize(
    ("name", "variant"),
    soak_unless(
        lambda case: case == ("int8", "swapped"), [(name, v) for name in ("int8", "fp8_e5m2") for v in VARIANTS]
    ),
)
def test_tokens_do_not_depend_on_chunks_blocks_batches_or_preemption(name, variant):
    llm = make_llm(kv_cache_dtype=name, **VARIANTS[variant])
    assert tokens_of(llm, PROMPTS, GREEDY) == alone(name)
    assert (variant == "swapped") == (llm.engine.memory.counters.swapped_out > 0)


def test_samples_and_beams_copy_blocks_of_codes():
    llm, [prompt] = make_llm(kv_cache_dtype="int8", **TIGHT), PROMPTS[2:3]
    greedy = SamplingParams(n=2, temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    assert tokens_of(llm, [prompt], greedy) == [alone("int8")[2][:6]] * 2
    assert take_snapshot(llm.engine).summary()["moved_bytes"]["within device"] > 0
    [beam] = llm.generate(prompt, SamplingParams(beam_width=1, max_tokens=6, ignore_eos=True, detokenize=False))
    assert beam.outputs[0].token_ids == alone("int8")[2][:6]


def test_cached_blocks_on_disk_are_those_of_one_codec(tmp_path):
    def run(name: str) -> int:
        settings = {"enable_prefix_caching": True, "host_cache_bytes": 2**18, "cache_write": "through"}
        llm = make_llm(kv_cache_dtype=name, disk_cache_dir=str(tmp_path), **TIGHT | settings)
        llm.engine.memory.disk_reads._timeout_s = 60.0
        with llm:
            [output] = llm.generate(PROMPTS[2], GREEDY)
            assert output.outputs[0].token_ids == alone(name)[2]
            return output.num_cached_tokens

    assert [run("int8"), run("auto"), run("int8"), run("auto")] == [0, 0, 28, 28]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_vector_takes_the_bytes_of_its_arrays(name, platform):
    config, _ = model()
    of_number, of_vector = {"f32": (4, 0), "int8": (1, 4), "fp8_e4m3": (1, 4), "fp8_e5m2": (1, 0)}.get(name, (2, 0))
    if name in ("int4", "int3", "int2") or name.startswith(("hadamard", "turboquant")):
        of_number, of_vector = int(name[-1]) / 8, 4
    layout = layout_of(config, dtype=name, block_size=16, as_bits=tuning(platform).stored_as_bits)
    assert layout.token_bytes == 2 * 2 * config.num_kv_heads * (of_number * config.head_dim + of_vector)
    llm = make_llm(kv_cache_dtype=name)
    assert llm.runner.cache.nbytes == llm.num_blocks * llm.block_bytes == llm.num_blocks * layout.block_bytes


@pytest.mark.parametrize("name", CODECS)
def test_the_compiled_formulas_are_those_of_numpy(name):
    codec = find_codec(name)
    x = np.float32(np.random.default_rng(0).standard_normal((300, 64)) * np.linspace(0, 40, 64))
    expected, got = codec.encode(x, np), jax.jit(lambda x: codec.encode(x, jnp))(x)
    # XLA adds the squares of a vector in another order, and multiplies and adds at once.
    exact = not name.startswith("turboquant")
    for part in expected:
        assert got[part].dtype == expected[part].dtype
        same = np.float64(got[part]), expected[part].astype(np.float64)
        np.testing.assert_allclose(*same, rtol=0 if exact or part == "kv" else 1e-6)
    found = jax.jit(lambda parts: codec.decode(parts, jnp))(expected)
    wanted = codec.decode(expected, np).astype(np.float64)
    np.testing.assert_allclose(np.float64(found), wanted, rtol=0, atol=0 if exact else 1e-6 * np.abs(wanted).max())


def test_a_codec_of_ones_own_is_named_by_its_module():
    llm = make_llm(kv_cache_dtype="tests.engine.test_kv_codecs:Halves")
    assert llm.runner.layout.leaf("kv").dtype == "float16"
    assert tokens_of(llm, PROMPTS[:1], GREEDY) == alone("auto")[:1]  # 11 bits are enough for this model


class Halves:
    def arrays(self, head_dim):
        return {"kv": ((head_dim,), "float16")}

    def encode(self, x, xp):
        return {"kv": x.astype("float16")}

    def decode(self, stored, xp):
        return stored["kv"].astype("float32")


def test_unknown_names_are_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int5', must be one of f32, bf16"):
        make_llm(kv_cache_dtype="int5")


def test_layers_in_full_precision_share_blocks_with_those_in_codes():
    llm = make_llm(kv_cache_dtype="int8", kv_full_precision_layers=[1], **TIGHT)
    assert llm.runner.layout.groups[0].layers == (1, 0)
    of_layer = {name: make_llm(kv_cache_dtype=name, **TIGHT).block_bytes // 2 for name in ("int8", "auto")}
    assert llm.block_bytes == of_layer["int8"] + of_layer["auto"] == llm.runner.cache.nbytes // llm.num_blocks
    alone = [tokens_of(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
    swaps = {"preempt": "swap", "host_cache_bytes": 2**16}
    together = make_llm(kv_cache_dtype="int8", kv_full_precision_layers=[1], **TIGHT | swaps)
    assert tokens_of(together, PROMPTS, GREEDY) == alone
    assert together.engine.memory.counters.swapped_out > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_full_precision_layers": [2]}, "kv_full_precision_layers has 2, the model has layers 0 to 1"),
        ({"kv_full_precision_layers": [0, 1]}, "kv_full_precision_layers has all layers"),
        ({"kv_full_precision_layers": [0], "pattern": MIXED}, r"not equally many \(1 of \(0,\), 0 of \(1,\)\)"),
        ({"kv_full_precision_layers": [-1]}, r"kv_full_precision_layers is \[-1\], must be a list of layers"),
        ({"kv_full_precision_layers": 0}, "kv_full_precision_layers is 0, must be a list of layers"),
        ({"kv_full_precision_layers": [0], "kv_cache_dtype": "auto"}, 'needs another kv_cache_dtype than "auto"'),
    ],
)
def test_layers_that_cannot_be_in_full_precision_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(**{"kv_cache_dtype": "int8"} | settings)

"""Number types go by one name inside, whatever a user calls them; float16 gives what float32 does, to rounding."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, EngineConfig
from ksana_jax.core.config import ConfigError
from ksana_jax.core.dtypes import canonical_dtype
from ksana_jax.core.sources import model_path
from ksana_jax.engine.build import build_engine
from ksana_jax.loading.load import auto_dtype, load_model
from ksana_jax.runner.planner.request import PlanRequest
from tests.engine.small import SMALL, Letters, complete, make_llm, model


class TorchDtype:
    """As torch.bfloat16 prints itself; torch is not installed here."""

    def __repr__(self):
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        ("f32", "f32"),
        ("float32", "f32"),
        ("float", "f32"),
        (np.float32, "f32"),
        (np.dtype("float32"), "f32"),
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        (jnp.bfloat16, "bf16"),
        (jnp.dtype("bfloat16"), "bf16"),
        (TorchDtype(), "bf16"),
        ("torch.float16", "f16"),
        ("half", "f16"),
        ("float16", "f16"),
        (jnp.float16, "f16"),
    ],
)
def test_every_spelling_of_a_dtype_is_one_value_inside(given, inside):
    assert canonical_dtype(given) == inside
    assert EngineConfig(dtype=given) == EngineConfig(dtype=inside)
    assert PlanRequest(dtype=given) == PlanRequest(dtype=inside)


@pytest.mark.parametrize("given", ["f64", "int8", "", None, 16, "fp8", [], np.int32])
def test_other_dtypes_are_refused(given):
    with pytest.raises(ConfigError, match=r"dtype is .*, must be one of f32, bf16, f16, auto \(or float32, "):
        EngineConfig(dtype=given)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "f32"),  # on this CPU
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": None}, "f32"),
        ({}, "f32"),
    ],
)
def test_auto_is_what_the_checkpoint_says(tmp_path, said, dtype):
    path = shutil.copytree(model_path("ksana-tiny"), tmp_path / "model") / "config.json"
    values = json.loads(path.read_text())
    del values["torch_dtype"]
    path.write_text(json.dumps(values | said))
    assert auto_dtype(path.parent) == dtype
    path.write_text(json.dumps(values | {"torch_dtype": "float8_e4m3fn"}))
    with pytest.raises(ConfigError, match=r"config.json: torch_dtype is 'float8_e4m3fn', must be one of"):
        auto_dtype(path.parent)


def test_an_engine_around_weights_takes_auto_from_them():
    assert make_llm(dtype="auto").config.dtype == "f32"
    assert LLM.from_params(*model(), **SMALL, dtype="auto").config.dtype == "f32"
    with pytest.raises(ConfigError, match='dtype is "auto", and there are no weights'):
        build_engine(model()[0], None, EngineConfig(**SMALL, dtype="auto"), executor=object())


def test_weights_are_read_in_float16():
    _, params = load_model("ksana-tiny", "f16")
    _, exact = load_model("ksana-tiny", "f32")
    assert params.embed.dtype == jnp.float16
    np.testing.assert_allclose(params.embed, exact.embed, rtol=2**-10, atol=1e-6)


def test_float16_predicts_as_float32_does_to_rounding():
    config, params = model()
    halves = jax.tree.map(lambda weight: weight.astype(jnp.float16), params)
    engines = (
        LLM.from_params(config, p, tokenizer=Letters(), dtype=d, **SMALL)
        for p, d in ((params, "f32"), (halves, "half"))
    )
    exact, half = (complete(llm, logprobs=0) for llm in engines)
    assert half.token_ids == exact.token_ids
    scores = [
        [entry[token].logprob for entry, token in zip(out.logprobs or [], out.token_ids, strict=True)]
        for out in (exact, half)
    ]
    # bfloat16 is held to 0.5 (test_compiled_step); float16 has three bits more.
    np.testing.assert_allclose(scores[1], scores[0], atol=0.5 / 8)
    assert scores[0] != scores[1]

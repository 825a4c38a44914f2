"""Two engines side by side: one with a perturbed operator, one without a difference, and stored log-probabilities."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.lab.align import command
from ksana_jax.lab.align.command import TextSet, align, align_and_show
from ksana_jax.lab.align.operators import compare_operators
from ksana_jax.lab.align.scores import Scores
from tests.engine.small import SMALL, make_llm, model
from tests.machine import native_products
from tests.reference import reference_logprobs

TEXTS = TextSet(num_prompts=2, prompt_tokens=5, num_tokens=6, seed=0)
TOKENS = list(range(2, 20))


@pytest.fixture(scope="module")
def llm():
    return make_llm()


def test_an_engine_agrees_with_itself(llm):
    found = align(llm, llm, TEXTS)
    assert found["tokens"] == {} and found["starts_at"] is None
    assert found["logprobs"]["identical"] == found["logprobs"]["count"] == 2 * 10


def test_a_perturbed_operator_is_named(llm):
    """Perturbs the last but one of 15 products: q, k, v, o, gate, up and down in two layers, and the logits."""
    other, calls = make_llm(programs={}), []
    runner: Any = other.engine.executor
    given = runner.operators

    def linear(x, w, b=None, *, dtype=None):
        calls.append(w)
        return given.linear(x, w, b, dtype=dtype) * (1.001 if len(calls) % 15 == 14 else 1.0)

    runner.operators = dataclasses.replace(given, linear=linear)
    compared = compare_operators(llm, other, TOKENS)
    assert [c.name for c in compared if c.own] == ["layers.1.w_down"]
    [found] = [c for c in compared if c.own]
    np.testing.assert_allclose(found.own, 0.001, rtol=1e-2)
    at = compared.index(found)
    assert not any(c.total for c in compared[:at]) and compared[at].total and compared[-1].total
    assert not any(c.before for c in compared)


@native_products
def test_a_packed_embedding_is_looked_up_as_its_engine_does():
    config, params = model()
    tied, params = dataclasses.replace(config, tie_embeddings=True), params.replace(head=None)
    exact, packed = (
        LLM.from_params(tied, params, operators={"attention": "xla", "linear": name, "norm": "xla"}, **SMALL)
        for name in ("xla", "packed")
    )
    compared = compare_operators(exact, packed, TOKENS)
    assert max(c.own for c in compared) < 1e-5 and max(c.before for c in compared) < 1e-5


def test_stored_log_probabilities_of_the_float64_model_are_a_side(llm, tmp_path, monkeypatch, capsys):
    config, params = model()
    texts = [np.random.default_rng(i).integers(2, 60, 9).tolist() for i in range(2)]
    exact = [reference_logprobs(params, config, np.array(t))[np.arange(8), t[1:]] for t in texts]
    Scores(texts, [9, 9], exact).write(path := tmp_path / "exact.json")
    opened = {"-": llm, str(path): command.open_side(str(path), "")}
    monkeypatch.setattr(command, "open_side", lambda given, model: opened[given])
    # float32 against float64 through two layers: about 1e-5.
    assert align_and_show(str(path), "-", "", TEXTS, None, 1e-4, True) == 0
    printed = capsys.readouterr().out
    assert "all 2 sequences have the same greedy tokens" in printed and "operator" not in printed.splitlines()[-2]
    assert json.loads(printed.splitlines()[-1])["logprobs"]["count"] == 16
    assert align_and_show("-", str(path), "", TEXTS, None, 1e-9, False) == 1


def test_one_side_alone_is_written(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "open_side", lambda given, model: llm)
    assert align_and_show("-", None, "", TEXTS, tmp_path / "mine.json", None, False) == 0
    monkeypatch.undo()
    found = align(llm, command.open_side(str(tmp_path / "mine.json"), ""), TEXTS)
    assert found["tokens"] == {} and found["logprobs"]["first"] is None
    with pytest.raises(ValueError, match="one side alone must be an engine"):
        align_and_show(str(tmp_path / "mine.json"), None, "", TEXTS, None, None, False)


def test_settings_name_a_side(monkeypatch):
    import ksana_jax

    monkeypatch.setattr(ksana_jax, "LLM", lambda model, **settings: (model, settings))
    assert command.open_side("-", "tiny") == ("tiny", {})
    assert command.open_side("dtype=bf16 block_size=8 model=other", "tiny") == (
        "other",
        {"dtype": "bf16", "block_size": 8},
    )

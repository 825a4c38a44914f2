"""Implementations of operators measured one by one: errors against a float32 engine, times at steps of an engine."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.lab.align.each_operator import measure_operators, operator_errors, shapes_timed
from ksana_jax.lab.align.operators import run_operators
from ksana_jax.models import layers
from ksana_jax.ops import table
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS, LinearImplementation
from ksana_jax.ops.table import operator_table
from tests.engine.small import SMALL, make_llm, model
from tests.machine import native_products

TOKENS = list(range(2, 18))
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def exact():
    llm = make_llm(operators={"attention": "xla", "linear": "xla", "norm": "xla"})
    return run_operators(llm.runner, TOKENS)


def serving(llm, dtype: str) -> set[tuple[str, str]]:
    rows = operator_table(llm.model_config, llm.runner.requirements, dtype)
    return {(row.operator, row.name) for row in rows if row.unsupported is None}


def test_errors_of_all_that_serve_are_those_of_their_type(exact, monkeypatch):
    llm = make_llm()
    found = operator_errors(llm.runner, TOKENS, exact)
    assert set(found) == {key for key in serving(llm, "float32") if key[0] not in ("kv_write", "sampling")}
    assert all(found[operator, "xla"] == 0 for operator in ("attention", "linear", "norm"))
    assert max(found.values()) < 1e-5
    config, params = model()
    monkeypatch.setattr(table, "LINEAR_IMPLEMENTATIONS", LINEAR_IMPLEMENTATIONS[-1:])
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    rounded = operator_errors(LLM.from_params(config, half, dtype="bf16", **SMALL).runner, TOKENS, exact)
    assert all(1e-4 < error < 1e-2 for error in rounded.values())


def test_an_error_is_that_of_one_implementation(exact, monkeypatch):
    def wrong(x, w, b=None, *, dtype=None):
        return layers.linear(x, w, b, dtype=dtype) * 1.01

    one = LinearImplementation("wrong", wrong, lambda platform, dtype: None)
    monkeypatch.setattr(table, "LINEAR_IMPLEMENTATIONS", (one, LINEAR_IMPLEMENTATIONS[-1]))
    found = operator_errors(make_llm().runner, TOKENS, exact)
    assert found["linear", "wrong"] == pytest.approx(0.01, rel=1e-4)
    assert max(error for key, error in found.items() if key != ("linear", "wrong")) < 1e-5


@native_products
def test_a_packed_embedding_is_looked_up_as_its_engine_does():
    config, params = model()
    tied, params = dataclasses.replace(config, tie_embeddings=True), params.replace(head=None)
    exact, llm = (
        LLM.from_params(tied, params, operators={"attention": "xla", "linear": name, "norm": "xla"}, **SMALL)
        for name in ("xla", "packed")
    )
    found = operator_errors(llm.runner, TOKENS, run_operators(exact.runner, TOKENS))
    assert found["linear", "packed"] < 1e-5
    assert run_operators(llm.runner, TOKENS).outputs


def test_times_are_measured_beside_an_engine_that_goes_on():
    llm = make_llm(dtype="bf16")
    before = llm.generate({"prompt_token_ids": TOKENS}, GREEDY)[0].outputs[0].token_ids
    found = measure_operators(llm.runner, shapes_timed(2, 8, 20, 16), TOKENS, None)
    assert {(m.operator, m.name) for m in found} == serving(llm, "bfloat16")
    assert all(set(m.seconds) == {"decode", "chunk"} and min(m.seconds.values()) > 0 for m in found)
    assert all(m.error is None for m in found)
    assert llm.generate({"prompt_token_ids": TOKENS}, GREEDY)[0].outputs[0].token_ids == before


def test_the_table_says_what_an_engine_takes():
    llm = make_llm(operators={"attention": "xla", "linear": "xla", "norm": "xla"}, programs={})
    rows = operator_table(llm.model_config, llm.runner.requirements, "float32", llm.config.operators)
    used = {row.operator: row.name for row in rows if row.used}
    assert used == dict.fromkeys(("attention", "kv_write", "linear", "norm", "sampling"), "xla")
    assert all(row.unsupported or row.needs for row in rows if row.name != "xla")
    rows = operator_table(llm.model_config, llm.runner.requirements, "float32")
    taken, runner = {row.operator: row.name for row in rows if row.used}, make_llm(programs={}).runner
    assert (taken["attention"], taken["linear"]) == (runner.implementation.name, runner.linear_implementation)
    on_gpu = llm.runner.requirements._replace(platform="gpu", compute_capability=(7, 0))
    rows = operator_table(llm.model_config, on_gpu, "bfloat16")
    assert {row.name for row in rows if row.used} == {"xla"}
    assert all(row.unsupported for row in rows if row.name != "xla")

"""A loop over decode steps on the device gives the tokens and log-probabilities of single steps."""

import functools

import jax
import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.runner.decode_loop import LoopKey
from tests.engine.small import Letters, make_llm
from tests.machine import native_products

ASKED = [
    {"temperature": 0, "max_tokens": 30},
    {"temperature": 0, "max_tokens": 22, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "max_tokens": 17, "seed": 3, "logprobs": 2},
    {"temperature": 0.7, "max_tokens": 25, "seed": 4, "stop": ["e", "th"]},
]


def served(**settings):
    """Outputs of requests of all kinds, and the engine that was warmed up for them."""
    llm = make_llm(Letters(), max_model_len=48, **settings)
    params = [SamplingParams(**{"ignore_eos": True, **asked}) for asked in ASKED]
    llm.warm_up(sampling_params=params)
    before = llm.num_compilations
    outputs = llm.generate([{"prompt_token_ids": list(range(2, 9 + i))} for i in range(len(ASKED))], params)
    assert llm.num_compilations == before
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].text) for o in outputs], llm


BITS = pytest.param({"numerics": "invariant"}, marks=native_products)


@pytest.mark.parametrize("settings", [{}, BITS], ids=["fast", "invariant"])
def test_a_warm_engine_gives_the_same_tokens_texts_and_log_probabilities(settings):
    expected, _ = served(**settings)
    found, llm = served(num_scheduler_steps=4, **settings)
    assert any(isinstance(key, LoopKey) for key in llm.runner.programs)
    assert found == expected


def test_a_call_takes_one_vector_to_the_device_and_one_to_the_host(monkeypatch):
    calls, run = [], jax.stages.Compiled.__call__

    def count(self, *args):
        calls.append([x.shape for x in jax.tree.leaves(args) if isinstance(x, np.ndarray)])
        return run(self, *args)

    _, llm = served(num_scheduler_steps=4)
    monkeypatch.setattr(jax.stages.Compiled, "__call__", count)
    submit, per_call = llm.runner.submit_together, []

    def watched(steps):
        calls.clear()
        pending = submit(steps)
        fetched = [cell.cell_contents for p in pending for cell in p.fetch.__closure__]
        vectors = {id(x.args[0].vector) for x in fetched if isinstance(x, functools.partial)}
        per_call.append(([*calls], vectors, len(steps)))
        return pending

    llm.runner.submit_together = watched
    llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=21, ignore_eos=True))
    assert len(per_call) == 5
    for programs, vectors, steps in per_call:
        assert len(programs) == 1 == len(vectors) and [shape[0] for shape in programs[0]] == [steps] == [4]

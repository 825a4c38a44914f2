"""On GPUs a step of decodes and the choice of its tokens are one program; here a CPU does as they do."""

import dataclasses

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.devices import tuning as tuned
from ksana_jax.runner.decode_loop import LoopKey, only_decodes
from ksana_jax.scheduler.step.types import StepShape
from tests.engine.small import Letters, assert_idle, make_llm

ASKED = {
    "greedy": [{"temperature": 0}],
    "sampled": [{"temperature": 0}, {"temperature": 1.0, "top_k": 5, "seed": 3}],
    "scored": [{"temperature": 0, "logprobs": 2}, {"temperature": 0.7, "seed": 4}],
    "penalised": [{"temperature": 0}, {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5}],
    "scored prompts": [{"temperature": 0, "prompt_logprobs": 1}, {"temperature": 0}],
}


@pytest.fixture
def as_on_gpus(monkeypatch):
    cpu = dataclasses.replace(tuned.tuning("cpu"), chooses_in_step=True)
    monkeypatch.setitem(tuned._TUNING, "cpu", cpu)


def served(asked, **settings):
    """Outputs of four requests, whose prompts are computed in chunks; and the engine."""
    settings = {"max_model_len": 48, "max_num_batched_tokens": 8, "programs": {}} | settings
    llm = make_llm(Letters(), **settings)
    params = [SamplingParams(max_tokens=12 + i, ignore_eos=True, **asked[i % len(asked)]) for i in range(4)]
    llm.warm_up(sampling_params=params)
    before = llm.num_compilations
    outputs = llm.generate([{"prompt_token_ids": list(range(2, 9 + i))} for i in range(4)], params)
    assert llm.num_compilations == before
    assert_idle(llm)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs], llm


def programs_of(llm) -> tuple[list, list]:
    """The programs of decodes that choose tokens, and of those that do not."""
    keys = list(llm.runner.programs)
    loops = [key for key in keys if isinstance(key, LoopKey)]
    return loops, [key for key in keys if isinstance(key, StepShape) and only_decodes(key)]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_tokens_and_scores_are_those_of_two_programs(asked, request):
    expected, _ = served(asked)
    request.getfixturevalue("as_on_gpus")
    found, llm = served(asked)
    for (ids, logprobs, of_prompt), (others, other_logprobs, of_other_prompt) in zip(found, expected, strict=True):
        assert ids == others
        assert_close(logprobs, other_logprobs)
        assert_close(of_prompt, of_other_prompt)
    loops, without = programs_of(llm)
    assert loops and {key.num_steps for key in loops} == {1}
    # Only penalties, biases and scores of prompts need layers alone.
    assert bool(without) == any({"presence_penalty", "prompt_logprobs"} & each.keys() for each in asked)


def assert_close(found, expected):
    if expected is None:
        assert found is None
        return
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.keys() == other.keys()
            ours, theirs = ([v.logprob for v in each.values()] for each in (one, other))
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_decode_is_one_program_and_a_step_with_a_chunk_two(as_on_gpus):
    _, llm = served(ASKED["greedy"])
    used, runner = [], llm.runner
    runner._compiled = {key: watched(key, program, used) for key, program in runner._compiled.items()}
    llm.generate([{"prompt_token_ids": [2, 3, 4, 5]}], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    kinds = [key if isinstance(key, LoopKey) else type(key) for key in used]
    assert kinds[:2] == [StepShape, tuple]
    assert len(kinds) == 5 and all(isinstance(key, LoopKey) for key in kinds[2:])


def watched(key, program, used):
    return lambda *arguments: used.append(key) or program(*arguments)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_scheduler_steps": 4},
        {"embedding_device": "host"},
        {"enable_prefix_caching": True, "shared_prefix_attention": True},
        {"num_blocks": 5, "host_cache_bytes": 1 << 20, "preempt": "swap"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    ],
    ids=str,
)
def test_settings_change_nothing(settings, request):
    expected, _ = served(ASKED["sampled"], **settings)
    request.getfixturevalue("as_on_gpus")
    found, llm = served(ASKED["sampled"], **settings)
    assert [ids for ids, *_ in found] == [ids for ids, *_ in expected]
    loops, _ = programs_of(llm)
    expected_steps = {1, 4} if "num_scheduler_steps" in settings else {1}
    assert {key.num_steps for key in loops} == (set() if "embedding_device" in settings else expected_steps)

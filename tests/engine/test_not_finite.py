"""Scores that are NaN or infinite end their request with the reason, and no other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.request import FinishReason
from ksana_jax.sampling.sampler import sample
from tests.engine.small import SMALL, model
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens, run

BAD = 17  # a token whose embedding has a NaN


@pytest.fixture(scope="module")
def llm():
    """Prompts with token BAD have scores that are NaN."""
    config, params = model()
    params = dataclasses.replace(params, embed=params.embed.at[BAD, 3].set(jnp.nan))
    return LLM.from_params(config, params, **SMALL)


def ids(*tokens):
    return {"prompt_token_ids": list(tokens)}


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"seed": 1}, {"repetition_penalty": 1.5}, {"n": 2, "seed": 1}]
)
def test_a_row_whose_scores_are_nan_ends_with_the_reason_and_others_go_on(llm, settings):
    params = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **settings)
    good, other = ids(5, 6, 7), ids(9, 8)
    alone = llm.generate([good, other], params)
    bad, first, second = llm.generate([ids(5, BAD, 7), good, other], params)
    for output in bad.outputs:
        assert output.finish_reason == "error" and output.token_ids == []
        assert "scores of the next token are not finite" in output.error
    if "seed" in settings or settings.get("temperature") == 0:
        assert [o.outputs[0].token_ids for o in (first, second)] == [o.outputs[0].token_ids for o in alone]
    assert all(o.finish_reason == "length" and o.error is None for o in first.outputs)
    assert llm.engine.scheduler.blocks.num_used == 0 and not llm.engine.has_work


def test_beams_whose_scores_are_nan_end_with_the_reason(llm):
    params = SamplingParams(beam_width=2, n=2, max_tokens=4, detokenize=False)
    bad, good = llm.generate([ids(5, BAD), ids(5, 6)], params)
    assert [o.finish_reason for o in bad.outputs] == ["error", "error"]
    assert all("not finite" in o.error for o in bad.outputs)
    assert all(o.finish_reason != "error" for o in good.outputs)
    assert llm.engine.scheduler.blocks.num_used == 0 and not llm.engine.requests


def test_a_row_that_fails_in_the_middle_keeps_what_it_had():
    engine = make_engine(caching=True)
    request = engine.new_request(prompt_of(5), asking(20), streams=True)
    other = engine.new_request(prompt_of(6), asking(20, n=2))
    engine.add([request, other])
    execute = engine.executor.submit

    def fail_once(step):
        output = execute(step)
        if len(request.completions[0].token_ids) == 7 and not request.finished:
            output.tokens[0] = -1  # the first row
        return output

    engine.executor.submit = fail_once
    run(engine)
    [output] = request.output().outputs
    assert output.finish_reason is FinishReason.ERROR and output.error
    assert output.token_ids == reference_tokens(prompt_of(5), 20, FULLY)[:7]
    assert [o.token_ids for o in other.output().outputs] == [reference_tokens(prompt_of(6), 20, FULLY)] * 2


@pytest.mark.parametrize("broken", [[1, np.nan, 2], [-np.inf] * 3, [1, np.inf, 2]])
def test_the_sampler_chooses_nothing_from_scores_that_are_not_finite(broken):
    scores = jnp.array([[1.0, 3.0, 2.0], broken, [-np.inf, 0.0, -np.inf]], jnp.float32)
    assert jax.jit(lambda x: sample(x, None))(scores).tolist() == [1, -1, 1]


def test_a_perplexity_names_the_cause(llm):
    from ksana_jax.lab.runs.tasks.perplexity import _stream

    with pytest.raises(FloatingPointError, match=r"request-[0-9]+: the scores of the next token are not finite"):
        _stream(llm, [[5, BAD, 7]])
    assert np.isfinite(_stream(llm, [[5, 6, 7]])[0]).all()

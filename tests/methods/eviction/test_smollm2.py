"""Eviction on a real model at the size of a study; tests/golden/make_smollm2_eviction.py has the definitions."""

import json
from pathlib import Path

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.lab.runs.asking import token_scores
from tests import real

pytestmark = [pytest.mark.soak, real.smollm2]
RECORDED = json.loads((Path(__file__).parents[2] / "golden" / "smollm2_eviction.json").read_text())
ONCE = {"budget": 128, "recent": 0, "interval": 1, "prompts": "once"}
SINKS = {"method": "streaming_llm", "sinks": 4}
SETTINGS = {
    "full": None,
    "tova": ONCE | {"method": "tova"},
    "keydiff": ONCE | {"method": "keydiff"},
    "snapkv": ONCE | {"method": "snapkv", "budget": 64, "recent": 32},
    "h2o": ONCE | {"method": "h2o", "budget": 64, "recent": 32},
    "streaming_llm": ONCE | SINKS | {"positions": "absolute"},
    "streaming_llm, streamed": ONCE | SINKS | {"positions": "cache", "prompts": "streamed"},
}


def engine(name):
    return LLM("smollm2", max_model_len=704, max_num_seqs=1, max_num_batched_tokens=128, kv_eviction=SETTINGS[name])


@pytest.mark.parametrize("name", RECORDED["mean_logprob"])
def test_log_likelihoods_are_those_of_the_definition(name):
    ids, setting, llm = RECORDED["token_ids"], SETTINGS[name], engine(name)
    prompt, first = {"prompt_token_ids": ids[:512], "question_token_ids": ids[512:]}, 512
    if setting is None:
        prompt = {"prompt_token_ids": ids}
    elif setting["prompts"] == "streamed":
        prompt, first = {"prompt_token_ids": ids[:512]}, 128
    [scores] = token_scores(llm, [prompt])
    found = sum(score.logprob for score in scores[first - 1 :]) / len(scores[first - 1 :])
    # float32, with keys in another order: single tokens differ by 5e-5, their mean by 1e-6.
    assert found == pytest.approx(RECORDED["mean_logprob"][name], abs=1e-5)


@pytest.mark.parametrize("name", RECORDED["mean_logprob"])
def test_decoded_log_likelihoods_are_those_of_the_definition(name):
    ids, streamed = RECORDED["token_ids"], name.endswith("streamed")
    prompt, forced = (ids[:128], ids[128:512]) if streamed else (ids[:512], ids[512:])
    asked = SamplingParams(forced_token_ids=forced, max_tokens=None, logprobs=0, detokenize=False)
    [output] = engine(name).generate({"prompt_token_ids": prompt}, asked)
    # As above.
    assert output.outputs[0].cumulative_logprob / len(forced) == pytest.approx(RECORDED["mean_logprob"][name], abs=1e-5)

"""Measuring implementations: against the float64 model, a side that goes astray, stored texts, and the command."""

import dataclasses
import json
import re
import types
from typing import Any

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.sources import model_path
from ksana_jax.devices.platforms import platform_of
from ksana_jax.engine import verdict
from ksana_jax.engine.verdict import Pair, conditions_of, read_verdict
from ksana_jax.lab.align import choosing
from ksana_jax.lab.align.choosing import _texts_of, dense_reference, measure, stored_reference
from ksana_jax.lab.align.command import TextSet
from ksana_jax.lab.align.scores import Scores
from ksana_jax.loading.load import open_model
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
from tests.engine.small import make_llm, model
from tests.reference import reference_logprobs

RIGHT, WRONG = Pair("xla", "xla"), Pair("native", "mixed")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


class Astray:
    """An engine whose tokens are another's, but for the fourth of the second text; its log-probabilities are higher."""

    def __init__(self, llm):
        self._llm = llm

    def generate(self, prompts, params):
        outputs = self._llm.generate(prompts, params)
        for text, output in enumerate(outputs):
            [completion] = output.outputs
            tokens = list(completion.token_ids)
            tokens[3] += text == 1
            scores = [
                {t: types.SimpleNamespace(logprob=entry[old].logprob + 0.25)}
                for t, old, entry in zip(tokens, completion.token_ids, completion.logprobs, strict=True)
            ]
            output.outputs = [dataclasses.replace(completion, token_ids=tokens, logprobs=scores)]
        return outputs


def float64(text, tokens):
    config, params = model()
    scores = reference_logprobs(params, config, np.array(tokens))[:-1]
    return scores.argmax(-1), scores[np.arange(len(tokens) - 1), tokens[1:]]


def test_agreement_ends_where_the_reference_would_go_on_otherwise():
    llm = make_llm()
    engines: Any = {WRONG: Astray(llm), RIGHT: llm}
    wrong, right = measure(engines, float64, PROMPTS, 6)
    assert (right.pair, right.agreed, wrong.pair, wrong.agreed) == (RIGHT, (6, 6), WRONG, (6, 3))
    assert right.max_difference < 1e-4 and right.tokens_per_s > 0
    np.testing.assert_allclose([wrong.mean_difference, wrong.max_difference], 0.25, atol=1e-4)


def test_stored_texts_are_a_reference():
    llm = make_llm()
    [first] = measure({RIGHT: llm}, float64, PROMPTS, 6)
    from ksana_jax.lab.align.scores import generated

    whole = generated(llm, PROMPTS, [6, 6])
    whole[0][5] += 1  # the third token that was generated
    stored = Scores(whole, [3, 4], [float64(0, text)[1] for text in whole])
    [found] = measure({RIGHT: llm}, stored_reference(stored), stored.prompts(), 6)
    assert found.agreed == (2, 6) and found.max_difference < 1e-4 > first.max_difference
    assert _texts_of(stored)[:3] == (2, 4, 6)
    with pytest.raises(ConfigError, match="sequences of the reference have 5, 6 generated tokens"):
        _texts_of(dataclasses.replace(stored, num_prompt_tokens=[4, 4]))


def test_the_float32_model_without_a_cache_is_that_of_the_checkpoint():
    config, read_params = open_model(model_path("ksana-tiny"), "f32")
    params = read_params()
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, 24).tolist()
    greedy, logprobs = dense_reference(config, params, 64)(0, tokens)
    exact = reference_logprobs(params, config, np.array(tokens))[:-1]
    np.testing.assert_allclose(logprobs, exact[np.arange(23), tokens[1:]], atol=1e-4)
    assert greedy.tolist() == exact.argmax(-1).tolist()


def test_the_command_writes_a_verdict_that_an_engine_and_doctor_read(tmp_path, monkeypatch, run_ksana):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(verdict, "verdict_folder", lambda: tmp_path)
    sizes = ["--num-prompts", "2", "--prompt-tokens", "4", "--num-tokens", "3"]
    settings = "operators.attention=xla operators.linear=xla max_num_batched_tokens=8 query_tile=8"
    code, out, _ = run_ksana("align", settings, "--choose", "--json", *sizes)
    printed = out.splitlines()
    assert code == 0
    [path] = tmp_path.glob("*.json")
    found = read_verdict(path)
    assert [m.pair for m in found.measured] == [RIGHT] and found.measured[0].agreed == (3, 3)
    assert json.loads(printed[-1])["chosen"] == list(RIGHT)
    assert f"{RIGHT}: agrees with the float32 model without a cache for 6 of 6 tokens" in printed
    *lines, last = run_ksana("doctor", "--json")[1].splitlines()
    [shown] = json.loads(last)["verdicts"]
    # Used where there is no compiler.
    assert re.search("norm xla (yes )?runs everywhere", " ".join(" ".join(lines).split()))
    assert shown["model"] == "ksana-tiny" and shown["chosen"] == {"attention": "xla", "linear": "xla"}


def test_every_pair_that_serves_is_measured_in_an_engine_of_its_own(monkeypatch):
    seen: dict[Pair, Any] = {}
    monkeypatch.setattr(choosing, "measure", lambda engines, *_: seen.update(engines) or [])
    found = choosing.choose("dtype=bf16 operators.attention=xla", "ksana-tiny", TextSet(2, 8, 8, 0), None, "float32")
    linear = [i.name for i in LINEAR_IMPLEMENTATIONS if i.why_not(platform_of(), "bfloat16") is None]
    assert list(seen) == [Pair("xla", name) for name in linear]
    for pair, llm in seen.items():
        assert (llm.runner.implementation.name, llm.config.operators.linear) == pair
    asked = EngineConfig(dtype="bf16", operators={"attention": "xla", "prefer": "agreement"})
    assert found.conditions == conditions_of(llm.model_config, asked)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dtype=bf16"], "--choose compares with a .json file of log-probabilities, not with 'dtype=bf16'"),
        (["--threshold", "1"], "--threshold does not go with --choose"),
    ],
)
def test_what_does_not_go_with_choose_is_refused(run_ksana, words, message):
    code, _, error = run_ksana("align", "-", *words, "--choose")
    assert code and message in " ".join(error.split())


def test_verdicts_are_not_measured_on_several_devices():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, must be 1: verdicts hold for one device"):
        choosing.choose("tensor_parallel_size=2", "ksana-tiny", TextSet(2, 8, 8, 0), None, "float32")

"""Speculation compiles a bounded number of programs beside the plain engine's. Nothing is compiled here."""

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.runner.decode_loop import LoopKey
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepShape

METHODS = {
    "ngram": {"num_speculative_tokens": 4},
    "trie": {"num_speculative_tokens": 8},
    "trie with branches": {"method": "trie", "num_speculative_tokens": 8, "decoding_mode": "hier"},
    "jacobi": {"num_speculative_tokens": 17},
    "draft_model": {"num_speculative_tokens": 4, "model": "ksana-tiny"},
    "draft_model by goodput": {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": "ksana-tiny",
        "adaptive": "goodput",
    },
    "bild": {"num_speculative_tokens": 10, "model": "ksana-tiny", "fallback_threshold": 0.6, "rollback_threshold": 0},
}
ASKED = {
    "greedy": [],
    "sampled": [SamplingParams(temperature=1.0)],
    "all": [SamplingParams(temperature=1.0, logprobs=5), SamplingParams(presence_penalty=0.3)],
}


@pytest.fixture
def keys_of(monkeypatch):
    """Returns the keys of the programs that the target, and a draft model if any, compile ahead of time."""
    found: list[list] = []
    monkeypatch.setattr(Runner, "compile", lambda self, keys, *_, **__: found.append(list(keys)))

    def keys(asked, num_rows, **settings) -> list[list]:
        llm = LLM("ksana-tiny", num_blocks=64, max_num_seqs=num_rows, **settings)
        found.clear()
        llm.warm_up(256, asked)
        return list(found)

    return keys


def split(keys: list) -> tuple[int, int]:
    """Numbers of programs that compute layers, and that only choose and accept tokens."""
    layers = sum(isinstance(key, StepShape | LoopKey) for key in keys)
    return layers, len(keys) - layers


@pytest.mark.parametrize("num_rows", [16, 64, 256])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_programs_are_at_most_twice_as_many_those_of_a_draft_model_included(keys_of, asked, num_rows):
    [plain] = keys_of(asked, num_rows)
    for method, settings in METHODS.items():
        target, *small = keys_of(asked, num_rows, speculative_config={"method": method} | settings)
        assert len(small) == ("model" in settings)
        assert set(plain) < set(target)
        assert all(len(set(keys)) == len(keys) for keys in (plain, target, *small))
        assert sum(map(len, (target, *small))) <= 2 * len(plain), method
        for keys in small:
            assert split(keys)[1] == 0 and 2 * len(keys) <= len(plain)

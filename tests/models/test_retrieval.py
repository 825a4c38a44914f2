"""Which heads need the whole text, against the definition in float64 that changes one head at a time."""

import dataclasses

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.models import retrieval
from ksana_jax.models.params import init_params
from tests.engine.small import VOCAB, model
from tests.reference import reference_logprobs


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(retrieval, "STREAMING", AttentionPattern(window=6, num_sinks=2, sink_position="absolute"))
    monkeypatch.setattr(retrieval, "NUM_PASSKEYS", 2)
    monkeypatch.setattr(retrieval, "PASSKEY", 3)


def test_a_score_is_what_one_streaming_head_changes_in_the_hidden_states_of_repeated_passkeys(short):
    config, params = model()
    tokens = np.random.default_rng(1).integers(2, VOCAB, (2, 24))
    scores = retrieval.duoattention(params, config, tokens)["scores"]
    texts = retrieval.with_passkeys(tokens)
    for at in range(4):
        one = [retrieval.STREAMING if i == at else FULL for i in range(4)]
        off = [
            np.subtract(*(reference_logprobs(params, config, t, p, hidden=True) for p in (one, FULL))) for t in texts
        ]
        # float32 against float64.
        assert scores.flat[at] == pytest.approx(np.mean(np.array(off)[:, -6:] ** 2), rel=1e-3)
    assert (scores > 0).all()


def test_heads_whose_keys_are_shared_stream_together(short):
    config, params = model()
    config = dataclasses.replace(config, num_layers=4, kv_layers=(0, 1, 0, 1))
    params = init_params(config, seed=3, std=0.5)
    tokens = np.random.default_rng(1).integers(2, VOCAB, (1, 24))
    scores = retrieval.duoattention(params, config, tokens)["scores"]
    [text] = retrieval.with_passkeys(tokens)
    one = [retrieval.STREAMING if i in (2, 6) else FULL for i in range(8)]  # head 0 of layers 1 and 3
    off = np.subtract(*(reference_logprobs(params, config, text, p, hidden=True) for p in (one, FULL)))
    assert scores[1, 0] == scores[3, 0] == pytest.approx(np.mean(off[-6:] ** 2), rel=1e-3)
    assert (scores[0] == scores[2]).all()


def test_passkeys_are_outside_the_sinks_and_the_windows_of_the_queries_that_repeat_them(short):
    tokens = np.arange(40)[None] + 100
    [text] = retrieval.with_passkeys(tokens)
    end = [text[-6:-3].tolist(), text[-3:].tolist()]
    starts = [next(i for i in range(34) if text[i : i + 3].tolist() == key) for key in end]
    assert min(starts) == 2 and max(starts) + 3 <= 34 - 6
    with pytest.raises(ConfigError, match="texts of 19 tokens are too short for passkeys"):
        retrieval.with_passkeys(tokens[:, :19])

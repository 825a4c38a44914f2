"""A chat with a prefix cache and without, on the real engine with a model of one layer whose rows evict."""

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments.config import plan
from ksana_jax.lab.experiments.tasks.paired import of_side
from tests.lab.experiments.runs import Engines, reported

pytestmark = pytest.mark.usefixtures("few_shapes")

EVICTION = {"method": "h2o", "budget": 32, "prompts": "streamed"}
GIVEN = {
    "task": "chat",
    "load_format": "dummy",
    "engine": {
        "block_size": 8,
        "num_blocks": 5,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        "kv_eviction": EVICTION,
    },
    "settings": {"prompt_tokens": 100, "output_tokens": 9, "questions": ["Why?", "How?", "When?"]},
}


def test_a_turn_computes_its_question_and_answers_as_without_a_cache(tmp_path, one_layer):
    made = reported(plan(GIVEN | {"model": one_layer}), tmp_path, make_llm=Engines())
    [row] = made.rows
    [trial] = row.trials
    [plain], [cached] = (of_side(trial, side) for side in ("without", "with"))
    lengths = plain["prompt_tokens"]
    assert cached["prompt_tokens"] == lengths and lengths[0] > 100
    assert plain["cached_tokens"] == [0, 0, 0]
    # All but the last token of an answer, which is never computed.
    assert cached["cached_tokens"] == [0, *(length + 9 - 1 for length in lengths[:2])]
    assert plain["answers"] == cached["answers"]
    assert row.mean("same") == 1
    assert row.mean("prompt_tokens_without") == sum(lengths)
    assert row.mean("prompt_tokens_with") == sum(lengths) - sum(cached["cached_tokens"])
    assert "the same answers" in made.conclusion and (tmp_path / "figure.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ({"enable_prefix_caching": False}, {}, "engine.enable_prefix_caching is false"),
        ({}, {"questions": []}, r"settings.questions is \[\], must be a list of at least one text"),
        ({}, {"questions": [""]}, r"settings.questions is \[''\]"),
        ({}, {"prompt_tokens": 10**7}, "the document of settings.texts"),
    ],
)
def test_settings_that_cannot_be_are_named(one_layer, engine, settings, message):
    given = GIVEN | {"model": one_layer}
    given |= {"engine": given["engine"] | engine, "settings": given["settings"] | settings}
    with pytest.raises(ConfigError, match=message):
        plan(given)

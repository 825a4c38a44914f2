"""The task `speculative` on the real engine, with the embedded model cut to one narrow layer."""

import copy

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.models import tokenizer_of
from ksana_jax.lab.runs.tasks import speculative
from ksana_jax.lab.runs.tasks.speculative_figure import expected_length
from ksana_jax.lab.runs.tasks.speculative_prompts import PROMPTS
from tests.lab.runs.runs import reported
from tests.machine import native_products

pytestmark = pytest.mark.usefixtures("few_shapes")


def given(model, **changes):
    settings = {
        "speculative_config": {"method": "trie", "num_speculative_tokens": 3},
        "prompt_tokens": 32,
        "output_tokens": 12,
        "batch_size": 2,
        "num_batches": 2,
    }
    engine = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 16}
    engine["numerics"] = changes.pop("numerics", "fast")
    base = {"task": "speculative", "model": model, "load_format": "dummy", "engine": engine}
    return {**base, "settings": settings | changes.pop("settings", {}), **changes}


@native_products
def test_tries_that_know_the_outputs_have_fewer_steps_and_the_same_texts(one_layer, tmp_path):
    variants = [
        {"name": "cold"},
        {"name": "traffic", "settings.traffic": 8, "settings.prompts": "shared"},
        {"name": "preloaded", "settings.preloaded": 8, "settings.prompts": "shared"},
    ]
    made = reported(plan(given(one_layer, numerics="invariant", variants=variants)), tmp_path / "out")
    for row in made.rows:
        with_, without = (speculative.of_side(row.trials[0], side)[0] for side in ("with", "without"))
        assert row.mean("same") == 1 and with_["num_output_tokens"] == without["num_output_tokens"] == 4 * 12
        assert row.mean("per_forward") == 48 / (48 - with_["num_accepted_tokens"])
        assert row.mean("gain") == without["seconds"] / with_["seconds"]
    cold, traffic, preloaded = (row.mean("per_forward") or 0 for row in made.rows)
    assert min(traffic, preloaded) >= cold
    assert (tmp_path / "out" / "figure.png").stat().st_size > 1000


@native_products
def test_texts_that_differ_are_an_error_of_the_trial(one_layer, tmp_path, monkeypatch):
    monkeypatch.setattr(speculative, "_same", lambda runs: 0.5)
    with pytest.raises(AssertionError, match=r"50\.0% of the outputs differ"):
        reported(plan(given(one_layer, numerics="invariant")), tmp_path / "out", debug=True)


def test_texts_of_a_rule_that_may_change_them_are_scored_by_the_model(one_layer, tmp_path):
    config = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": "rejection"}
    made = reported(
        plan(given(one_layer, settings={"speculative_config": config, "temperature": 1.0})), tmp_path / "out"
    )
    (row,) = made.rows
    assert any("nats/token" in column.title for column in made.columns)
    # Random weights: every token is about as probable as any other of the 1,024.
    for side in ("without", "with"):
        assert abs((row.mean(f"nll_{side}") or 0) - np.log(1024)) < 1


def test_the_figure_has_the_formula_over_the_number_of_draft_tokens(one_layer, tmp_path):
    grid = {"settings.speculative_config.num_speculative_tokens": [1, 3]}
    made = reported(plan(given(one_layer, grid=grid)), tmp_path / "out")
    assert [row.point for row in made.rows] == [{next(iter(grid)): k} for k in (1, 3)]
    assert (tmp_path / "out" / "figure.png").stat().st_size > 1000
    assert expected_length(0.5, 2) == 1.75 and expected_length(1, 3) == 4 and expected_length(0, 3) == 1


def test_prompts_have_their_length_and_what_they_repeat():
    tokenizer = tokenizer_of("ksana-tiny")
    with pytest.raises(ValueError, match="comes without a chat template"):
        PROMPTS["chat"]([], tokenizer, 1, 64, 0)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %} Answer:"
    with pytest.raises(ValueError, match="9 tokens, of which the chat template and the question take "):
        PROMPTS["chat"]([], tokenizer, 1, 9, 0)
    (asked,) = PROMPTS["chat"]([], tokenizer, 1, 64, 0)
    assert tokenizer.decode(asked).startswith("user: Explain") and tokenizer.decode(asked).endswith(" Answer:")
    for make in PROMPTS.values():
        assert [len(ids) for ids in make([], tokenizer, 3, 64, 0)] == [64] * 3
    (text,) = PROMPTS["edit"]([], tokenizer, 1, 64, 0)
    assert text[48:] == text[1:17]
    both = np.array(PROMPTS["shared"]([], tokenizer, 4, 64, 0))
    assert len({tuple(text) for text in both[:, 9:]}) == 1 and len({tuple(text) for text in both[:, :9]}) == 4


def test_settings_that_do_not_fit_are_refused(one_layer):
    for changed, message in (
        ({"settings": {"batch_size": 3}}, r"batch_size is 3, engine\.max_num_seqs is 2"),
        ({"settings": {"prompts": "edits"}}, "prompts is 'edits', must be one of"),
        ({"settings": {"speculative_config": {"method": "ngrams", "num_speculative_tokens": 2}}}, "ngrams"),
        ({"engine": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}}, "must be null"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(given(one_layer, **changed))

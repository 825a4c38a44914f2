"""Generated workloads have the rates, gaps, lengths and shared prefixes that their settings say."""

import dataclasses
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from yaml import safe_load

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload import PRESETS, WORKLOADS, read_workload
from ksana_jax.serve.workload.arrivals import unit_gaps
from ksana_jax.serve.workload.items import asked_for
from tests.serve.workload.hit_rate import infinite_hit_rate

VOCAB = 1000
# Settings that a kind needs; others need a path.
NEEDED = {"synthetic": {}, "sessions": {}}
# Of the traces of 2023: median and 99th percentile of prompts and answers.
AZURE = {"azure_code": ((1469, 7436), (13, 252)), "azure_conv": ((1020, 4142), (129, 601))}


def plain(workload):
    """All that is drawn, with the tokens, so that two workloads can be compared."""
    skipped = ("tokens", "output_tokens", "arrival_s")
    fields = [f.name for f in dataclasses.fields(workload.items[0]) if f.name not in skipped]
    return [
        (*(getattr(item, name) for name in fields), item.tokens().tolist(), item.output_tokens().tolist())
        for item in workload.items
    ]


@pytest.mark.parametrize("preset", AZURE)
def test_quantiles_of_lengths_are_those_of_the_traces(preset):
    made = read_workload(preset, num_requests=20_000).make(VOCAB).describe()
    for found, (p50, p99) in zip((made["prompt_tokens"], made["output_tokens"]), AZURE[preset], strict=True):
        assert found["p50"] == pytest.approx(p50, rel=0.05) and found["p99"] == pytest.approx(p99, rel=0.05)


@pytest.mark.parametrize("cv", [0, 1, 3, 13])
def test_gaps_have_the_coefficient_of_variation_and_a_mean_of_one(cv):
    gaps = unit_gaps(0, 400_000, cv)
    assert gaps.mean() == pytest.approx(1) and gaps.std() == pytest.approx(cv, rel=0.03, abs=1e-12)


def test_a_gap_of_a_poisson_process_says_nothing_about_the_next():
    gaps = unit_gaps(1, 100_000, 1.0)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.01
    assert np.mean(gaps > 1) == pytest.approx(math.exp(-1), rel=0.02)


def test_orca_draws_both_ends_of_its_ranges():
    made = read_workload("orca", num_requests=20_000).make(VOCAB)
    prompts, outputs = ([getattr(i, name) for i in made.items] for name in ("num_prompt", "num_output"))
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (32, 512, 1, 128)


@pytest.mark.parametrize("setting", [{"preset": "orca"}, {"kind": "sessions"}, {"preset": "mooncake_synthetic"}])
def test_the_rate_is_that_asked_for_and_two_rates_differ_by_nothing_else(setting):
    settings = read_workload(setting, num_requests=60, rate=2.0)
    slow, fast = settings.make(VOCAB), dataclasses.replace(settings, rate=5.0).make(VOCAB)
    assert (slow.rate, fast.rate) == (pytest.approx(2.0), pytest.approx(5.0))
    scaled = slow.scaled(5.0)
    assert scaled.arrivals == pytest.approx(slow.arrivals * 0.4) and scaled.arrivals == pytest.approx(fast.arrivals)
    assert plain(scaled) == plain(slow)


@pytest.mark.parametrize("kind", ["synthetic", "sessions"])
def test_a_workload_is_a_function_of_its_settings(kind):
    settings = read_workload(kind, num_requests=40, clients={"a": 1, "b": 3})
    one, two = settings.make(VOCAB), settings.make(VOCAB)
    assert plain(one) == plain(two) and np.array_equal(one.arrivals, two.arrivals)
    assert plain(pickle.loads(pickle.dumps(one))) == plain(one)  # noqa: S301  our own
    other = dataclasses.replace(settings, seed=1).make(VOCAB)
    first = {item.tokens()[:16].tobytes() for item in one.items}
    assert first.isdisjoint(item.tokens()[:16].tobytes() for item in other.items)


@pytest.mark.parametrize("kind", ["synthetic", "sessions"])
def test_the_same_requests_can_have_other_texts(kind):
    settings = read_workload(kind, num_requests=40)
    one, other = settings.make(VOCAB), dataclasses.replace(settings, text_seed=7).make(VOCAB)
    assert [row[:-2] for row in plain(one)] == [row[:-2] for row in plain(other)]
    first = {item.tokens()[:16].tobytes() for item in one.items}
    assert first.isdisjoint(item.tokens()[:16].tobytes() for item in other.items)


def test_more_requests_begin_with_those_of_fewer():
    few, many = (read_workload("azure_conv", num_requests=n).make(VOCAB) for n in (10, 40))
    assert plain(few) == plain(many)[:10]


def test_lengths_of_tokens_are_those_announced_and_ids_are_in_the_vocabulary():
    for item in read_workload("sessions", num_requests=50).make(50).items:
        assert (len(item.tokens()), len(item.output_tokens())) == (item.num_prompt, item.num_output)
        assert item.tokens().dtype == np.int32 and item.tokens().min() >= 3 and item.tokens().max() < 50


def test_a_turn_repeats_the_prompt_and_the_answer_of_the_one_before():
    items = read_workload("sessions", num_requests=80, turns=5).make(VOCAB).items
    later = [item for item in items if item.after is not None]
    assert later
    for item in later:
        before = items[item.after]
        said = np.concatenate([before.tokens(), before.output_tokens()])
        assert before.session == item.session and math.isnan(item.arrival_s)
        assert len(said) < item.num_prompt and np.array_equal(item.tokens()[: len(said)], said)


def test_sessions_have_the_mean_turns_think_times_and_popularity_of_their_settings():
    items = read_workload("sessions", num_requests=20_000, turns=4, think_s=10).make(VOCAB).items
    sessions = {item.session for item in items}
    assert len(items) / len(sessions) == pytest.approx(4, rel=0.05)
    assert np.mean([item.think_s for item in items if item.after is not None]) == pytest.approx(10, rel=0.05)
    starts = [item.tokens()[:8].tobytes() for item in items if item.after is None]
    _, counts = np.unique(starts, return_counts=True)
    shares = np.sort(counts)[::-1] / len(starts)
    assert shares == pytest.approx((1 / np.arange(1, 11)) / (1 / np.arange(1, 11)).sum(), abs=0.02)


@pytest.mark.parametrize("preset, target", [("mooncake_conversation", 0.37), ("mooncake_synthetic", 0.64)])
@pytest.mark.parametrize("seed", [0, 1])
def test_presets_have_the_hit_rates_of_the_traces(preset, target, seed):
    assert PRESETS[preset]["hit_rate"] == target
    made = read_workload(preset, num_requests=300, seed=seed).make(VOCAB)
    assert infinite_hit_rate(made, 64) == pytest.approx(target, abs=0.01)


@pytest.mark.parametrize(
    "preset, mean, p50", [("mooncake_conversation", 12_035, 6_909), ("mooncake_synthetic", 15_325, 11_587)]
)
def test_presets_have_prompts_as_long_as_those_of_the_traces(preset, mean, p50):
    prompts = read_workload(preset, num_requests=12_000).make(VOCAB).describe()["prompt_tokens"]
    assert prompts["mean"] == pytest.approx(mean, rel=0.06) and prompts["p50"] == pytest.approx(p50, rel=0.06)


# Requests and seconds of the published files.
@pytest.mark.parametrize(
    "preset, count, span_s", [("mooncake_conversation", 12_031, 3_537.0), ("mooncake_synthetic", 3_993, 1_022.0)]
)
def test_presets_offer_the_load_of_the_traces(preset, count, span_s):
    assert read_workload(preset, num_requests=300).make(VOCAB).rate == pytest.approx(count / span_s, rel=0.01)


def test_single_requests_share_nothing():
    assert infinite_hit_rate(read_workload("orca", num_requests=100).make(VOCAB)) == 0


def test_a_hit_rate_that_system_prompts_cannot_give_is_refused():
    with pytest.raises(ConfigError, match=r"hit_rate is 0.1, the 200 turns drawn give 0\.\d+ to"):
        read_workload("sessions", num_requests=200, turns=8, hit_rate=0.1).make(VOCAB)


def test_sessions_end_before_a_prompt_that_is_too_long():
    free, cut = (read_workload("sessions", num_requests=300, max_prompt=n).make(VOCAB) for n in (None, 600))
    assert max(i.num_prompt for i in free.items) > 600 >= max(i.num_prompt for i in cut.items)
    assert len(cut.items) < len(free.items) and "turns left out, longer than 600 tokens" in cut.notes[0]


def test_cut_lengths_are_reported():
    made = read_workload("orca", num_requests=50, max_prompt=100, max_output=10).make(VOCAB)
    assert max(i.num_prompt for i in made.items) == 100 and max(i.num_output for i in made.items) == 10
    assert "prompts cut to 100 tokens" in made.notes[0] and "answers cut to 10 tokens" in made.notes[1]


def test_clients_ask_for_a_class_a_constant_or_as_oracles_for_the_length():
    assert [asked_for(n, None, False) for n in (1, 64, 65, 5000)] == [(1, 64), (64, 64), (65, 256), (5000, 16384)]
    assert (asked_for(50, 100, False), asked_for(200, 100, False)) == ((50, 100), (100, 100))
    assert (asked_for(50, None, True), asked_for(200, 100, True)) == ((50, 50), (100, 100))
    for kind in ("synthetic", "sessions"):
        items = read_workload(kind, num_requests=50, max_tokens=100, output=[1, 200]).make(VOCAB).items
        assert {item.max_tokens for item in items} == {100} and max(item.num_output for item in items) == 100


def test_clients_have_their_shares():
    items = read_workload("orca", num_requests=10_000, clients={"a": 1, "b": 3}).make(VOCAB).items
    assert np.mean([item.client == "b" for item in items]) == pytest.approx(0.75, abs=0.02)


def test_requests_without_a_rate_come_at_once_and_cannot_be_scaled():
    made = read_workload("orca", num_requests=5, rate=None).make(VOCAB)
    assert not made.arrivals.any() and made.describe()["rate"] is None
    with pytest.raises(ConfigError, match="no gaps to scale"):
        made.scaled(2.0)


@pytest.mark.parametrize(
    "setting, message",
    [
        ("gama", "workload kind is 'gama', must be one of synthetic, sessions"),
        ({"preset": "azure_cod"}, "no preset 'azure_cod'; the nearest of .* is 'azure_code'"),
        ({"kind": "synthetic", "rat": 1}, "'synthetic' has no setting 'rat'; the nearest is 'rate'"),
        ({"rate": 1}, "must be a mapping with a 'kind' or a 'preset'"),
        ({"kind": "synthetic", "rate": 0}, "rate is 0, must be a finite number above 0 or None"),
        ({"kind": "synthetic", "prompt": [9, 3]}, "prompt: high is 3, must be an integer from 9"),
        ({"kind": "synthetic", "prompt": {"p50": 9}}, r"prompt is \{'p50': 9\}, must be an integer, \[low, high\]"),
        ({"kind": "synthetic", "output": 0}, "output is 0, must be an integer from 1"),
        ({"kind": "synthetic", "num_requests": 1.5}, "num_requests is 1.5, must be an integer from 1"),
        ({"kind": "synthetic", "clients": {"a": -1}}, r"clients\[a\] is -1, must be a finite number above 0"),
        ({"kind": "sessions", "turns": 0.5}, "turns is 0.5, must be a number from 1"),
        ({"kind": "tests.serve.workload.test_generated:plain"}, "is not a subclass of WorkloadSettings"),
    ],
)
def test_a_wrong_setting_is_named_with_its_limit(setting, message):
    with pytest.raises(ConfigError, match=message):
        read_workload(setting)


def test_a_vocabulary_without_ordinary_tokens_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 3, must be an integer from 4"):
        read_workload("orca").make(3)


def test_the_page_on_workloads_lists_every_key_and_its_examples_run(capsys):
    text = (Path(__file__).parents[3] / "docs" / "use" / "workloads.md").read_text(encoding="utf-8")
    kinds = [type(read_workload({"kind": kind, **NEEDED.get(kind, {"path": "x"})})) for kind in WORKLOADS]
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert {key for key in (*keys, *WORKLOADS, *PRESETS) if f"`{key}`" not in text} - {"log_type"} == set()
    yaml, code = (re.findall(rf"```{language}\n(.*?)```", text, re.S) for language in ("yaml", "python"))
    assert read_workload(safe_load(yaml[0])["workload"]).label == "azure_conv"
    exec(code[0], {})
    assert "'num_requests': 1000" in capsys.readouterr().out


def test_every_kind_and_preset_resolves():
    for kind in WORKLOADS:
        assert read_workload({"kind": kind, **NEEDED.get(kind, {"path": "x"})})
    for preset in PRESETS:
        assert read_workload(preset).name == preset

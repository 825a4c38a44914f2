"""Two sides timed in turns, with sides that are plain functions."""

import pytest

from ksana_jax.lab.runs.tasks.paired import of_side, pairs, speeds, twin


class Side:
    """Takes the given seconds, one value a call; the first calls compile something."""

    def __init__(self, seconds, num_compiling=0):
        self.seconds, self.num_compiling, self.salts = iter(seconds), num_compiling, []

    def __call__(self, salt):
        self.salts.append(salt)
        compiling = len(self.salts) <= self.num_compiling
        return {
            "seconds": 100.0 if compiling else next(self.seconds),
            "compiled_while_timed": int(compiling),
            "num_output_tokens": 60,
            "num_requests": 6,
            "ttft_s": 0.1,
            "num_preemptions": 0,
            "mean_running": 3.0,
            "num_computed_tokens": 90,
            "num_steps": 20,
        }


def test_a_pair_that_compiled_something_is_run_again():
    without, with_ = Side([1.0, 2.0], num_compiling=2), Side([1.0, 2.0, 3.0, 4.0])
    runs = list(pairs(without, with_, num_pairs=2, seed=0))
    by_side = [(m["side"], m["seconds"]) for m in runs]
    assert by_side == [("without", 1.0), ("with", 3.0), ("with", 4.0), ("without", 2.0)]
    assert speeds(runs)["compiled_while_timed"] == 0


def test_a_pair_that_never_stops_compiling_says_so():
    runs = list(pairs(Side([], num_compiling=9), Side([1.0] * 9), num_pairs=1, seed=0))
    assert speeds(runs)["compiled_while_timed"] == 1


def test_each_side_is_first_in_every_other_pair():
    runs = list(pairs(Side([1.0] * 4), Side([1.0] * 4), num_pairs=4, seed=0))
    firsts = [runs[i]["side"] for i in range(0, 8, 2)]
    assert firsts == ["without", "with", "without", "with"]
    assert next(pairs(Side([1.0]), Side([1.0]), num_pairs=1, seed=1))["side"] == "with"


def test_no_run_can_find_what_another_one_has_cached():
    without, with_ = Side([1.0] * 3), Side([1.0] * 3)
    list(pairs(without, with_, num_pairs=3, seed=0))
    salts = without.salts + with_.salts
    assert len(set(salts)) == len(salts) == 6


def test_the_gain_is_that_of_the_median_pair_and_not_of_the_median_times():
    # The machine slows down for the last pair.
    runs = list(pairs(Side([2.0, 4.0, 9.0]), Side([1.0, 1.0, 3.0]), num_pairs=3, seed=0))
    result = speeds(runs)
    assert result["gain"] == 3.0  # of 2, 4 and 3; the median times have 4
    assert result["tokens_per_s_without"] == pytest.approx(60 / 4)
    assert result["requests_per_s_with"] == pytest.approx(6)
    assert [m["pair"] for m in of_side(runs, "with")] == [0, 1, 2]


class Engine:
    """An engine that only has patterns."""

    def __init__(self, patterns):
        self.patterns = patterns

    def set_pattern(self, patterns):
        self.patterns = patterns


def test_both_engines_of_a_trial_have_its_patterns():
    engine = Engine("full")
    other = twin(engine, "drafts", lambda: Engine(engine.patterns))
    engine.set_pattern("window")
    assert twin(engine, "drafts", pytest.fail) is other and other.patterns == "window"


def test_an_engine_keeps_one_twin_or_all_of_them():
    engine = Engine("full")
    first = twin(engine, "a", lambda: Engine("full"))
    twin(engine, "b", lambda: Engine("full"))
    assert twin(engine, "a", pytest.fail) is first
    twin(engine, "c", lambda: Engine("full"), newest_only=True)
    assert twin(engine, "a", lambda: Engine("full")) is not first

"""Rates in a window, and the most frequent keys of very many."""

import collections
import random

import pytest

from ksana_jax.serve.router.sketch import FrequentKeys, SpaceSaving, WindowedRate


def test_a_rate_is_that_of_the_window():
    rate = WindowedRate(60, now=0.0)
    for second in range(100):
        rate.add(2, float(second))
    assert rate.rate(100.0) == pytest.approx(2.0, rel=0.05)
    assert rate.rate(200.0) == 0


def test_a_burst_at_the_start_is_not_a_rate_without_bound():
    rate = WindowedRate(60, now=0.0)
    rate.add(10, 0.0)
    assert rate.rate(0.0) == 2.0 and rate.rate(20.0) == 0.5


def test_frequent_keys_are_kept_and_counts_are_upper_bounds():
    dice, sketch, exact = random.Random(0), SpaceSaving(50), collections.Counter()
    for n in range(20_000):
        key = f"often {dice.randrange(10)}" if dice.random() < 0.5 else n
        sketch.add(key)
        exact[key] += 1
    assert len(sketch) == 50
    for key, count in exact.most_common(10):
        assert count <= sketch.count(key) <= count + 20_000 / 50


def test_frequent_keys_are_forgotten_with_the_window():
    keys = FrequentKeys(10, window_s=60)
    for second in range(30):
        keys.turn(float(second))
        count = keys.add("a")
    assert count == 30 and keys.span_s(29.0) == 30
    keys.turn(31.0)
    assert keys.add("a") == 31 and keys.span_s(31.0) == 31
    keys.turn(65.0)
    assert keys.add("a") == 2
    keys.turn(500.0)
    assert keys.add("a") == 1

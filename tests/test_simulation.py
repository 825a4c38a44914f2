"""Whatever befalls an engine, in any order: the books balance after every step, every text is the one that its prompt
gives alone, and whatever can be served is. See `tests.simulation`."""

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lives import live_a_life

# Lives that ended badly once.
SEEDS = (1700, 11290, 12815)


@settings(max_examples=int(os.environ.get("KSANA_EXAMPLES", 200)), suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_every_life_ends_well(rng):
    live_a_life(rng, num_steps=50)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_went_wrong_once_goes_well(seed):
    live_a_life(random.Random(seed))


def test_lives_meet_everything_that_the_memory_does():
    seen = sum((live_a_life(random.Random(seed)).seen for seed in range(60)), start=live_a_life(random.Random(60)).seen)
    never = [name for name, count in seen.items() if not count]
    assert not never, f"{never} did not happen in 61 lives"
    expected = {"beam searches", "turns", "aborts", "restarts", "failed steps", "changes of pattern", "preemptions"}
    assert expected <= seen.keys()

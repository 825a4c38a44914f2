"""Time that may be lost."""

import pytest

from ksana_jax.speculative.allowance import MOST_GAINED, MOST_SAVED, Allowance


def test_a_share_of_the_time_is_saved_up_to_some_steps():
    allowance = Allowance(0.01, first=2)
    assert allowance.is_spent and allowance.left_s is None
    allowance.lose(5.0)  # as long as nothing is known, nothing is booked
    allowance.pass_time(10.0, plain_s=1.0)
    assert allowance.left_s == pytest.approx(2.1)
    allowance.pass_time(1e6, plain_s=1.0)
    assert allowance.left_s == MOST_SAVED
    allowance.lose(MOST_SAVED + 1.0)
    assert allowance.is_spent and allowance.left_s == -1.0


def test_gains_may_be_lost_again_and_do_not_vanish_when_steps_become_faster():
    allowance = Allowance(0.01, first=0)
    allowance.gain(1e6, plain_s=1.0)
    assert allowance.left_s == MOST_GAINED
    allowance.pass_time(1.0, plain_s=0.5)
    assert allowance.left_s == MOST_GAINED
    allowance.gain(-3.0, plain_s=0.5)
    assert allowance.left_s == MOST_GAINED - 3

"""What tokens are worth while a batch ends, against a count of its steps."""

import numpy as np
import pytest

from ksana_jax.speculative.drain import Drain

SIZES, SECONDS = (1, 2, 4, 8, 16), (4.0, 5.0, 5.5, 7.0, 9.0)


def counted(left, sizes, seconds):
    """Decodes a token of each row a step, until none has any left."""
    left, total = list(left), 0.0
    while left := [n for n in left if n > 0]:
        total += next(s for size, s in zip(sizes, seconds, strict=True) if size >= len(left))
        left = [n - 1 for n in left]
    return total


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 16])
def test_a_batch_ends_after_all_its_steps(num_rows):
    rng, at = np.random.default_rng(num_rows), next(i for i, size in enumerate(SIZES) if size >= num_rows)
    drain = Drain.of(SIZES[: at + 1], SECONDS[: at + 1], num_rows)
    for _ in range(20):
        left, tokens = rng.integers(10, 50, num_rows), rng.integers(1, 8, num_rows)
        assert drain.ends_after(left) == pytest.approx(counted(left, SIZES, SECONDS))
        saved = counted(left, SIZES, SECONDS) - counted(left - tokens, SIZES, SECONDS)
        assert drain.saved_s(left, tokens) == pytest.approx(saved)
    several = rng.random((3, num_rows))
    assert drain.saved_s(left, several).shape == (3,)


def test_a_plain_step_saves_what_it_takes_and_tokens_of_half_the_rows_save_little():
    drain, left = Drain.of(SIZES, SECONDS, 16), np.full(16, 50)
    assert drain.saved_s(left, np.ones(16)) == pytest.approx(9.0)
    half = drain.saved_s(left, np.repeat([7, 1], 8))
    assert half == pytest.approx(9.0 + 6 * (9.0 - 7.0))  # not 9.0 * 4, the mean


def test_a_larger_step_that_seems_to_take_less_time_takes_as_long():
    drain = Drain.of((1, 2, 4), (5.0, 4.0, 6.0), 4)
    assert drain.seconds.tolist() == [5.0, 0.0, 1.0]
    assert Drain.of((1, 2), (5.0, 4.0), 2).seconds.tolist() == [4.0, 0.0], "the last one is what is compared with"

"""When a block is dead, and how many can be alive: against the literal definition of who sees whom."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.patterns import FAR, FULL, AttentionPattern
from ksana_jax.kv.visible_range import VisibleRange
from tests.patterns import PATTERNS
from tests.reference import literal

LENGTH = 48
HORIZON = 30  # no window below reaches farther

windowed = st.builds(
    AttentionPattern,
    window=st.integers(1, 20),
    num_sinks=st.integers(0, 9),
    stride=st.integers(1, 6),
    global_every=st.none() | st.integers(1, 25),
)
patterns = st.lists(windowed, min_size=1, max_size=3)


def seen_later(layers, next_position: int) -> np.ndarray:
    """Whether some layer's query at next_position or later sees each position [LENGTH]."""
    i = np.arange(next_position, next_position + LENGTH + HORIZON)[:, None]
    j = np.arange(LENGTH)[None]
    return np.any([literal(p, i, j)[0] for p in layers], axis=(0, 1))


@given(layers=patterns, block_size=st.sampled_from([1, 2, 3, 4, 8]), next_position=st.integers(1, LENGTH))
def test_a_block_is_dead_exactly_when_no_later_query_of_any_layer_sees_it(layers, block_size, next_position):
    live = VisibleRange.of(layers)
    starts = np.arange(0, LENGTH - block_size + 1, block_size)
    seen = seen_later(layers, next_position)
    expected = [not seen[s : s + block_size].any() for s in starts]
    assert live.dead_blocks(starts, block_size, next_position).tolist() == expected


@given(
    layers=patterns | st.just([FULL]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    num_tokens=st.integers(1, LENGTH),
)
def test_live_blocks_are_counted_as_they_are_found(layers, block_size, num_tokens):
    live, starts = VisibleRange.of(layers), np.arange(0, num_tokens, block_size)
    found = np.count_nonzero(~live.dead_blocks(starts, block_size, num_tokens))
    assert live.num_live_blocks(block_size, num_tokens) == found


def test_the_live_blocks_of_a_text_of_any_length_are_counted_at_once():
    assert VisibleRange.of([FULL]).num_live_blocks(1, 2**30) == 2**30
    assert VisibleRange.of([AttentionPattern(window=9, num_sinks=4)]).num_live_blocks(1, 2**30) == 12


@given(
    layers=patterns,
    block_size=st.sampled_from([1, 2, 4, 8]),
    chunk=st.integers(1, 12),
    max_tokens=st.integers(1, LENGTH),
)
def test_blocks_held_never_exceed_the_bound(layers, block_size, chunk, max_tokens):
    live = VisibleRange.of(layers)
    bound = live.max_live_blocks(block_size, max_tokens, chunk)
    starts = np.arange(0, max_tokens, block_size)
    for position in range(max_tokens):
        end = min(position + chunk, max_tokens)
        held = ~live.dead_blocks(starts, block_size, position) & (starts < end)
        assert held.sum() <= bound


@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_keeps_what_is_seen_within_its_bound_and_is_full_as_long_as_it_says(name, block_size):
    pattern = PATTERNS[name]
    live, starts = VisibleRange.of([pattern]), np.arange(0, LENGTH, block_size)
    for position in range(1, LENGTH):
        dead = live.dead_blocks(starts, block_size, position)
        seen = seen_later([pattern], position).reshape(-1, block_size).any(axis=1)
        assert not (dead & seen).any()
        assert (~dead & (starts <= position)).sum() <= live.max_live_blocks(block_size, LENGTH)
    i, j = np.ogrid[: min(pattern.full_until, LENGTH), :LENGTH]
    for ours, full in zip(literal(pattern, i, j), literal(FULL, i, j), strict=True):
        np.testing.assert_array_equal(np.where(j <= i, ours, 0), np.where(j <= i, full, 0))


@pytest.mark.parametrize("window", range(1, 18))
@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_the_bound_of_a_plain_window_is_reached(window, block_size):
    live = VisibleRange.of([AttentionPattern(window=window)])
    starts = np.arange(0, 64, block_size)
    held = [(~live.dead_blocks(starts, block_size, p) & (starts <= p)).sum() for p in range(64)]
    assert max(held) == live.max_live_blocks(block_size, 64)


def test_everything_lives_when_one_layer_sees_everything():
    live = VisibleRange.of([AttentionPattern(window=2), FULL])
    assert live.window is None
    assert not live.dead_blocks(np.arange(0, 40, 4), 4, 1000).any()
    assert live.max_live_blocks(4, 41) == 11


def test_a_dilated_window_ends_at_the_farthest_position_that_its_stride_meets():
    # Window 8, stride 3 sees distances 0, 3 and 6; the window's last position, at distance 7, is never seen again.
    assert VisibleRange.of([AttentionPattern(window=8, stride=3)]).window == 7


def test_below_full_until_a_pattern_is_full_attention():
    """Exactly there where the pattern is dense; nowhere beyond the point where it first differs."""
    positions = np.arange(24)
    q, k = positions[:, None], positions[None]
    everything, own = literal(FULL, q, k)
    tried = 0
    for window, sinks, stride, every, where, ceiling in itertools.product(
        [None, 1, 2, 4, 7], [0, 1, 2, 5], [1, 2], [None, 1, 3], ["absolute", "cache", "ceiling"], [None, 1, 3, 6, 9]
    ):
        if (where != "absolute" and window is None) or (ceiling and where != "ceiling"):
            continue
        pattern = AttentionPattern(window, sinks, stride, every, where, ceiling)
        seen, stands = literal(pattern, q, k)
        differs = np.flatnonzero(((seen != everything) | (seen & (stands != own))).any(axis=1))
        first = int(differs[0]) if len(differs) else FAR
        assert pattern.full_until <= first, str(pattern)
        if stride == 1 and every is None:
            assert pattern.full_until == first, str(pattern)
        tried += 1
    assert tried > 500

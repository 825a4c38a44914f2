"""Heads that rotate a part, or rotate neighbours, against rotations in the order of a checkpoint."""

import dataclasses

import numpy as np
import pytest

from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.frequencies import make_rope, row_order


def rotated(x: np.ndarray, positions: np.ndarray, dims: int, neighbours: bool, scale: float, freq) -> np.ndarray:
    """x [T, H] with its first dims numbers rotated in pairs; the rest unchanged."""
    out = x.copy()
    for pair in range(dims // 2):
        a, b = (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + dims // 2)
        turn = positions * freq[pair]
        out[:, a] = scale * (x[:, a] * np.cos(turn) - x[:, b] * np.sin(turn))
        out[:, b] = scale * (x[:, b] * np.cos(turn) + x[:, a] * np.sin(turn))
    return out


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("part", [0.25, 0.75, 1.0])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rows_in_another_order_are_rotated_as_in_the_checkpoint(kind, part, neighbours):
    whole = RopeConfig(kind, 100.0, 4.0, 32, attention_factor=1.3)
    config = dataclasses.replace(whole, partial_rotary_factor=part)
    dims, order, rope = int(16 * part), row_order(config, 16, neighbours), make_rope(config, 16)
    x, positions = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32), np.array([0, 1, 7, 20, 99])
    scale, freq = 1.3 if kind == "yarn" else 1.0, make_rope(whole, dims).inv_freq
    wanted = rotated(x, positions, dims, neighbours, scale, freq)
    found = rope.rotate(x[:, None, order], rope.angles(positions))[:, 0]
    np.testing.assert_allclose(found, wanted[:, order], atol=2e-5)


def test_longrope_divides_by_the_factors_of_the_longest_text():
    config = RopeConfig("longrope", 1e4, 4.0, 32, factors=(1.0, 2.0), short_factors=(1.0, 1.5))
    for max_len, second in ((None, 1.5), (32, 1.5), (33, 2.0)):
        rope = make_rope(config, 4, max_len)
        np.testing.assert_allclose(rope.inv_freq, [1.0, 0.01 / second], rtol=1e-6)
        assert rope.scale == pytest.approx((1 + np.log(4) / np.log(32)) ** 0.5)
    assert make_rope(dataclasses.replace(config, factor=1.0), 4).scale == 1
    assert make_rope(dataclasses.replace(config, attention_factor=1.2), 4).scale == 1.2


def test_whole_heads_whose_halves_are_rotated_stay_in_order():
    assert row_order(RopeConfig(), 8, neighbours=False).tolist() == list(range(8))
    assert row_order(RopeConfig(), 8, neighbours=True).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert row_order(RopeConfig(partial_rotary_factor=0.5), 8, neighbours=False).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]

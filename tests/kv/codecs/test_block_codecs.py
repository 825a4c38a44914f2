"""Block codecs against their definitions in float64, without an engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.codecs.base import BlockCodec
from ksana_jax.kv.codecs.registry import BLOCK_CODECS, find_block_codec, find_sealing
from ksana_jax.kv.codecs.sealing import Sealing
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.kv.visible_range import VisibleRange
from ksana_jax.methods.codecs.gear import Gear
from tests.kv.codecs.block_definitions import DEFINITIONS
from tests.soak import soak_unless

RNG = np.random.default_rng(0)
MODEL = ModelConfig(num_layers=4, num_heads=16, num_kv_heads=8, head_dim=64)
B, H = 64, 64
NORMAL = RNG.standard_normal((6, B, H))
BLOCKS = {
    "normal": NORMAL,
    # As keys are: some channels are large in all tokens.
    "large channels": NORMAL * np.where(np.arange(H) % 16 == 3, 40.0, 1.0) + np.where(np.arange(H) % 16 == 5, 25.0, 0),
    "outliers": np.where(RNG.random(NORMAL.shape) < 0.01, 30.0, 1.0) * NORMAL,
    "zeros": np.zeros((1, B, H)),
}


def read(name: str, side: str, x: np.ndarray, xp=np) -> np.ndarray:
    """Blocks [..., B, H] as they are read after being encoded."""
    codec = find_block_codec(name)(side=side)
    stored = codec.encode(xp.asarray(x, xp.float32), xp)
    expected = codec.arrays(*x.shape[-2:])
    assert {part: (a.shape[x.ndim - 2 :], a.dtype.name) for part, a in stored.items()} == expected
    return np.asarray(codec.decode(stored, xp), np.float64)


def test_every_block_codec_has_a_definition():
    assert set(DEFINITIONS) == set(BLOCK_CODECS)


@pytest.mark.parametrize("name", soak_unless(lambda name: "3" not in name or name == "kivi3", BLOCK_CODECS))
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("side", ["k", "v"])
def test_what_is_read_of_a_block_is_the_definition_but_for_ties(name, kind, side):
    x = BLOCKS[kind].astype(np.float32).astype(np.float64)
    expected = np.stack([DEFINITIONS[name](block, side) for block in x])
    got = read(name, side, x)
    # A number in the middle between two codes, of which float32 makes the other one, is rare; it also changes the
    # factors of its block's error, in all numbers a little.
    low_rank = "gear" in name
    differs = np.abs(got - expected) > (1e-2 if low_rank else 1e-5) * np.abs(x).max(initial=1.0)
    assert differs.mean() < 1e-3
    if low_rank:
        of_blocks = np.abs(got - expected).max(axis=(1, 2)) < 2e-4 * np.abs(x).max(initial=1.0)
        assert of_blocks.mean() >= 0.5


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("kind", ["normal", "large channels", "outliers"])
@pytest.mark.parametrize("side", ["k", "v"])
def test_kivi_is_wrong_by_half_a_step_of_its_group_at_most(bits, kind, side):
    x = BLOCKS[kind].astype(np.float32).astype(np.float64)
    axis = -2 if side == "k" else -1
    spread, top = np.ptp(x, axis=axis, keepdims=True), np.abs(x).max(axis=axis, keepdims=True)
    error = np.abs(read(f"kivi{bits}", side, x) - x)
    assert (error <= spread / (2**bits - 1) / 2 + (spread + top) * 2.0**-10).all()
    if kind == "large channels" and side == "k":  # other channels do not suffer from a large one
        other = np.arange(H) % 16 == 0
        as_values = np.abs(read(f"kivi{bits}", "v", x) - x)
        assert error[..., other].mean() < as_values[..., other].mean() / 4


@pytest.mark.parametrize("side", ["k", "v"])
def test_factors_come_close_to_the_best_of_their_rank_and_outliers_are_exact(side):
    x = BLOCKS["outliers"].astype(np.float32).astype(np.float64)

    def error(**settings):
        codec = Gear(side=side, bits=2, **settings)
        return x - codec.decode(codec.encode(np.float32(x), np), np)

    plain, low_rank = error(outliers=0.0, rank=0), error(outliers=0.0, rank=4)
    np.testing.assert_array_equal(x - plain, read("kivi2", side, x))
    values = np.linalg.svd(plain, compute_uv=False)
    best = np.sqrt((values[:, 4:] ** 2).sum(axis=1))
    assert (np.linalg.norm(low_rank, axis=(1, 2)) < 1.06 * best).all()
    sparse = error(outliers=0.02, rank=0)
    rows = np.swapaxes(x, 1, 2) if side == "k" else x
    rows, found = rows.reshape(-1, 64), (np.swapaxes(sparse, 1, 2) if side == "k" else sparse).reshape(-1, 64)
    for at in (rows.argmax(axis=1), rows.argmin(axis=1)):
        value = np.take_along_axis(rows, at[:, None], 1)
        assert (np.abs(np.take_along_axis(found, at[:, None], 1)) <= 2.0**-11 * np.abs(value)).all()
    # The ranges of the other numbers no longer have to hold outliers 30 times as large.
    assert np.mean(sparse**2) < np.mean(plain**2) / 4


def test_bytes_count_outliers_and_factors():
    def side_bytes(**settings):
        return [
            find_sealing({"k": name, "v": name} | settings).head_bytes(64, 64) // 2 - 64 * 64 // 2 - 64 * 4
            for name in ("kivi4", "gear_l4", "kvquant4", "gear4")
        ]

    factors = 2 * (64 + 64) * 2  # rank 2, float16
    sparse = 64 * 2 * (1 + 2)  # two numbers of each vector with an index
    assert side_bytes() == [0, factors, sparse, factors + sparse]
    codec = Gear(side="k", bits=2, outliers=0.05, rank=1)
    assert codec.arrays(512, 64)["index"] == ((64, 2 * 13), "uint16")  # a fortieth of 512 tokens on either side


@pytest.mark.parametrize("name", soak_unless(lambda name: name in ("kivi3", "gear4"), BLOCK_CODECS))
@pytest.mark.parametrize("side", ["k", "v"])
def test_the_compiled_formulas_are_those_of_numpy(name, side):
    x = BLOCKS["outliers"].astype(np.float32)
    got = jax.jit(
        lambda x: find_block_codec(name)(side=side).decode(find_block_codec(name)(side=side).encode(x, jnp), jnp)
    )(x)
    # Factors in float16 may be rounded the other way.
    tolerance = 1e-3 if "gear" in name else 1e-5
    np.testing.assert_allclose(np.asarray(got, np.float64), read(name, side, x), atol=tolerance * np.abs(x).max())


@pytest.mark.parametrize("name", soak_unless(lambda name: name in ("kivi3", "gear4"), BLOCK_CODECS))
def test_keys_and_values_survive_as_bytes(name):
    sealing = find_sealing(name)
    assert sealing is not None
    k, v = BLOCKS["normal"].astype(np.float32), BLOCKS["outliers"].astype(np.float32)
    for xp in (np, jnp):
        stored = sealing.encoded(xp.asarray(k), xp.asarray(v), xp)
        assert stored.shape == (6, sealing.head_bytes(B, H)) and stored.dtype == np.uint8
        for x, side, got in zip((k, v), ("k", "v"), sealing.decoded(stored, B, H, xp), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float64), read(name, side, x, xp))


def test_blocks_take_the_bytes_of_codes_scales_and_zeros():
    # 64 tokens x 64 channels of 4 bits; for each of 64 channels, or tokens, a scale and a zero in 16 bits.
    side = 64 * 64 // 2 + 64 * 2 * 2
    assert find_sealing("kivi4").head_bytes(64, 64) == 2 * side
    assert find_sealing({"k": "kivi2", "v": "kivi4", "group": 32}).head_bytes(64, 64) == 1024 + 2048 + 4 * 64 * 2 * 2
    layout = layout_of(MODEL, dtype="kivi4", block_size=64, exact_dtype="bf16")
    plain = layout_of(MODEL, dtype="bf16", block_size=64)
    # What codes leave of a block is no room for exact tokens of a further layer.
    per_head = find_sealing("kivi4").head_bytes(64, MODEL.head_dim)
    assert layout.block_bytes == MODEL.num_kv_heads * MODEL.num_layers * per_head
    assert plain.token_bytes / layout.token_bytes > 3.4
    sides = [side for group in layout.groups for side in zip(group.layers, group.residual)]
    assert sorted(sides) == [(layer, side) for layer in range(MODEL.num_layers) for side in ("k", "v")]
    for group in layout.groups[1:]:
        assert len(group.layers) * 2 * 64 * MODEL.head_dim * MODEL.num_kv_heads <= layout.block_bytes


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("residual", [0, 1, 3, 16, 100])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_exact_blocks_are_kept_as_long_as_a_query_reads_them(size, residual, window):
    sealing, pattern = find_sealing({"k": "kivi2", "v": "kivi2", "residual": residual}), AttentionPattern(window=window)
    live = sealing.residual_live(VisibleRange.of([pattern]))
    starts = np.arange(0, 128, size)
    for position in range(100):
        first = int(sealing.exact_from(np.int32(position), size, np))
        assert first % size == 0 and min(residual, position + 1) <= position + 1 - first < residual + size
        # In sliding layers less is visible. The open block is encoded when it is full, also if nobody reads it exactly.
        first = min(max(first, position + 1 - (window or 128)), position)
        kept = starts[~live.dead_blocks(starts, size, position)]
        assert kept.tolist() == starts[starts + size > first].tolist()


def test_first_tokens_stay_exact_as_long_as_a_window_sees_them():
    sealing = find_sealing({"k": "kvquant4", "v": "kvquant4", "first": 5})
    live = sealing.residual_live(VisibleRange.of([AttentionPattern(window=7)]))
    starts = np.arange(0, 64, 4)
    for position in range(12):  # the query at 11 is the last one to see a token before 5
        assert set(starts[: 2 if position >= 5 else 1]) <= set(starts[~live.dead_blocks(starts, 4, position)])


@pytest.mark.parametrize("name", ["gear4", "kvquant2"])
@pytest.mark.parametrize("size", [1, 2])
def test_vectors_too_short_for_outliers_have_none(name, size):
    sealing, x = find_sealing(name), np.linspace(-1, 1, size * 8, dtype=np.float32).reshape(1, size, 8)
    assert sealing is not None
    stored = sealing.encoded(x, x, np)
    assert stored.shape == (1, sealing.head_bytes(size, 8))
    np.testing.assert_allclose(np.stack(sealing.decoded(stored, size, 8, np)), [x, x], atol=0.35)


def test_another_pattern_changes_what_is_kept_exactly():
    layout = layout_of(
        MODEL, dtype={"k": "kivi2", "v": "kivi2", "residual": 9}, block_size=4, as_bits=tuning("cpu").stored_as_bits
    )
    windows = [group.live.window for group in layout.groups]
    assert windows == [None] + [9] * (len(windows) - 1)
    narrow = layout.with_patterns([AttentionPattern(window=5)] * MODEL.num_layers)
    assert [group.live.window for group in narrow.groups] == [5] * len(windows)
    assert narrow.with_patterns([AttentionPattern()] * MODEL.num_layers) == layout


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"k": "kivi2"}, 'must have "k" and "v"'),
        ({"k": "kivi5", "v": "kivi2"}, "kv_cache_dtype is 'kivi5', must be one of kivi4, kivi3, kivi2"),
        ({"k": "kivi2", "v": "int5"}, "kv_cache_dtype is 'int5', must be one of kivi4.* int8"),
        ({"k": "kivi2", "v": "kivi2", "residul": 3}, "kv_cache_dtype has no setting 'residul': .* it has bits, "),
        ({"k": "kivi2", "v": "kivi2", "residual": -1}, "kv_cache_dtype residual is -1, must be an integer from 0"),
        ({"k": "kivi2", "v": "kivi2", "group": 0}, "kv_cache_dtype group is 0, must be an integer from 1"),
        ({"k": "kivi2", "v": "kivi2", "residual_dtype": "int8"}, "kv_cache_dtype residual_dtype is 'int8', must be"),
        ({"k": "builtins:dict", "v": "kivi2"}, "kv_cache_dtype 'k' is 'builtins:dict', which makes no BlockCodec"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        find_sealing(setting)


@dataclasses.dataclass(frozen=True)
class Mean(BlockCodec):
    """A custom codec: all tokens become the mean of their block."""

    power: int = 1

    def arrays(self, block_size, head_dim):
        return {"mean": ((head_dim,), "float32")}

    def encode(self, x, xp):
        return {"mean": x.mean(axis=-2) ** self.power}

    def decode(self, stored, xp):
        return xp.broadcast_to(stored["mean"][..., None, :], (*stored["mean"].shape[:-1], B, H))


def test_a_block_codec_of_ones_own_is_named_by_its_module():
    sealing = find_sealing({"k": "tests.kv.codecs.test_block_codecs:Mean", "v": "kivi4", "power": 2, "group": 32})
    assert sealing is not None and sealing.residual == 128
    assert sealing.head_bytes(B, H) == 4 * H + B * H // 2 + B * 2 * 4
    x = NORMAL.astype(np.float32)
    k, _ = sealing.decoded(sealing.encoded(x, x, np), B, H, np)
    np.testing.assert_array_equal(k, np.broadcast_to(x.mean(axis=1, keepdims=True) ** 2, x.shape))


def test_settings_reach_the_codecs_that_have_them():
    sealing = find_sealing({"k": "kivi2", "v": "kivi4", "residual": 8, "group": 32, "first": 2})
    assert isinstance(sealing, Sealing)
    assert (sealing.k.side, sealing.k.bits, sealing.v.side, sealing.v.bits) == ("k", 2, "v", 4)
    assert (sealing.k.group, sealing.v.group, sealing.residual, sealing.first) == (32, 32, 8, 2)
    assert find_sealing("kivi3").residual == 128 and find_sealing("int4") is None

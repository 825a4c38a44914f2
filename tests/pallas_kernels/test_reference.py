"""The reference against loops in float64 that know nothing of it; and that the specs are as unkind as they say."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.arguments import BENCH, FULL, SINKS_IN_CACHE, SMALL, TINY, Spec, layout, make
from pallas_kernels.contract import Call
from pallas_kernels.patterns import FAR
from tests.soak import soak_unless


def factors(call: Call) -> jax.Array:
    """Factors of the queries' weights in the mass, of which a third is 0."""
    numbers = np.random.default_rng(0).integers(0, 3, call.positions.shape)
    return jnp.asarray(numbers, jnp.float32)


def loops(call: Call):
    """Result, log-sum-exp and mass per slot: one query, one head and one slot at a time, the rules written out."""
    q, pool = np.asarray(call.q, np.float64), np.asarray(call.pool.kv, np.float64)
    tables, starts, positions = (np.asarray(x) for x in (call.tables, call.starts, call.positions))
    layer, pattern, q_sink, soft_cap = call.layer, call.pattern, call.options.q_sink, call.options.soft_cap
    num_heads, num_kv_heads, size = q.shape[2], pool.shape[3], pool.shape[4]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    mass = np.zeros((len(q), num_kv_heads, tables.shape[1] * size))
    for tile, token, head in np.ndindex(*q.shape[:3]):
        i, kv_head = int(positions[tile, token]), head * num_kv_heads // num_heads
        scores, values, slots = [], [], []
        for slot in range(tables.shape[1] * size):
            entry, offset = divmod(slot, size)
            j = int(starts[tile, entry]) + offset
            if starts[tile, entry] == FAR or j > i:
                continue
            near = i - j < pattern.window and (i - j) % pattern.stride == 0
            if not (near or j < pattern.num_sinks or (pattern.has_global and j % pattern.global_every == 0)):
                continue
            query = q[tile, token, head]
            far_sink = i - j >= pattern.window and i - j > pattern.sink_ceiling
            if j < pattern.num_sinks and (pattern.sink_position == 1 or (pattern.sink_position == 2 and far_sink)):
                query = np.asarray(q_sink, np.float64)[tile, token, min(j, q_sink.shape[2] - 1), head]
            block = pool[tables[tile, entry], layer]
            score = float(query @ block[0, kv_head, offset])
            scores.append(score if soft_cap is None else soft_cap * math.tanh(score / soft_cap))
            values.append(block[1, kv_head, offset])
            slots.append(slot)
        if scores:
            sink = [] if call.options.sinks is None else [float(call.options.sinks[head])]
            lse[tile, token, head] = np.logaddexp.reduce(scores + sink)
            weights = np.exp(np.array(scores) - lse[tile, token, head])
            out[tile, token, head] = weights @ np.array(values)
            mass[tile, kv_head, slots] += weights * float(call.options.mass_factor[tile, token])
    return out, lse, mass


# Of SMALL those that share a compilation.
@pytest.mark.parametrize(
    "spec",
    soak_unless(lambda spec: spec in TINY[::2], [*TINY, *(s for s in SMALL if s.head_dim == 64 and s.sink_logits)]),
    ids=str,
)
def test_reference_gives_what_loops_in_float64_give(spec):
    call = make(spec).replace(return_lse=True, return_mass=True, out_dtype=jnp.dtype("float32"))
    call = call.replace(mass_factor=factors(call))
    # Sums of up to 257 float32 terms of size 4.
    for actual, expected in zip(jax.jit(reference.attend)(call), loops(call), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_result_has_the_dtype_of_the_queries_unless_another_is_asked_for():
    for out_dtype in (None, jnp.float16):
        call = make(TINY[0]).replace(out_dtype=out_dtype)
        assert jax.eval_shape(reference.attend, call).out.dtype == (out_dtype or jnp.bfloat16)


def test_halves_of_a_text_merged_by_their_log_sum_exp_are_the_whole():
    call = make(TINY[0]).replace(out_dtype=jnp.float32)
    starts, attend = call.starts, jax.jit(reference.attend)
    whole, whole_lse, _ = attend(call)
    a, lse_a, _ = attend(call.replace(starts=jnp.where(starts < 64, starts, FAR)))
    b, lse_b, _ = attend(call.replace(starts=jnp.where(starts < 64, FAR, starts), sinks=None))
    lse = jnp.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (jnp.where(jnp.isinf(lse), 0.0, jnp.exp(x - lse)) for x in (lse_a, lse_b))
    # Text of 16 tokens has nothing in its second half.
    assert jnp.isinf(lse_b[2]).all() and not jnp.isinf(lse_a[2]).any()
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=1e-5)
    np.testing.assert_allclose(a * weight_a[..., None] + b * weight_b[..., None], whole, rtol=0, atol=1e-5)


def test_specs_hold_what_goes_wrong_in_kernels():
    for spec in (*TINY, *SMALL):
        tables, starts, positions, readable = layout(spec)
        assert (np.sort(positions, axis=1)[:, -1] == -1).any() == any(q == 0 for _, q in spec.rows)
        assert np.isin(1, [length for length, _ in spec.rows]) or min(length for length, _ in spec.rows) == 0
        absent = starts == FAR
        assert absent.any(axis=1).all()
        assert not readable[tables[absent]].any(), "blocks beyond the live part hold NaN"
        assert not readable.all(axis=1)[tables[~absent]].all(), "some row's last block is not full"
    patterns = {spec.pattern for spec in SMALL}
    assert len(patterns) >= 7 and {p.sink_position for p in patterns} == {0, 1, 2}
    for name, values in dict(head_dim=(64, 96, 128, 256), block_size=(16, 32, 64, 128)).items():
        for decode in (True, False):
            assert {getattr(s, name) for s in SMALL if (s.q_tile == 1) == decode} == set(values)
    assert {s.num_heads // s.num_kv_heads for s in SMALL} >= {1, 2, 3, 4, 8}


def test_dead_slots_hold_nan_and_only_those():
    spec = Spec(rows=((40, 1), (0, 0), (16, 1)), pattern=SINKS_IN_CACHE._replace(window=4), sink_queries=1)
    call = make(spec)
    pool, tables = np.asarray(call.pool.kv, np.float32), np.asarray(call.tables)
    nan = np.isnan(pool)
    assert (nan == nan[:, :1, :1, :1, :, :1]).all(), "the same slots in all layers, for keys, values and heads"
    nan = nan[:, 0, 0, 0, :, 0]
    # 40 tokens: sinks in block 0, block 1 out of sight, window in the 8 tokens of block 2.
    assert [list(nan[b]).count(True) for b in tables[0, :3]] == [0, 16, 8]
    assert not nan[tables[2, 0]].any()
    assert nan.all(axis=1).sum() == 3 + 1


def test_seeds_give_other_data_and_the_same_seed_the_same():
    spec = TINY[0]
    q = make(spec).q
    assert (make(spec).q == q).all()
    assert (make(dataclasses.replace(spec, seed=spec.seed + 1)).q != q).any()


def test_names_of_specs_tell_them_apart():
    specs = (*TINY, *SMALL)
    assert len({str(dataclasses.replace(spec, seed=0)) for spec in specs}) == len(specs)
    assert str(TINY[0]) == "q1_n4_k2_h64_b16_bfloat16_sink_logits_return_lse_rows=130/1,0/0,16/1"


def test_benchmark_specs_move_the_bytes_of_their_floors():
    """Keys and values of the live blocks, in MB, as in the table that the floors were computed from."""
    expected_mb = {"decode 1x4k": 16.8, "decode 64x4k": 1074, "decode 256x512": 537, "decode 1x128k+31x4k": 1057}
    for name, mb in expected_mb.items():
        spec = BENCH[name]
        tokens = layout(spec).readable.sum()
        assert tokens * 2 * spec.num_kv_heads * spec.head_dim * 2 / 1e6 == pytest.approx(mb, rel=0.005)
    assert layout(BENCH["prefill 8k"]).positions.shape == (256, 32)
    assert BENCH["decode 8x1k"].pattern == FULL

"""The native kernel of CPUs, compiled here, against the reference of the contract; and machines that cannot compile."""

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.kv.codecs.base import TransformedCodec
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.native.kernel import KERNEL
from ksana_jax.ops import code_levels, native_kernels
from ksana_jax.ops.requirements import Requirements
from pallas_kernels import reference
from pallas_kernels.arguments import FULL, SINKS, SINKS_AT_CEILING, SMALL, TINY, WINDOW, Spec, make
from pallas_kernels.contract import Pool
from tests.machine import compiled
from tests.pallas_kernels.contract import check
from tests.soak import soak_unless

# Sums of a few hundred float32 terms, in another order.
TOLERANCE = 2e-5


@compiled
@pytest.mark.parametrize("spec", soak_unless(TINY.__contains__, [*TINY, *SMALL]), ids=str)
def test_the_kernel_gives_what_the_reference_gives(spec):
    check(KERNEL, spec)


def in_float32(spec: Spec):
    """A call in float32 that asks for everything; a third of its queries do not count in the mass."""
    call = make(spec)
    factors = np.arange(call.positions.size).reshape(call.positions.shape) % 3
    asked = dict(return_lse=True, return_mass=True, mass_factor=jnp.asarray(factors, jnp.float32))
    q_sink = call.options.q_sink
    asked["q_sink"] = None if q_sink is None else q_sink.astype(jnp.float32)
    return call.replace(q=call.q.astype(jnp.float32), pool=Pool(call.pool.kv.astype(jnp.float32)), **asked)


def expect_the_same(call, expected_call):
    actual = jax.jit(KERNEL.run, static_argnames="tuning")(call, None, tuning=KERNEL.tuning)
    expected = jax.jit(reference.attend)(expected_call)
    for found, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


ODD = [
    Spec(rows=((37, 1), (0, 0), (3, 1)), num_heads=6, num_kv_heads=2, head_dim=8, block_size=1, sink_logits=True),
    Spec(rows=((75, 9), (1, 1)), q_tile=4, num_heads=3, num_kv_heads=3, head_dim=40, block_size=5, pattern=WINDOW),
    # More rows of a kv head than a job takes, and sinks that stand at a ceiling.
    Spec(
        rows=((150, 37),),
        q_tile=37,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_size=24,
        sink_queries=6,
        soft_cap=9.0,
        pattern=SINKS_AT_CEILING,
        sink_logits=True,
    ),
]


@compiled
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("spec", ODD, ids=str)
def test_mass_and_result_in_float32_for_sizes_that_no_vector_has(spec):
    call = in_float32(spec)
    expect_the_same(call, call)


@compiled
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("spec", ODD, ids=str)
def test_kv_heads_read_blocks_of_their_own(spec):
    call, rng = in_float32(spec), np.random.default_rng(3)
    tables, starts = np.asarray(call.tables), np.asarray(call.starts)
    (rows, width), heads = tables.shape, spec.num_kv_heads
    chosen = np.sort(rng.permuted(np.tile(np.arange(width), (rows, heads, 1)), axis=-1)[..., : width // 2 + 1], axis=-1)
    of_rows = np.arange(rows)[:, None, None]
    call = call.replace(tables=jnp.asarray(tables[of_rows, chosen]), starts=jnp.asarray(starts[of_rows, chosen]))
    assert call.by_head
    expect_the_same(call, call)


LATENTS = [
    # A decode of DeepSeek's heads, more than a job takes; and of few heads of an odd size, in tiles under a window.
    Spec(rows=((150, 1), (70, 1)), num_heads=80, num_kv_heads=1, head_dim=576, block_size=16),
    Spec(rows=((75, 9), (1, 1)), q_tile=4, num_heads=5, num_kv_heads=1, head_dim=40, block_size=5, pattern=WINDOW),
    dataclasses.replace(ODD[2], num_kv_heads=1),
]


@compiled
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("spec", LATENTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_keys_and_values_at_once(spec, dtype):
    call = in_float32(spec)
    kv = jnp.repeat(call.pool.kv[:, :, :1].astype(dtype), 2, axis=2)
    expected = call.replace(pool=Pool(kv.astype(jnp.float32)))
    expect_the_same(call.replace(pool=Pool(kv[:, :, :1])), expected)


@compiled
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize(("spec", "head_dim"), list(zip(LATENTS, (576, 136, 258), strict=True)), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_of_latents_are_read_next_to_their_rotated_numbers(spec, head_dim, dtype):
    call = in_float32(dataclasses.replace(spec, head_dim=head_dim))
    call, codec = call.replace(q=call.q.astype(dtype).astype(jnp.float32)), find_codec("latent8")
    leaves = codec.encode(jnp.nan_to_num(call.pool.kv[:, :, :1]), jnp)
    decoded = jnp.repeat(codec.decode(leaves, jnp), 2, axis=2)
    given = Pool(leaves["kv"], leaves["scale"], rotated=leaves["rotated"])
    expect_the_same(call.replace(pool=given), call.replace(pool=Pool(decoded)))
    as_bits = given._replace(rotated=leaves["rotated"].view(jnp.uint16))
    run = jax.jit(KERNEL.run, static_argnames="tuning")
    asked = call.replace(q=call.q.astype(dtype), q_sink=None)
    out, again = (run(asked.replace(pool=pool), None, tuning=None).out for pool in (given, as_bits))
    np.testing.assert_array_equal(out, again)
    with pytest.raises(ValueError, match="must be an even number in 16 bits"):
        run(asked.replace(pool=given._replace(rotated=leaves["rotated"].astype(jnp.float32))), None, tuning=None)


@compiled
@pytest.mark.parametrize("stored", ["uint16", "float16", "int8"])
def test_pools_of_narrower_numbers_are_read_exactly(stored):
    call = in_float32(dataclasses.replace(ODD[0], block_size=16))
    kv = call.pool.kv
    if stored == "uint16":
        rounded = kv.astype(jnp.bfloat16)
        given = Pool(rounded.view(jnp.uint16))
    elif stored == "float16":
        given = Pool(rounded := kv.astype(jnp.float16))
    else:
        scales = jnp.asarray(np.random.default_rng(0).uniform(0.01, 0.03, kv.shape[:-1]), jnp.float32)
        codes = jnp.clip(jnp.round(jnp.nan_to_num(kv) * 30), -127, 127).astype(jnp.int8)
        given, rounded = Pool(codes, scales), codes * scales[..., None]
    expect_the_same(call.replace(pool=given), call.replace(pool=Pool(rounded.astype(jnp.float32))))


WIDE = [dataclasses.replace(spec, head_dim=head_dim) for spec, head_dim in zip(ODD, (128, 40, 80), strict=True)]
# A kind of codec meets a decode, a window, and tiles with sinks, each in other bits.
QUICK = list(zip(code_levels.NAMES, WIDE * 3, strict=True))


@compiled
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize(
    ("name", "spec"), soak_unless(QUICK.__contains__, itertools.product(code_levels.NAMES, WIDE)), ids=str
)
def test_packed_codes_are_read_as_their_codec_decodes_them(name, spec):
    call, codec = in_float32(spec), find_codec(name)
    stored = codec.stored if isinstance(codec, TransformedCodec) else codec
    leaves = stored.encode(jnp.nan_to_num(call.pool.kv), jnp)
    given = Pool(leaves["kv"], leaves["scale"], leaves.get("zero"), code_levels.levels(name))
    expect_the_same(call.replace(pool=given), call.replace(pool=Pool(stored.decode(leaves, jnp))))


@compiled
@pytest.mark.parametrize(
    ("sides", "soft_cap", "dtype"),
    [(2, None, "float32"), (2, 9.0, "float32"), (2, None, "bfloat16"), (1, None, "float32"), (1, 9.0, "bfloat16")]
    + [(1, None, "latent8")],
)
@pytest.mark.parametrize("pattern", [FULL, WINDOW, SINKS, SINKS_AT_CEILING], ids=str)
def test_a_query_is_the_same_bit_by_bit_whatever_tile_it_is_in(pattern, sides, soft_cap, dtype):
    in_codes = dtype == "latent8"
    spec = Spec(rows=((190, 60),), q_tile=60, head_dim=136 if in_codes else 40, pattern=pattern, sink_queries=6)
    call, dtype = in_float32(dataclasses.replace(spec, soft_cap=soft_cap)), "float32" if in_codes else dtype
    q, kv, q_sink = (
        None if x is None else x.astype(dtype) for x in (call.q, call.pool.kv[:, :, :sides], call.options.q_sink)
    )
    leaves = find_codec("latent8").encode(jnp.nan_to_num(kv), jnp) if in_codes else {}
    pool = Pool(leaves["kv"], leaves["scale"], rotated=leaves["rotated"]) if in_codes else Pool(kv)
    call = call.replace(q=q, pool=pool, q_sink=q_sink, return_mass=False, mass_factor=None)
    run = jax.jit(KERNEL.run, static_argnames="tuning")

    def in_tiles(width):
        def tiled(x):
            return None if x is None else x.reshape(-1, width, *x.shape[2:])

        def repeated(x):
            return jnp.repeat(x, 60 // width, axis=0)

        given = {"tables": repeated(call.tables), "starts": repeated(call.starts), "positions": tiled(call.positions)}
        found = run(call.replace(q=tiled(call.q), q_sink=tiled(call.options.q_sink), **given), None, tuning=None)
        return [np.asarray(x).reshape(60, *x.shape[2:]) for x in (found.out, found.lse)]

    alone = in_tiles(1)
    for width in (2, 15, 60):
        for found, expected in zip(in_tiles(width), alone, strict=True):
            np.testing.assert_array_equal(found, expected)


# Rows of several sections of keys: latents, a window with sinks and missing blocks, and blocks of an odd size.
LONG = [
    Spec(rows=((2600, 1),), num_heads=5, num_kv_heads=1, head_dim=40, sides=1),
    Spec(rows=((2600, 2),), q_tile=2, head_dim=32, pattern=SINKS._replace(window=1500), sink_queries=6, evict_every=5),
    Spec(rows=((2100, 1), (3, 1)), num_heads=3, num_kv_heads=1, head_dim=32, block_size=48, sink_logits=True),
]


@compiled
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("spec", LONG, ids=str)
def test_sections_of_a_few_rows_give_the_same_bits_as_rows_of_many(spec, by_head):
    call = in_float32(spec)
    if by_head:
        tables, starts = (jnp.repeat(x[:, None], spec.num_kv_heads, axis=1) for x in (call.tables, call.starts))
        call = call.replace(tables=tables, starts=starts)
    expect_the_same(call, call.replace(pool=Pool(jnp.repeat(call.pool.kv, 2 // spec.sides, axis=2))))

    def repeated(x):  # more rows than two threads divide sections of
        return None if x is None else jnp.tile(x, (8 * os.cpu_count(), *[1] * (x.ndim - 1)))

    names = ("q", "tables", "starts", "positions")
    options = {name: repeated(getattr(call.options, name)) for name in ("q_sink", "mass_factor")}
    many = call.replace(**{name: repeated(getattr(call, name)) for name in names}, **options)
    run = jax.jit(KERNEL.run, static_argnames="tuning")
    for few, found in zip(run(call, None, tuning=None), run(many, None, tuning=None), strict=True):
        np.testing.assert_array_equal(found, repeated(few))


@compiled
def test_what_the_kernel_lacks_is_named():
    needs = Requirements("cpu", None, "uint8", 4, 2, 64, 16, codec="fp8_e5m2", query_dtype="float32")
    assert "stored as fp8_e5m2; the native kernel reads f32, bf16, f16, int8" in str(native_kernels.unsupported(needs))
    wide = needs._replace(dtype="float32", codec="f32", head_dim=2048)
    assert "head dim of 2048; the native kernel has at most 1024" in str(native_kernels.unsupported(wide))

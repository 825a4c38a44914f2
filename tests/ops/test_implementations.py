"""The adapters of attention kernels against the XLA reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.patterns import FAR, FULL
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.methods.eviction.h2o import H2O
from ksana_jax.methods.eviction.keydiff import KeyDiff
from ksana_jax.methods.eviction.snapkv import SnapKV
from ksana_jax.models.frequencies import make_rope
from ksana_jax.ops.attention import ragged_paged_attention
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.kernels import Kernels
from ksana_jax.ops.kv_write import Queries, write
from ksana_jax.ops.native_kernels import NATIVE
from ksana_jax.ops.observation import AttentionObserver
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import StepArrays, StepShape, TileGroup
from pallas_kernels import reference
from pallas_kernels.contract import Kernel, Result, check_options
from pallas_kernels.registry import KERNELS, KV_WRITES
from tests.machine import compiled
from tests.pallas_kernels.interpreter import PARAMS, interpreting, several_warpgroups
from tests.patterns import MAX_ROTATED_SINKS, PATTERNS
from tests.soak import soak_unless

B, H, N, K = 16, 64, 4, 2
TRITON = Kernels(*(KERNELS[name].tuned(interpret=True) for name in ("triton_decode", "triton_ragged")))
FEW = KERNELS["hopper_decode"].tuned(interpret=PARAMS, num_workers=3)
MANY = KERNELS["hopper_prefill"].tuned(interpret=PARAMS)
LATENT = KERNELS["hopper_latent"].tuned(interpret=PARAMS, num_workers=3)
HOPPER = Kernels(FEW, FEW, MANY, KV_WRITES["hopper_kv_write"].tuned(interpret=PARAMS), LATENT)


def make_step(seed: int, shared: bool, tile: int = 4, codec: str = "bf16", token=(2, K, H)):
    """Five decodes, one of them padding, two tiles of one row; NaN in every unwritten slot.

    If shared, the first three decodes share three leading blocks, and the last one of them is in the window.
    tile: queries of each tile; the last one of the second is padding. token: sides, kv heads and head dim.
    """
    rng = np.random.default_rng(seed)
    newest = 33 + 2 * tile - 1
    lengths = [58, 52, 90, 5, 0, newest]
    ids = iter(rng.permutation(64))
    pool = rng.standard_normal((64, 2, *token[:2], B, token[2])).astype(np.float32)
    width = max(8, -(-newest // B))
    tables, starts = np.zeros((7, width), np.int32), np.full((7, width), FAR, np.int32)
    common = [next(ids) for _ in range(3)]
    shared_tables, shared_starts = np.zeros((2, width), np.int32), np.full((2, width), FAR, np.int32)
    for row, length in enumerate(lengths):
        blocks = [next(ids) for _ in range(-(-length // B))]
        if blocks:
            pool[blocks[-1], ..., length - (len(blocks) - 1) * B :, :] = np.nan
        begin = np.arange(len(blocks)) * B
        if shared and row < 3:
            shared_tables[0, :3], shared_starts[0, :3] = common, begin[:3]
            blocks, begin = blocks[3:], begin[3:]
        tables[row, : len(blocks)], starts[row, : len(blocks)] = blocks, begin
    tables[6], starts[6] = tables[5], starts[5]  # the second tile of the last row
    decodes = [length - 1 for length in lengths[:5]]
    positions = np.array([*decodes, *range(33, newest), -1], np.int32)
    zeros = np.zeros(len(positions), np.int32)
    batch = StepArrays(zeros, positions, positions, zeros + 64 * B, tables, starts, zeros[:7])
    if shared:
        batch = batch._replace(shared_tables=shared_tables, shared_starts=shared_starts)
    shape = StepShape((TileGroup(5, 1), TileGroup(2, tile)), width, max_sampled=7, shared_rows=3 if shared else 0)
    q = jnp.asarray(rng.standard_normal((len(positions), N, token[2])) * 2 * token[2] ** -0.5, jnp.bfloat16)
    cache = KVCache(find_codec(codec).encode(jnp.asarray(pool, jnp.bfloat16), jnp), codec)
    return q, cache, jax.tree.map(jnp.asarray, batch), shape


# The contract's own definition, as kernels that need no interpreter.
REFERENCE = Kernels(*[Kernel(reference.attend, None)] * 2)

# What the rows share is attended to once: only where sinks stand in their own places.
CASES = [
    *((TRITON, name, pattern.sink_position == "absolute", "bf16") for name, pattern in PATTERNS.items()),
    (REFERENCE, "sliding", True, "bf16"),
    (REFERENCE, "StreamingLLM", False, "int8"),
    (HOPPER, "LM-Infinite", False, "bf16"),
    (HOPPER, "sliding", True, "bf16"),
    (HOPPER, "sliding", True, "int8"),
    (HOPPER, "LM-Infinite", False, "fp8_e4m3"),
]


@pytest.mark.parametrize(
    ("kernels", "name", "shared", "codec"),
    soak_unless(lambda case: case == (REFERENCE, "StreamingLLM", False, "int8"), CASES),
    ids=lambda x: {TRITON: "triton", HOPPER: "hopper", REFERENCE: "reference"}.get(x),
)
def test_kernels_serve_a_step_as_the_reference_does(kernels, name, shared, codec, tile=4, token=(2, K, H)):
    pattern = PATTERNS[name]
    q, cache, batch, shape = make_step(len(name), shared, tile, codec, token)
    rotated = 0 if pattern.sink_position == "absolute" else MAX_ROTATED_SINKS
    numbers = jax.tree.map(jnp.asarray, pattern.arrays())
    context = AttentionContext(1, batch, shape, numbers, make_rope(RopeConfig(), token[2]), rotated)
    if name in ("sliding", "global"):  # also what a model may ask for beyond its patterns
        context = context._replace(soft_cap=1.5, sink_logits=jnp.linspace(-1.0, 2.0, N))
    angles = context.rope.angles(batch.positions)
    exact = KVCache({"kv": jnp.asarray(find_codec(codec).decode(cache.leaves, jnp), jnp.float32)}, "f32")
    nothing = jnp.zeros((len(q), *token[1:]), q.dtype)  # no slot is in the pool
    queries, exact = write(q, nothing, nothing, exact, context, angles, 1.0)
    expected = np.asarray(ragged_paged_attention(queries, exact, context).out)
    with interpreting():
        work = kernels.schedule(context, cache, N) if kernels.decode.schedule else None
        queries, cache = jax.jit(lambda cache: kernels.write(q, nothing, nothing, cache, context, angles, 1.0))(cache)
        got = np.asarray(kernels.attend(queries, cache, context, work).out)
    assert got.dtype == q.dtype and np.isfinite(np.float32(got)).all()
    # Weights, and the keys or queries that are rotated anew, are rounded to bfloat16: 2^-8 of what they weigh each.
    largest = np.nanmax(np.abs(np.asarray(exact.kv[:, 1, -1])))
    np.testing.assert_allclose(got, expected, rtol=0, atol=4 * 2**-8 * largest)
    assert np.abs(got - expected).mean() < 2**-9
    assert (got[4] == 0).all() and (got[-1] == 0).all()


@compiled
@pytest.mark.parametrize(
    ("name", "codec"), [("StreamingLLM", "int4"), ("LM-Infinite", "hadamard3"), ("sliding", "turboquant2")]
)
def test_packed_codes_serve_a_step_as_the_reference_does(name, codec):
    test_kernels_serve_a_step_as_the_reference_does(NATIVE, name, False, codec)


@pytest.mark.parametrize("method", soak_unless(lambda method: method == SnapKV(), [H2O(), SnapKV()]))
def test_kernels_return_the_weights_that_an_eviction_method_adds_up(method):
    q, cache, batch, shape = make_step(0, shared=False)
    numbers = jnp.arange(len(q)) % 3  # a third of the queries do not count
    if method.weights_queries:
        batch = batch._replace(query_numbers=numbers.astype(jnp.float32))
    pattern = jax.tree.map(jnp.asarray, PATTERNS["full"].arrays())
    context = AttentionContext(
        1,
        batch,
        shape,
        pattern,
        make_rope(RopeConfig(), H),
        0,
        sink_logits=jnp.ones(N),
        observer=AttentionObserver(method, 1),
    )
    got = REFERENCE.attend(Queries(q, None), cache, context, None)
    expected = ragged_paged_attention(Queries(q, None), cache, context)
    assert [mass.shape for mass in got.masses] == [(5, K, 8 * B), (2, K, 8 * B)]
    for mass, as_expected in zip(got.masses, expected.masses, strict=True):
        np.testing.assert_allclose(mass, as_expected, rtol=0, atol=2e-6)
    # Sinks take some of the weight of each query and head.
    assert (np.asarray(got.masses[0]).sum(axis=(1, 2)) > 0).tolist() == [
        bool(seen and (numbers[row] or not method.weights_queries)) for row, seen in enumerate([1, 1, 1, 1, 0])
    ]


@pytest.mark.parametrize("kernels", [TRITON, REFERENCE], ids=["triton", "reference"])
def test_kernels_rotate_keys_by_their_positions_in_the_cache(kernels):
    q, cache, batch, shape = make_step(3, shared=False)
    rope = make_rope(RopeConfig(theta=50.0), H)._replace(scale=1.25)
    pattern, observer = jax.tree.map(jnp.asarray, FULL.arrays()), AttentionObserver(KeyDiff(positions="cache"), 1)
    context = AttentionContext(1, batch, shape, pattern, rope, 2, observer=observer)  # other layers have sinks
    k = q[:, :K] * 3
    batch = batch._replace(slots=batch.block_tables[0, 0] * B + jnp.arange(len(q)))  # in the first row's first block
    context = context._replace(batch=batch)

    def step(write, attend):
        with interpreting():
            queries, written = jax.jit(lambda cache: write(q, k, k, cache, context, angles, 0.5))(cache)
            return np.float32(attend(queries, written)), np.asarray(written.kv)

    angles = rope.angles(batch.cache_positions)
    expected, as_expected = step(
        write, lambda queries, pool: ragged_paged_attention(queries._replace(q_sink=None), pool, context).out
    )
    got, pool = step(kernels.write, lambda queries, pool: kernels.attend(queries, pool, context, None).out)
    assert (pool.view(np.uint16) == as_expected.view(np.uint16)).all()
    # Weights are rounded to bfloat16, as in the test above.
    np.testing.assert_allclose(got, expected, rtol=0, atol=4 * 2**-8 * np.nanmax(np.abs(as_expected[:, 1, 1])))
    assert np.abs(got - expected).mean() < 2**-9
    unrotated = context._replace(observer=None)
    queries, _ = write(q, k, k, cache, unrotated, angles, 0.5)
    other = ragged_paged_attention(queries._replace(q_sink=None), KVCache({"kv": jnp.asarray(pool)}, "bf16"), unrotated)
    assert np.abs(np.float32(other.out) - expected).mean() > 2**-4


@several_warpgroups
@pytest.mark.parametrize(
    ("name", "codec"),
    soak_unless(
        lambda case: case[1] == "bf16",
        [("sliding", "bf16"), ("StreamingLLM", "bf16"), ("sliding", "int8"), ("full", "fp8_e4m3")],
    ),
)
def test_prefill_serves_long_tiles_of_a_step_as_the_reference_does(name, codec):
    test_kernels_serve_a_step_as_the_reference_does(HOPPER, name, name == "sliding", codec, tile=64)


@several_warpgroups
@pytest.mark.parametrize(("codec", "width"), soak_unless(("bf16", 128).__eq__, [("bf16", 128), ("latent8", 576)]))
def test_latents_serve_a_step_as_the_reference_does(codec, width):
    test_kernels_serve_a_step_as_the_reference_does(HOPPER, "full", True, codec, token=(1, 1, width))


def test_long_tiles_have_a_kernel_of_their_own_on_hopper():
    def served(
        tile: int, head_dim: int = H, kernels: Kernels = HOPPER, codec: str = "bf16", **asked
    ) -> tuple[str, ...]:
        _, _, batch, shape = make_step(0, shared=True, tile=tile)
        pool = jnp.zeros((1, 2, 2, K, B, head_dim), jnp.bfloat16)
        cache = KVCache(find_codec(codec).encode(pool, jnp), codec)
        context = AttentionContext(1, batch, shape, PATTERNS["full"].arrays(), make_rope(RopeConfig(), H), 0)
        named = {
            name: kernel and kernel._replace(schedule=lambda call, tuning, name=name: name)
            for name, kernel in kernels._asdict().items()
        }
        return Kernels(**named).schedule(context._replace(**asked), cache, N)

    # Decodes, tiles, what decodes share: 64 queries of a group of 2 are 128 rows.
    assert served(64) == served(64, head_dim=256) == ("decode", "prefill", "ragged")
    assert served(64, codec="int8") == served(64, codec="fp8_e4m3") == ("decode", "prefill", "ragged")
    assert served(64, head_dim=256, codec="int8") == ("decode", "ragged", "ragged")
    assert served(32) == ("decode", "ragged", "ragged")
    assert served(64, kernels=TRITON) == ("decode", "ragged", "ragged")

    def uncapped(call, work, *, tuning):
        check_options(call, "return_lse", "out_dtype", "sinks")
        return Result(call.q)

    capless = HOPPER._replace(prefill=Kernel(uncapped, None))
    assert served(64, kernels=capless)[1] == "prefill"
    assert served(64, kernels=capless, soft_cap=30.0)[1] == "ragged"


def test_attention_of_a_device_with_some_of_the_heads_is_that_of_those_heads():
    q, cache, batch, shape = make_step(1, shared=False)
    config = ModelConfig(num_layers=2, num_heads=N, num_kv_heads=K, head_dim=H)
    layout = layout_of(config, dtype="bf16", block_size=B)
    numbers = jax.tree.map(jnp.asarray, PATTERNS["sliding"].arrays())
    context = AttentionContext(1, batch, shape, numbers, make_rope(RopeConfig(), H), 0)

    def attend(q, cache):
        return np.asarray(ragged_paged_attention(Queries(q, None), cache, context).out)

    whole, group = attend(q, cache), N // K
    for device in range(K):
        part = KVCache({"kv": cache.kv[:, :, :, device : device + 1]}, "bf16")
        assert part.kv.shape[1:] == layout.local(K).leaf("kv").shape
        heads = slice(device * group, (device + 1) * group)
        # The same sums; how XLA orders them may depend on the number of heads.
        np.testing.assert_allclose(attend(q[:, heads], part), whole[:, heads], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", soak_unless(lambda codec: codec != "fp8_e4m3", ["bf16", "int8", "fp8_e4m3"]))
def test_the_fused_write_stores_and_rotates_as_the_reference_does(codec):
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.standard_normal((3, n, H)), jnp.bfloat16) for n in (N, K, K))
    pool = KVCache(
        find_codec(codec).encode(jnp.asarray(rng.standard_normal((4, 2, 2, K, B, H)), jnp.bfloat16), jnp), codec
    )
    positions = jnp.array([40, 3, -1])
    batch = StepArrays(None, positions, positions, jnp.array([17, 63, 4 * B]), None, None, None)
    pattern = jax.tree.map(jnp.asarray, PATTERNS["StreamingLLM"].arrays())
    context = AttentionContext(1, batch, StepShape((TileGroup(3, 1),), 1, 3), pattern, make_rope(RopeConfig(), H), 2)
    angles = context.rope.angles(positions)
    expected, expected_pool = write(q, k, v, pool, context, angles, 0.125)
    with interpreting():
        fused = jax.jit(lambda q, k, v, pool: HOPPER.write(q, k, v, pool, context, angles, 0.125))
        got, got_pool = fused(q, k, v, pool)
    assert got.q_sink is not None and expected.q_sink is not None
    # The kernel rounds once, the reference before the rotation too: a unit in the last place of bfloat16.
    for a, b in ((got.q[:2], expected.q[:2]), (got.q_sink[:2, 1], expected.q_sink[:2])):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=2**-7)
    stored, as_expected = (find_codec(codec).decode(p.leaves, jnp) for p in (got_pool, expected_pool))
    # That unit can round to the next code, which is a step further: in e4m3 an eighth of the number.
    step = {"bf16": 2**-7, "int8": 2**-5, "fp8_e4m3": 2**-3}[codec]
    np.testing.assert_allclose(np.float32(stored), np.float32(as_expected), rtol=step, atol=step)
    untouched = np.ones(got_pool.kv.shape, bool)
    untouched[[1, 3], 1, :, :, [1, 15]] = False
    for name, leaf in got_pool.leaves.items():
        there = untouched[..., 0] if name == "scale" else untouched
        assert (np.asarray(leaf) == np.asarray(pool.leaves[name]))[there].all() and there.any()

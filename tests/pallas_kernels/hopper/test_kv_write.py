"""The fused write of keys and values: what reaches the pool, what stays as it was, and how it is compiled."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.frequencies import make_rope
from ksana_jax.models.layers import rms_norm
from ksana_jax.ops.pool import KVCache
from pallas_kernels import kv_write_reference
from pallas_kernels.contract import Pool, Write, Written
from pallas_kernels.hopper.kv_write import row_layouts
from pallas_kernels.registry import KV_WRITES
from tests.pallas_kernels.interpreter import PARAMS, interpreting
from tests.soak import soak_unless

NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE = 3, 2, 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
# First and last slot of the pool, edges of a block; the others are outside and to be dropped.
SLOTS = (0, NUM_SLOTS, 15, 47, -1, 16)


@dataclasses.dataclass(frozen=True)
class Case:
    """heads: query heads, kv heads, head dim."""

    heads: tuple[int, int, int]
    pool: str = "bfloat16"
    slots: tuple[int, ...] = SLOTS
    norms: bool = False
    num_sinks: int = 0
    tokens_per_block: int = 1

    @property
    def quantised(self) -> bool:
        return jnp.dtype(self.pool) in kv_write_reference.LARGEST

    def __str__(self):
        n, k, h = self.heads
        return f"{n}-{k}-{h}-{self.pool}{'-norms' * self.norms}{f'-sinks{self.num_sinks}' * (self.num_sinks > 0)}"


CASES = (
    Case((4, 2, 64)),
    Case((8, 8, 128), "float16", norms=True, tokens_per_block=4),
    Case((3, 1, 96), "float32", num_sinks=2),
    Case((4, 4, 256), "int8", norms=True, tokens_per_block=6),
    Case((4, 2, 64), "int8", slots=(NUM_SLOTS, 33), num_sinks=1),
    Case((4, 2, 64), "float8_e4m3fn", norms=True, tokens_per_block=2),
    Case((4, 2, 64), slots=(-1, NUM_SLOTS + 7)),
    Case((4, 1, 128), "int8", norms=True, num_sinks=1, tokens_per_block=2),
    Case((1, 1, 64)),
)


def make(case: Case, rng: np.random.Generator) -> Write:
    """A write to layer 1; whatever rests in the pool is NaN, or an odd number."""
    (n, k, h), t = case.heads, len(case.slots)
    dtype = jnp.float16 if case.pool == "float16" else jnp.bfloat16

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def tables(*shape):
        angles = rng.uniform(0, 100, (*shape, h // 2))
        return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)

    shape = (NUM_BLOCKS, NUM_LAYERS, 2, k, BLOCK_SIZE, h)
    kv = jnp.full(shape, 77 if case.pool == "int8" else jnp.nan, case.pool)
    scales = jnp.full(shape[:-1], jnp.nan, jnp.float32) if case.quantised else None
    return Write(
        draw(t, n, h),
        draw(t, k, h),
        3 * draw(t, k, h),
        Pool(kv, scales),
        jnp.asarray(case.slots, jnp.int32),
        tables(t),
        layer=jnp.int32(1),
        q_norm=1 + draw(h) / 4 if case.norms else None,
        k_norm=1 + draw(h) / 4 if case.norms else None,
        sink_rope=tables(t, case.num_sinks) if case.num_sinks else None,
        q_scale=h**-0.5,
    )


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def written(pool_like, slots) -> np.ndarray:
    """Which numbers of a pool [M, L, 2, K, B, ...] a write to layer 1 may touch."""
    touched = np.zeros(pool_like.shape, bool)
    for slot in slots:
        if 0 <= slot < NUM_SLOTS:
            touched[slot // BLOCK_SIZE, 1, :, :, slot % BLOCK_SIZE] = True
    return touched


def within(actual, wanted, dtype) -> None:
    """Equal up to one rounding to dtype: sums of squares are taken in another order."""
    eps = float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0
    eps = max(eps, 1e-6)
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(wanted, np.float32), rtol=eps, atol=eps)


def write_of(case: Case, interpret: Any = False) -> Callable[[Write], Written]:
    kernel = KV_WRITES["hopper_kv_write"].tuned(tokens_per_block=case.tokens_per_block, interpret=interpret)
    return lambda call: kernel(call)


def compare(actual: Written, case: Case, call: Write) -> None:
    """Asserts that a write gave what the reference gives and touched nothing else."""
    wanted = kv_write_reference.write(call)
    (before, scales_before), (kv, scales), (wanted_kv, wanted_scales) = (x.pool[:2] for x in (call, actual, wanted))
    within(actual.q, wanted.q, wanted.q.dtype)
    if case.num_sinks:
        within(actual.q_sink, wanted.q_sink, wanted.q.dtype)
    touched = written(before, case.slots)
    assert (bits(kv)[~touched] == bits(before)[~touched]).all()
    if case.pool == "int8":
        steps = np.asarray(kv, int) - np.asarray(wanted_kv, int)
        assert abs(steps).max() <= 1 and (steps != 0).mean() < 1e-2  # where a sum's last bit decides a rounding
    else:
        within(np.asarray(kv)[touched], np.asarray(wanted_kv)[touched], case.pool)
    if case.quantised:
        touched = written(scales_before, case.slots)
        assert (bits(scales)[~touched] == bits(scales_before)[~touched]).all()
        within(np.asarray(scales)[touched], np.asarray(wanted_scales)[touched], jnp.float32)


@pytest.mark.parametrize("case", soak_unless(CASES[::5].__contains__, CASES), ids=str)
def test_the_kernel_writes_what_the_reference_writes_and_nothing_else(case):
    call = make(case, np.random.default_rng(CASES.index(case)))
    with interpreting():
        compare(jax.block_until_ready(jax.jit(write_of(case, PARAMS))(call)), case, call)


def test_interpret_true_is_all_that_a_machine_without_a_gpu_needs():
    call = make(CASES[0], np.random.default_rng(0))
    compare(jax.jit(write_of(CASES[0], True))(call), CASES[0], call)


def test_the_reference_is_what_the_engine_does_in_five_operations():
    rng = np.random.default_rng(1)
    case = Case((4, 2, 64), "float32", norms=True)
    call = make(case, rng)
    q, k, v, q_norm, k_norm = (x.astype(jnp.float32) for x in (call.q, call.k, call.v, call.q_norm, call.k_norm))
    rope, positions = make_rope(RopeConfig(), 64), jnp.asarray([0, 5, 900, 3, 0, 77])
    slots = jnp.where(call.slots < 0, NUM_SLOTS, call.slots)
    angles = rope.angles(positions)
    cache = KVCache({"kv": call.pool.kv}, "f32").write(1, slots, rope.rotate(rms_norm(k, k_norm, 1e-6), angles), v)
    own = kv_write_reference.write(Write(q, k, v, call.pool, slots, angles, 1, q_norm, k_norm, q_scale=0.125))
    np.testing.assert_allclose(own.q, rope.rotate(rms_norm(q, q_norm, 1e-6) * 0.125, angles), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own.pool.kv, cache.kv, rtol=1e-5, atol=1e-6)


def test_e4m3_is_wrong_by_a_sixteenth_at_most_and_uses_its_whole_range():
    x = np.random.default_rng(3).normal(size=(50, 64)).astype(np.float32)
    x[7] = 0
    codes, scales = kv_write_reference.quantised(jnp.asarray(x), jnp.float8_e4m3fn)
    codes, steps = np.asarray(codes, np.float32), np.asarray(scales)[:, None]
    # Three bits of mantissa; the smallest codes are 2^-9 apart.
    assert (abs(codes * steps - x) <= np.maximum(abs(x) * 1.001 / 16, steps * 2**-10)).all()
    assert (np.abs(codes[:7]).max(axis=1) == 448).all() and (codes[7] == 0).all()


def test_int8_is_wrong_by_half_a_step_at_most_and_zeros_stay_zeros():
    x = np.random.default_rng(2).normal(size=(50, 64)).astype(np.float32)
    x[7], x[8] = 0, 1e-35
    numbers, scales = kv_write_reference.quantised(jnp.asarray(x))
    error = abs(np.asarray(numbers, np.float32) * np.asarray(scales)[:, None] - x)
    assert (error <= np.asarray(scales)[:, None] * 0.5001 + 1e-30).all()
    assert (np.abs(np.asarray(numbers)[:7]).max(axis=1) == 127).all()
    assert (np.asarray(numbers)[7:9] == 0).all() and np.isfinite(scales).all()


def lowered(case: Case, num_tokens: int):
    """The program of a write for a Hopper GPU, without one."""
    call = make(dataclasses.replace(case, slots=tuple(range(num_tokens))), np.random.default_rng(0))
    mesh = contextlib.nullcontext()
    if hasattr(jax.sharding, "AbstractDevice") and jax.__version_info__ >= (0, 11):
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))

    def write(pool: Pool):
        return write_of(case)(dataclasses.replace(call, pool=pool))

    with mesh:
        traced = jax.jit(write, donate_argnums=0).trace(call.pool)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "case",
    [
        Case((32, 8, 128), norms=True),
        Case((14, 2, 64)),
        Case((9, 3, 64), "float16"),
        Case((64, 4, 96), "int8", norms=True, num_sinks=2),
        Case((8, 2, 256), "float32", tokens_per_block=2),
        Case((4, 1, 128)),  # of a Llama-8B on eight devices
    ],
    ids=str,
)
def test_the_kernel_lowers_for_hopper_with_the_pool_aliased(case):
    text = lowered(case, 4)
    call = next(line for line in text.splitlines() if "mosaic_gpu" in line and "custom_call" in line)
    aliases = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d+)\], operand_index = (\d+)", call)
    assert len(aliases) == (2 if case.quantised else 1)
    assert len(re.findall(r"tf.aliasing_output|jax.buffer_donor", text)) == len(aliases)


def test_many_shapes_of_heads_have_layouts_that_divide_them_and_share_a_row():
    for num_kv_heads in (1, 2, 3, 4, 5, 7, 8, 10, 16, 20, 32):
        for group in (1, 2, 3, 4, 5, 7, 8, 16):
            for width in (32, 48, 64, 128):
                rows = (num_kv_heads * group, num_kv_heads)
                layouts: list[Any] = [x.to_mgpu() for x in row_layouts(*rows, width)]
                assert layouts[0].reduce((0,)) == layouts[1].reduce((0,))
                for n, layout in zip(rows, layouts):
                    assert n % layout.base_tile_shape[0] == 0 and width % layout.base_tile_shape[1] == 0


def test_what_does_not_fit_or_is_lacking_is_named():
    def attempt(case, error, match, **changes):
        call = dataclasses.replace(make(case, np.random.default_rng(0)), **changes)
        with pytest.raises(error, match=match):
            write_of(case, PARAMS)(call)

    attempt(Case((4, 2, 80)), NotImplementedError, "head dim 80 is not one of 64, 96, 128, 256")
    attempt(Case((4, 2, 64), "uint16"), NotImplementedError, "pool of uint16")
    attempt(Case((128, 128, 128)), NotImplementedError, "128 query and 128 kv heads of 128.* 384 numbers")
    codes = jnp.zeros((NUM_BLOCKS, NUM_LAYERS, 2, 2, BLOCK_SIZE, 64), jnp.int8)
    attempt(Case((4, 2, 64)), ValueError, "a pool of int8 without scales", pool=Pool(codes))
    attempt(Case((4, 2, 64)), ValueError, r"slots \(5,\)", slots=jnp.zeros(5, jnp.int32))
    attempt(Case((4, 2, 64)), ValueError, r"q_norm has shape \(32,\), not \(64,\)", q_norm=jnp.zeros(32))
    attempt(Case((4, 2, 64)), ValueError, r"rope has tables \(6, 16\), not \[6, 32\]", rope=(jnp.zeros((6, 16)),) * 2)


def test_a_write_that_is_not_supported_is_known_without_running_it():
    call = make(Case((4, 2, 80)), np.random.default_rng(0))
    kernel = KV_WRITES["hopper_kv_write"]
    assert kernel.unsupported(jax.eval_shape(lambda: call)) == "head dim 80 is not one of 64, 96, 128, 256"
    assert kernel.unsupported(jax.eval_shape(lambda: make(CASES[0], np.random.default_rng(0)))) is None


def test_no_tokens_write_nothing():
    call = make(Case((4, 2, 64), slots=(), num_sinks=3), np.random.default_rng(0))
    result = KV_WRITES["hopper_kv_write"](call)
    assert result.q_sink is not None and result.q_sink.shape == (0, 3, 4, 64)
    assert result.q.shape == (0, 4, 64) and (bits(result.pool.kv) == bits(call.pool.kv)).all()


def test_layers_share_one_lowering():
    call = make(CASES[0], np.random.default_rng(0))

    def write_layers(call):
        for layer in range(NUM_LAYERS):
            call = dataclasses.replace(call, layer=jnp.int32(layer))
            call = dataclasses.replace(call, pool=KV_WRITES["hopper_kv_write"](call).pool)
        return call.pool

    equations = jax.make_jaxpr(write_layers)(call).eqns
    programs = [e.params["jaxpr"] for e in equations if e.params.get("name") == "write"]
    assert len(programs) == NUM_LAYERS and len(set(map(id, programs))) == 1

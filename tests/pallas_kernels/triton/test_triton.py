"""The Pallas-Triton kernels, interpreted, against the reference."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arguments import GLOBAL, ROTATED, SINKS_IN_CACHE, SMALL, TINY, WINDOW, Spec, make
from pallas_kernels.contract import Kernel, Pool
from pallas_kernels.patterns import FAR
from pallas_kernels.triton import decode as triton_decode
from pallas_kernels.triton import parts
from pallas_kernels.triton import ragged as triton_ragged
from tests.pallas_kernels.contract import check
from tests.soak import soak_unless

decode = triton_decode.KERNEL.tuned(interpret=True)
ragged = triton_ragged.KERNEL.tuned(interpret=True)
DECODES, CHUNKS = [s for s in SMALL if s.q_tile == 1], [s for s in SMALL if s.q_tile > 1]


@pytest.mark.parametrize("spec", soak_unless(DECODES[::4].__contains__, DECODES), ids=str)
def test_decode_gives_what_the_reference_gives(spec):
    check(decode.tuned(num_workers=16), spec)


@pytest.mark.parametrize("spec", soak_unless(CHUNKS[::4].__contains__, CHUNKS), ids=str)
def test_ragged_gives_what_the_reference_gives(spec):
    check(ragged, spec)


@pytest.mark.parametrize("kernel", [decode, ragged], ids=["decode", "ragged"])
@pytest.mark.parametrize("spec", ROTATED, ids=str)
def test_keys_are_rotated_by_their_positions(kernel, spec):
    check(kernel, spec)


def test_decode_takes_several_queries_too():
    check(decode, TINY[3])


def test_ragged_takes_single_queries_too():
    check(ragged, TINY[0])


def test_tiles_of_more_rows_than_the_kernels_have_are_cut():
    check(ragged, Spec(rows=((150, 97), (2, 1)), q_tile=48, num_heads=8, pattern=SINKS_IN_CACHE, sink_queries=1))


@pytest.mark.parametrize("num_workers", [1, 40])
def test_decode_does_not_depend_on_where_the_work_is_cut(num_workers):
    check(decode.tuned(num_workers=num_workers), SMALL[0])


@pytest.mark.soak
def test_blocks_out_of_sight_are_not_in_the_work():
    spec = Spec(rows=((2048, 1), (2040, 1)), pattern=WINDOW)
    work = parts.schedule(make(spec), num_workers=16)
    # A window of 40 that ends with a block of 16, or in the middle of one: 3 blocks, one piece of 64.
    assert (np.asarray(work.starts) < FAR).sum(axis=1).tolist() == [3, 3]
    assert np.asarray(work.segments)[:, 3].sum() == 2 * spec.num_kv_heads
    check(decode, spec)


def test_one_compilation_serves_all_patterns_and_layers():
    compilations = []

    def counted(call, work, *, tuning):
        compilations.append(call.pattern)
        return decode(call)

    for pattern, layer in ((WINDOW, 0), (GLOBAL, 1)):
        check(Kernel(counted, None), dataclasses.replace(SMALL[0], pattern=pattern, layer=layer))
    assert len(compilations) == 1


@pytest.mark.parametrize("kernel", [decode, ragged], ids=["decode", "ragged"])
def test_what_is_not_supported_is_refused_with_its_number(kernel):
    call = make(TINY[0])
    q, kv = call.q, call.pool.kv
    for changes, reason in (
        (dict(q=q[..., :32], pool=Pool(kv[..., :32])), "head_dim 32"),
        (dict(q=q.astype(jnp.float32), pool=Pool(kv.astype(jnp.float32))), "queries in float32"),
        (dict(pool=Pool(kv[:, :, :, :, :8])), "blocks of 8 tokens"),
        (dict(q_sink=call.q[:, :, None], key_rope=(jnp.ones((64, 32)),) * 2), "key_rope with q_sink"),
        (dict(q=jnp.repeat(q, 130, axis=2)), "260 query heads share a kv head"),
    ):
        assert reason in str(kernel.unsupported(call.replace(**changes)))


@pytest.mark.parametrize("kernel", [decode, ragged], ids=["decode", "ragged"])
def test_result_has_the_dtype_that_is_asked_for(kernel):
    out, lse, _ = jax.eval_shape(lambda call: kernel(call), make(TINY[0]).replace(out_dtype=jnp.float32))
    assert out.dtype == lse.dtype == jnp.float32


def test_lowering_for_a_gpu_does_not_warn_and_passes_the_pool_as_it_is():
    """The Triton back end is named, so that it is not the default that decides; its deprecation is known."""
    call = make(TINY[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), call)
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
    for kernel in (triton_decode.KERNEL, triton_ragged.KERNEL):
        with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
            warnings.simplefilter("error")
            traced = jax.jit(lambda call, kernel=kernel: kernel(call)).trace(abstract)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton_kernel_call" in text or "xla.gpu.triton" in text

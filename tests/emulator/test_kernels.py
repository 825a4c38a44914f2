"""The Hopper kernels as they are compiled: their PTX, emulated on the CPU, against the references.

What jax's interpreter does not have is here: layouts and swizzles of shared memory, TMA boxes, descriptors and register
operands of wgmma, proxy fences. `make kernels` runs these tests; elsewhere they are skipped.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.arguments import LATENTS, LATENTS_8_BITS, SINKS, SMALL, TINY, TINY_QUANTISED, Spec, make
from pallas_kernels.contract import Kernel
from pallas_kernels.hopper import latent_kernel, latent_warpgroup
from pallas_kernels.hopper.mass import probability_mass
from pallas_kernels.hopper.merge import merge_segments
from pallas_kernels.hopper.schedule import Tuning
from pallas_kernels.registry import KERNELS
from tests import emulator
from tests.emulator.plugin import needs_plugin
from tests.pallas_kernels import contract
from tests.pallas_kernels.hopper import test_decode, test_kv_write, test_mass, test_merge, test_prefill, test_product
from tests.soak import soak_unless

pytestmark = needs_plugin

# Heads of groups whose queries are no multiple of 8 rows, over all head dims.
GROUPS = [
    Spec(rows=((70, 1),), num_heads=n, num_kv_heads=1, head_dim=h, block_size=64, dtype=dtype, seed=n)
    for n, h, dtype in ((1, 128, "bfloat16"), (3, 96, "bfloat16"), (4, 128, "float16"), (7, 256, "bfloat16"))
]
DECODE = [*TINY, *TINY_QUANTISED, *test_decode.TWO_GROUPS, *GROUPS]
SWAPPED = [*test_decode.SWAPPED, *(spec for spec in GROUPS if spec.head_dim != 96)]
WIDE = Spec(rows=((290, 16),), q_tile=16, num_kv_heads=1, head_dim=256, block_size=64, pattern=SINKS, sink_logits=True)
# Six pieces of keys, more than the ring has stages: each stage is refilled behind its readers.
SIX_PIECES = Spec(rows=((700, 16),), q_tile=16, num_heads=8, num_kv_heads=1, head_dim=128, block_size=64)
PREFILL = [*test_prefill.SPECS, *test_prefill.QUANTISED, WIDE, SIX_PIECES]
# Prefill of longer rows in 8 and 4 bits.
CODES = [
    dataclasses.replace(spec, codes=codes, dtype="bfloat16")
    for spec in SMALL
    for codes in ("int8", "float8_e4m3fn", "int4")
    if spec.q_tile > 1 and spec.head_dim <= 128 and (codes != "int4" or spec.block_size % 64 == spec.head_dim % 64 == 0)
]


def run(function, call, *args, **options):
    """A function of a call in the emulator. Numbers of the pattern and the layer are constants of the program."""
    leaves, tree = jax.tree.flatten((call, *args))
    arrays = [x for x in leaves if hasattr(x, "shape")]

    def with_arrays(*arrays):
        given = iter(arrays)
        return function(*tree.unflatten([next(given) if hasattr(x, "shape") else x for x in leaves]))

    return emulator.run(with_arrays, *arrays, **options)


def emulate(kernel: Kernel, spec: Spec) -> None:
    """Holds attention in the emulator to the reference."""
    contract.compare(run(kernel, make(spec), seed=spec.seed), spec)


@pytest.mark.parametrize("spec", DECODE, ids=str)
def test_attention_and_merge(spec):
    emulate(KERNELS["hopper_decode"].tuned(num_workers=3, swapped=False), spec)


@pytest.mark.parametrize("spec", SWAPPED, ids=str)
def test_attention_with_swapped_operands(spec):
    emulate(KERNELS["hopper_decode"].tuned(num_workers=3, swapped=True), spec)


@pytest.mark.parametrize("shape", test_merge.SHAPES, ids=str)
def test_merge_of_split_pairs(shape):
    partial, partial_lse, work, sinks, out, lse = arguments = test_merge.arguments_of(*shape, True)

    def merge(partial, partial_lse, sinks, out, lse, *arrays):
        return merge_segments(partial, partial_lse, type(work)(*arrays), sinks, out, lse, False)

    test_merge.compare(emulator.run(merge, partial, partial_lse, sinks, out, lse, *map(np.asarray, work)), arguments)


@pytest.mark.parametrize("spec", PREFILL, ids=str)
def test_prefill(spec):
    emulate(KERNELS["hopper_prefill"], spec)


# Beside codes there is no room for them.
@pytest.mark.parametrize("spec", [spec for spec in PREFILL if not spec.codes], ids=str)
def test_prefill_with_weights_in_shared_memory(spec):
    emulate(KERNELS["hopper_prefill"].tuned(registers=False), spec)


@pytest.mark.parametrize("spec", [PREFILL[0], dataclasses.replace(PREFILL[0], codes="float8_e4m3fn")], ids=str)
def test_splits_of_a_prefill(spec):
    emulate(KERNELS["hopper_prefill"].tuned(splits=2), spec)


@pytest.mark.parametrize("spec", [*LATENTS, *soak_unless(LATENTS_8_BITS[:2].__contains__, LATENTS_8_BITS)], ids=str)
def test_attention_to_latents(spec):
    emulate(KERNELS["hopper_latent"].tuned(num_workers=3), spec)


def test_weights_of_latents_that_the_second_warpgroup_does_not_wait_for_are_found(monkeypatch):
    def take_early(warpgroup, stage, top):
        plgpu.barrier_wait(warpgroup.refs.left_bar.at[stage])
        fade, total = (warpgroup.row_numbers(stage, i)[...] for i in (latent_warpgroup.FADE, latent_warpgroup.TOTAL))
        return fade, (top, total)

    monkeypatch.setattr(latent_kernel, "_take_rows", take_early)
    with pytest.raises(emulator.Trap, match="no barrier"):
        emulate(KERNELS["hopper_latent"].tuned(num_workers=4), LATENTS[0])


def test_a_first_warpgroup_that_does_not_wait_for_widened_channels_of_the_second_is_found(monkeypatch):
    monkeypatch.setattr(latent_kernel, "_wait_for", lambda *_: None)
    with pytest.raises(emulator.Trap, match="no barrier"):
        emulate(KERNELS["hopper_latent"].tuned(num_workers=4), LATENTS_8_BITS[0])


@pytest.mark.parametrize("spec", test_mass.SPECS, ids=str)
def test_probability_mass(spec):
    arguments, tuning = test_mass.arguments_of(spec), Tuning(num_workers=3)
    actual = run(lambda call, lse: probability_mass(call, lse, tuning=tuning), *arguments, seed=spec.seed)
    expected = reference.probability_mass(*arguments)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=test_mass.TOLERANCE)


@pytest.mark.parametrize("case", test_kv_write.CASES, ids=str)
def test_write_of_keys_and_values(case):
    call = test_kv_write.make(case, np.random.default_rng(1))
    test_kv_write.compare(emulator.run(test_kv_write.write_of(case), call), case, call)


@pytest.mark.parametrize("case", test_product.CASES, ids=str)
def test_product_of_few_rows(case):
    call = test_product.make(case)
    test_product.compare(emulator.run(test_product.kernel_of(case), call, seed=case.rows), call)


def test_a_product_that_asks_for_weights_of_the_next_one():
    case = dataclasses.replace(test_product.CASES[0])
    call = dataclasses.replace(
        test_product.make(case), ahead=np.ones((300, 256), "bfloat16"), ahead_bytes=300 * 2 * 128
    )
    test_product.compare(emulator.run(test_product.kernel_of(case), call), call)


@pytest.mark.parametrize("swapped", [False, True])
def test_float32_results_of_few_rows(swapped):
    spec = dataclasses.replace(GROUPS[2], dtype="bfloat16")
    result = run(
        KERNELS["hopper_decode"].tuned(num_workers=2, swapped=swapped), make(spec).replace(out_dtype=np.float32)
    )
    assert result.out.dtype == np.float32
    contract.compare(result._replace(out=result.out.astype("bfloat16")), spec)


@pytest.mark.soak
@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_attention_and_merge_of_longer_rows(spec):
    emulate(KERNELS["hopper_decode"].tuned(num_workers=5), spec)


@pytest.mark.soak
@pytest.mark.parametrize("spec", [*(spec for spec in SMALL if spec.q_tile > 1), *CODES], ids=str)
def test_prefill_of_longer_rows(spec):
    emulate(KERNELS["hopper_prefill"], spec)

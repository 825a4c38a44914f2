"""The Hopper kernels, run by jax's interpreter of GPU programs on the CPU, against the reference."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.arguments import SINKS, SINKS_AT_CEILING, SINKS_IN_CACHE, TINY, TINY_QUANTISED, Spec, make
from pallas_kernels.contract import Pool
from pallas_kernels.hopper import decode
from pallas_kernels.hopper.schedule import Plan
from tests.pallas_kernels.contract import check, expect_unsupported_is_named
from tests.pallas_kernels.interpreter import PARAMS, interpreting, several_warpgroups
from tests.soak import soak_unless

# More than the pieces there are, few that share rows, and one that does everything.
WORKERS = (7, 3, 1)


# Two warpgroups to a block of threads.
TWO_GROUPS = (
    Spec(
        rows=((75, 5),),
        q_tile=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=256,
        block_size=32,
        sink_queries=6,
        pattern=SINKS_AT_CEILING,
    ),
    Spec(
        rows=((140, 1), (75, 1)),
        num_heads=2,
        head_dim=256,
        codes="float8_e4m3fn",
        evict_every=3,
        sink_queries=1,
        pattern=SINKS_IN_CACHE,
    ),
)
KERNEL = decode.KERNEL.tuned(interpret=PARAMS)
SPECS = (*TINY, *TINY_QUANTISED)
# As many columns as swapped operands take: 4 queries x a group of 4.
SIXTEEN = Spec(rows=((75, 5),), q_tile=4, num_kv_heads=1, block_size=64, codes="int8", pattern=SINKS, return_lse=True)
SWAPPED = (*(spec for spec in SPECS if spec.head_dim != 96), *TWO_GROUPS, SIXTEEN)


@pytest.mark.parametrize("spec", soak_unless(TINY[::3].__contains__, SPECS), ids=str)
def test_the_hopper_kernel_equals_the_reference_without_races(spec):
    workers = WORKERS[SPECS.index(spec) % len(WORKERS)]
    with interpreting():
        check(KERNEL.tuned(num_workers=workers, swapped=False), spec)


@pytest.mark.parametrize("spec", soak_unless((TINY[1], TINY_QUANTISED[0], SIXTEEN).__contains__, SWAPPED), ids=str)
def test_swapped_operands_equal_the_reference_without_races(spec):
    workers = WORKERS[SWAPPED.index(spec) % len(WORKERS)]
    with interpreting():
        check(KERNEL.tuned(num_workers=workers, swapped=True), spec)


@several_warpgroups
@pytest.mark.parametrize("spec", TWO_GROUPS, ids=str)
def test_two_warpgroups_equal_the_reference_without_races(spec):
    with interpreting():
        check(KERNEL.tuned(num_workers=3, swapped=False), spec)


def test_operands_are_swapped_for_few_queries_of_whole_head_dims():
    assert [Plan.of(128, "bfloat16", rows).swapped for rows in (8, 16, 24)] == [True, True, False]
    assert not Plan.of(96, "bfloat16", rows=8).swapped
    for changes in ({"head_dim": 96}, {"num_heads": 17, "num_kv_heads": 1}):
        call = make(dataclasses.replace(TINY[0], **changes))
        assert KERNEL.unsupported(call) is None
        assert "swapped operands with" in (KERNEL.tuned(swapped=True).unsupported(call) or "")


@pytest.mark.soak
def test_layers_can_share_one_work_list():
    spec = TINY[0]
    call, kernel = make(spec).replace(return_lse=False), KERNEL.tuned(num_workers=2)
    with interpreting():
        own, shared = kernel(call), kernel(call, kernel.work(call))
    assert (own.out == shared.out).all()


def test_the_mass_comes_with_the_attention():
    call = make(Spec(rows=((70, 1),), num_heads=2, num_kv_heads=1, block_size=64))
    with interpreting():
        result = KERNEL.tuned(num_workers=1)(call.replace(return_mass=True))
    assert result.lse is None
    mass = reference.attend(call.replace(return_mass=True)).mass
    np.testing.assert_allclose(result.mass, mass, rtol=0, atol=1e-5)


@pytest.mark.soak
def test_interpret_true_is_all_that_a_machine_without_a_gpu_needs():
    spec = Spec(rows=((70, 1),), num_heads=2, num_kv_heads=1, block_size=64)
    check(decode.KERNEL.tuned(num_workers=1, interpret=True), spec)


def test_what_the_kernel_lacks_is_named():
    expect_unsupported_is_named(KERNEL, Spec(rows=((5, 1),)))


@pytest.mark.parametrize("codes", soak_unless(lambda codes: codes == "int8", ["int8", "float8_e4m3fn"]))
def test_values_of_any_magnitude_are_as_exact(codes):
    call = make(Spec(rows=((20, 1),), num_heads=1, num_kv_heads=1, block_size=64, codes=codes))
    scales = call.pool.scales

    def attend(scales):
        of_scales = call.replace(pool=Pool(call.pool.kv, scales), out_dtype="float32")
        return np.asarray(KERNEL.tuned(num_workers=1)(of_scales).out)

    with interpreting():
        for factor in (2.0**-30, 2.0**30):
            assert (attend(scales.at[:, :, 1].multiply(factor)) == attend(scales) * factor).all()


@pytest.mark.parametrize("changes", [dict(scales=None), dict(scales="of one layer"), dict(pool="in 16 bits")])
def test_scales_that_do_not_fit_the_pool_are_refused(changes):
    call = make(Spec(rows=((5, 1),), codes="int8"))
    kv, scales, *_ = call.pool
    if "pool" in changes:
        kv = kv.astype("bfloat16")
    else:
        scales = scales[:, :1] if changes["scales"] else None
    with pytest.raises(ValueError, match="scales"):
        KERNEL(call.replace(pool=Pool(kv, scales)))

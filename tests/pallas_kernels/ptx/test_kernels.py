"""The Hopper kernels as they are compiled: their PTX, emulated on the CPU, against the references.

What jax's interpreter does not have is here: layouts and swizzles of shared memory, TMA boxes, descriptors and register
operands of wgmma, proxy fences. `make kernels` runs these tests; elsewhere they are skipped.
"""

import dataclasses

import numpy as np
import pytest

from pallas_kernels import ptx, reference
from pallas_kernels.arguments import SINKS, SMALL, TINY, TINY_QUANTISED, Spec, make
from pallas_kernels.hopper import decode as hopper_decode
from pallas_kernels.hopper import kv_write as hopper_kv_write
from pallas_kernels.hopper import prefill as hopper_prefill
from pallas_kernels.hopper.mass import probability_mass
from tests.pallas_kernels import contract
from tests.pallas_kernels.hopper import test_decode, test_kv_write, test_mass, test_prefill
from tests.pallas_kernels.ptx.plugin import needs_plugin

pytestmark = needs_plugin

# Heads of groups whose queries are no multiple of 8 rows, over all head dims.
GROUPS = [
    Spec(rows=((70, 1),), num_heads=n, num_kv_heads=1, head_dim=h, block_size=64, dtype=dtype, seed=n)
    for n, h, dtype in ((1, 128, "bfloat16"), (3, 96, "bfloat16"), (4, 128, "float16"), (7, 256, "bfloat16"))
]
DECODE = [*TINY, *TINY_QUANTISED, *test_decode.TWO_GROUPS, *GROUPS]
WIDE = Spec(rows=((290, 16),), q_tile=16, num_kv_heads=1, head_dim=256, block_size=64, pattern=SINKS, sink_logits=True)
# A single kv head is not taken on jax 0.10.
WRITES = [
    dataclasses.replace(case, heads=(6, 2, case.heads[2])) if case.heads[1] == 1 else case
    for case in test_kv_write.CASES
]
PREFILL = [*test_prefill.SPECS, WIDE]


def emulate(attend, spec: Spec, **tuning) -> None:
    """Holds attention in the emulator to the reference."""
    arguments, given = make(spec)
    arrays = {name: x for name, x in given.items() if hasattr(x, "shape")}
    rest = {name: x for name, x in given.items() if name not in arrays}
    actual = ptx.run(lambda args, arrays: attend(*args, **arrays, **rest, **tuning), arguments, arrays, seed=spec.seed)
    contract.compare(actual, spec)


@pytest.mark.parametrize("spec", DECODE, ids=str)
def test_attention_and_merge(spec):
    emulate(hopper_decode.ragged_paged_attention, spec, num_workers=3)


@pytest.mark.parametrize("registers", [True, False], ids=["weights in registers", "weights in shared memory"])
@pytest.mark.parametrize("spec", PREFILL, ids=str)
def test_prefill(spec, registers):
    emulate(hopper_prefill.ragged_paged_attention, spec, registers=registers)


@pytest.mark.parametrize("spec", test_mass.SPECS, ids=str)
def test_probability_mass(spec):
    arguments, given = test_mass.arguments_of(spec)
    arrays = {name: x for name, x in given.items() if hasattr(x, "shape")}
    rest = {name: x for name, x in given.items() if name not in arrays}
    actual = ptx.run(
        lambda args, arrays: probability_mass(*args, **arrays, **rest, num_workers=3), arguments, arrays, seed=spec.seed
    )
    expected = reference.probability_mass(*arguments, **given)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=test_mass.TOLERANCE)


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_write_of_keys_and_values(case):
    args, given = test_kv_write.make(case, np.random.default_rng(1))
    options = test_kv_write.options(case)
    actual = ptx.run(lambda args, given: hopper_kv_write.kv_write(*args, **given, **options), args, given)
    test_kv_write.compare(actual, case, args, given)


def test_float32_results_of_few_rows():
    spec = dataclasses.replace(GROUPS[2], dtype="bfloat16")
    arguments, given = make(spec)
    out = ptx.run(
        lambda *args: hopper_decode.ragged_paged_attention(*args, **given, num_workers=2, out_dtype=np.float32),
        *arguments,
    )
    assert out.dtype == np.float32
    contract.compare(out.astype("bfloat16"), spec)


@pytest.mark.soak
@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_attention_and_merge_of_longer_rows(spec):
    emulate(hopper_decode.ragged_paged_attention, spec, num_workers=5)


@pytest.mark.soak
@pytest.mark.parametrize("spec", [spec for spec in SMALL if spec.q_tile > 1], ids=str)
def test_prefill_of_longer_rows(spec):
    emulate(hopper_prefill.ragged_paged_attention, spec)

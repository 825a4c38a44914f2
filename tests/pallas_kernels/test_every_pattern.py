"""Every pattern of the engine in the kernels: the same numbers mean the same keys, and each kernel computes them."""

import dataclasses

import numpy as np
import pytest

from ksana_jax.ops.kernels import kernel_pattern
from pallas_kernels.arguments import Spec
from pallas_kernels.contract import Kernel
from pallas_kernels.patterns import Pattern
from pallas_kernels.registry import KERNELS
from tests.pallas_kernels.contract import check
from tests.pallas_kernels.interpreter import PARAMS, interpreting
from tests.patterns import MAX_ROTATED_SINKS, PATTERNS
from tests.reference import literal
from tests.soak import soak_unless

TRITON = {
    "decode": KERNELS["triton_decode"].tuned(interpret=True, num_workers=3),
    "ragged": KERNELS["triton_ragged"].tuned(interpret=True),
}
# Texts that go past the window and the highest ceiling. Specs that differ in their pattern alone share a compilation.
DECODE = Spec(rows=((75, 1), (0, 0), (17, 1)), head_dim=64, seed=50)
CHUNK = Spec(rows=((75, 9), (1, 1)), q_tile=4, head_dim=64, seed=51)


def numbers(name: str) -> Pattern:
    return Pattern(*(int(x) for x in kernel_pattern(PATTERNS[name].arrays())))


def spec_of(spec: Spec, name: str) -> Spec:
    """Sink queries are one for all sinks at "cache" positions, one for each sink at "ceiling" positions."""
    second = {"absolute": 0, "cache": 1, "ceiling": MAX_ROTATED_SINKS}[PATTERNS[name].sink_position]
    return dataclasses.replace(spec, pattern=numbers(name), sink_queries=second)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_kernels_pattern_shows_the_same_keys_and_repositions_the_same_sinks(name):
    i, j = np.arange(80)[:, None], np.arange(80)[None, :]
    visible, stands = literal(PATTERNS[name], i, j)
    seen = np.asarray(numbers(name).visible(i, j))
    repositioned = np.asarray(numbers(name).repositioned(i, j))
    assert (seen == visible).all()
    # A sink may be scored with the sink query where both queries stand at the same place.
    assert (repositioned | (stands == i) | ~seen).all()
    assert not (repositioned & (j >= PATTERNS[name].num_sinks)).any()


@pytest.mark.parametrize("kernel", TRITON)
@pytest.mark.parametrize("name", soak_unless(lambda name: name == "LM-Infinite", PATTERNS))
def test_triton_computes_every_pattern(kernel, name):
    check(TRITON[kernel], spec_of(DECODE if kernel == "decode" else CHUNK, name))


@pytest.mark.parametrize("name", soak_unless(lambda name: name == "dilated", PATTERNS))
def test_hopper_computes_every_pattern(name):
    tuned = KERNELS["hopper_decode"].tuned(interpret=PARAMS, num_workers=3)

    def attend(call, work, *, tuning):  # one of its own each time: jax 0.10's interpreter runs no program twice
        return tuned(call)

    with interpreting():
        check(Kernel(attend, None), spec_of(DECODE, name))

"""Probability mass per slot on Hopper, run by jax's interpreter of GPU programs on the CPU, against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.arguments import SINKS, SINKS_AT_CEILING, WINDOW, Spec, make
from pallas_kernels.contract import Call
from pallas_kernels.hopper import decode
from pallas_kernels.hopper.mass import probability_mass
from pallas_kernels.hopper.schedule import Tuning, schedule
from tests.pallas_kernels.interpreter import PARAMS, interpreting
from tests.soak import soak_unless

# Scores are sums of H products of 16 bits each, exact in float32 but for their order: a few 2^-24 of scores up to 10,
# in base 2. exp2 of the hardware is good to 2^-22; a slot gets at most the weights of a group's queries.
TOLERANCE = 5e-6

SPECS = (
    Spec(rows=((130, 1), (0, 0), (16, 1)), sink_logits=True),
    Spec(rows=((75, 9), (1, 1)), q_tile=4, pattern=WINDOW, evict_every=3, soft_cap=15.0, dtype="float16", seed=1),
    # 96 rows to a tile: two tiles of the kernel, of which the second is padded.
    Spec(
        rows=((140, 9), (70, 3)),
        q_tile=12,
        num_heads=8,
        num_kv_heads=1,
        head_dim=96,
        block_size=128,
        pattern=SINKS,
        seed=2,
    ),
    Spec(
        rows=((75, 5),),
        q_tile=4,
        num_heads=2,
        num_kv_heads=1,
        block_size=32,
        sink_queries=6,
        pattern=SINKS_AT_CEILING,
        seed=3,
    ),
)
# More than the pieces there are, few that share rows, and one that does everything.
WORKERS = (9, 3, 1, 2)


def arguments_of(spec: Spec) -> tuple[Call, jax.Array]:
    """A call and its log-sum-exp; where the seed is odd, queries count differently, a third of them not at all."""
    call = make(dataclasses.replace(spec, return_lse=True))
    if spec.seed % 2:
        rng = np.random.default_rng(spec.seed)
        factors = rng.uniform(0.1, 2, call.positions.shape) * (rng.random(call.positions.shape) < 2 / 3)
        call = call.replace(mass_factor=jnp.asarray(factors, jnp.float32))
    lse = reference.attend(call).lse
    assert lse is not None
    return call, lse


@pytest.mark.parametrize(
    ("spec", "num_workers"), soak_unless(lambda case: case[0] in SPECS[::3], list(zip(SPECS, WORKERS))), ids=str
)
def test_the_mass_of_each_slot_equals_the_reference_without_races(spec, num_workers):
    arguments = arguments_of(spec)
    with interpreting():
        actual = probability_mass(*arguments, tuning=Tuning(num_workers, interpret=PARAMS))
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, reference.probability_mass(*arguments), rtol=0, atol=TOLERANCE)


@pytest.mark.soak
@pytest.mark.soak
def test_masses_sum_to_one_for_each_query_and_head_with_the_work_list_of_the_attention():
    spec = Spec(rows=((85, 2), (0, 0), (3, 1)), q_tile=2, num_heads=6, head_dim=128, block_size=64, seed=4)
    call, tuning = make(dataclasses.replace(spec, return_lse=True)), Tuning(num_workers=2, interpret=PARAMS)
    work = schedule(call, tuning=tuning)
    with interpreting():
        lse = decode.attend(call, work, tuning=tuning).lse
        mass = probability_mass(call, lse, work, tuning=dataclasses.replace(tuning, stages=1))
    # Three query heads to a kv head.
    by_tile = [[3 * num_queries] * 2 for num_queries in (2, 0, 1)]
    np.testing.assert_allclose(mass.sum(axis=2), by_tile, rtol=0, atol=1e-4)


def test_queries_without_a_log_sum_exp_give_no_mass():
    call, lse = arguments_of(Spec(rows=((80, 1),), num_heads=2, num_kv_heads=1, block_size=64))
    lse = lse.at[:, :, 1].set(-jnp.inf)
    with interpreting():
        mass = probability_mass(call, lse, tuning=Tuning(num_workers=1, interpret=PARAMS))
    np.testing.assert_allclose(mass.sum(), 1, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Spec(rows=((5, 1),), head_dim=80), "head dim of 80"),
        (Spec(rows=((5, 1),), block_size=8), "blocks of 8 tokens"),
        (Spec(rows=((5, 1),), num_heads=130, num_kv_heads=1), "130 query heads to a kv head"),
        (Spec(rows=((5, 1),), dtype="float32"), "keys and values in float32"),
    ],
)
def test_what_the_kernel_lacks_is_named(spec, message):
    arguments = arguments_of(spec)
    with pytest.raises(NotImplementedError, match=message):
        probability_mass(*arguments, tuning=Tuning(interpret=PARAMS))

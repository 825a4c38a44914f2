"""A simulated engine takes the decisions of a real one; what differs is found."""

import numpy as np
import pytest

from ksana_jax.lab.simulator import measuring
from ksana_jax.lab.trace.differences import first_difference
from ksana_jax.serve.workload.items import WorkItem
from tests.fakes import VOCAB, make_engine
from tests.lab.trace.decisions import COMPARED, KINDS, POOLS, compare, workloads


def items(count=6):
    prompts = [np.random.default_rng(i).integers(3, VOCAB, 7 + i).astype(np.int32) for i in range(count)]
    return [
        WorkItem(i, 0.0, len(prompt), 12 + i, 12 + i, lambda prompt=prompt: prompt, lambda: None)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_simulated_engine_decides_as_the_one_whose_times_it_takes(ahead):
    engine = make_engine(num_blocks=12, caching=True, async_scheduling=ahead, eos_ids=(2,))
    real, simulated = ([s.plain() for s in made.steps] for made in compare(engine, items(), [0, 0, 1, 3, 9, 30]))
    assert engine.scheduler.num_preemptions and len(real) == len(engine.records) > 20
    assert first_difference(real, simulated, KINDS) is None
    assert first_difference(real, simulated, ["tokens"]) is not None  # answers of a simulation end with the model's eos
    simulated[9]["num_attended"] += 1
    found = first_difference(real, simulated, KINDS)
    assert found is not None and (found.step, found.kind) == (10, "num_attended")


@pytest.mark.soak
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("workload", ["short", "long", "shared prefix"])
def test_a_simulated_engine_decides_as_a_model_on_this_machine(pool, workload):
    engine = measuring.make_engine("ksana-tiny", **COMPARED, **POOLS[pool])
    items, due = workloads(engine.model.vocab_size)[workload]
    real, simulated = ([step.plain() for step in made.steps] for made in compare(engine, items, due))
    assert len(real) > 20 and first_difference(real, simulated, KINDS) is None

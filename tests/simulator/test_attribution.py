"""Seconds of a step that is submitted while the one before it runs."""

import pytest

from ksana_jax.simulator.attribution import beside_chunks, chunk_seconds
from ksana_jax.simulator.fit import fit
from ksana_jax.simulator.run import simulate
from ksana_jax.simulator.step_file import Steps, device_seconds, size_of
from tests.simulator.items import MODEL, config, drawn_items
from tests.simulator.test_costs import TRUE


def records_of(ahead: bool):
    return simulate(drawn_items(280, 40.0), MODEL, config(async_scheduling=ahead), TRUE).records


def mixed_up(records, share=0.5):
    """The records as they would be if a result were seen only after a part of the chunk behind it was computed."""
    found, seconds = list(records), device_seconds(records)
    for at in range(1, len(records)):
        overlaps = records[at].began_s < records[at - 1].ended_s
        if records[at].num_chunks and overlaps and not records[at - 1].num_chunks:
            found[at - 1] = found[at - 1]._replace(ended_s=found[at - 1].ended_s + share * seconds[at])
    return found


def test_a_chunk_gets_the_time_back_that_the_step_before_it_was_seen_to_take():
    records = mixed_up(records_of(True))
    sizes = [size_of(r) for r in records]
    true = [TRUE.seconds(size) for size in sizes]
    measured = device_seconds(records)
    found = chunk_seconds(records, measured, sizes, TRUE.seconds)
    chunks = [i for i, r in enumerate(records) if r.num_chunks]
    assert sum(measured[i] for i in chunks) < 0.9 * sum(true[i] for i in chunks)
    assert sum(found[i] for i in chunks) == pytest.approx(sum(true[i] for i in chunks), rel=0.01)


def test_costs_do_not_depend_on_how_often_chunks_come():
    cost = fit(Steps({}, mixed_up(records_of(True))))
    for chunks in (True, False):
        sizes = [size_of(r) for r in records_of(False) if (r.num_chunks > 0) == chunks]
        total, true = (sum(map(of.seconds, sizes)) for of in (cost, TRUE))
        assert total == pytest.approx(true, rel=0.01)


def test_steps_that_wait_for_each_other_keep_their_times():
    records = records_of(False)
    seconds = device_seconds(records)
    assert chunk_seconds(records, seconds, [size_of(r) for r in records], lambda size: 0.0) == seconds


def test_neighbours_of_chunks():
    records = [r._replace(num_chunks=n) for r, n in zip(records_of(False), (0, 0, 1, 0, 0), strict=False)]
    assert beside_chunks(records) == [False, True, False, True, False]

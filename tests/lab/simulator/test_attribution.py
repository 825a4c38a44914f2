"""Seconds of a step that is submitted while the one before it runs."""

import pytest

from ksana_jax.lab.simulator.fit import before_chunks, chunk_seconds, fit
from ksana_jax.lab.simulator.run import simulate
from ksana_jax.lab.simulator.step_times import device_seconds, sizes_of
from tests.lab.simulator.items import MODEL, config, drawn_items
from tests.lab.simulator.test_costs import TRUE


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
    sizes = sizes_of(records)
    true = [TRUE.seconds(size) for size in sizes]
    measured = device_seconds(records)
    found = chunk_seconds(records, measured, sizes, TRUE.seconds)
    chunks = [i for i, r in enumerate(records) if r.num_chunks]
    assert sum(measured[i] for i in chunks) < 0.9 * sum(true[i] for i in chunks)
    assert sum(found[i] for i in chunks) == pytest.approx(sum(true[i] for i in chunks), rel=0.01)


def test_costs_do_not_depend_on_how_often_chunks_come():
    cost = fit(mixed_up(records_of(True)))
    for chunks in (True, False):
        sizes = [size for size in sizes_of(records_of(False)) if (size.num_chunked > 0) == chunks]
        total, true = (sum(map(of.seconds, sizes)) for of in (cost, TRUE))
        assert total == pytest.approx(true, rel=0.01)


def test_steps_that_wait_for_each_other_keep_their_times():
    records = records_of(False)
    seconds = device_seconds(records)
    assert chunk_seconds(records, seconds, sizes_of(records), lambda size: 0.0) == seconds


def test_steps_before_chunks():
    records = [r._replace(num_chunks=n) for r, n in zip(records_of(False), (0, 0, 1, 0, 0), strict=False)]
    assert before_chunks(records) == [False, True, False, False, False]


def test_what_a_chunk_costs_the_step_after_it_is_found():
    records = records_of(False)
    longer, late_s = [], 0.0
    for record, size in zip(records, sizes_of(records), strict=True):
        late_s += 0.003 if size.after_chunk and not size.num_chunked else 0.0
        longer.append(record._replace(ended_s=record.ended_s + late_s, began_s=record.began_s + late_s))
        if size.after_chunk and not size.num_chunked:
            longer[-1] = longer[-1]._replace(began_s=record.began_s + late_s - 0.003)
    cost = fit(longer)
    assert cost.phases["decode"]["after_chunk"] == pytest.approx(0.003, rel=0.02)
    assert sum(map(cost.seconds, sizes_of(longer))) == pytest.approx(sum(device_seconds(longer)), rel=0.01)

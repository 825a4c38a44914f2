"""A trace shows the pools as they were after each step, whatever is left out between them."""

import numpy as np
import pytest

from ksana_jax.engine.inspect.pool_trace import CACHED, FREE, PoolTrace
from ksana_jax.engine.inspect.snapshot import take_snapshot
from tests.fakes import asking, make_engine, prompt_of, run, step


@pytest.fixture
def engine():
    return make_engine(num_blocks=12, host_slots=8, caching=True, preempt="swap", max_model_len=40)


def busy(engine):
    for seed in range(5):
        settings = {"n": 2, "temperature": 1.0, "seed": seed} if seed % 2 else {}
        engine.add_request(prompt_of(9 + seed, seed % 3), asking(12, **settings), request_id=f"r{seed}")


def seen_in(snapshot, trace, tier):
    """Owners and sharing as a column has them, from a snapshot."""
    first = [
        trace.requests[b.owners[0].request_id] if b.owners else CACHED if b.state == "cached" else FREE
        for b in snapshot.of(tier)
    ]
    return first, [b.ref_count > 1 for b in snapshot.of(tier)]


def test_each_column_is_what_a_snapshot_says(engine):
    trace = PoolTrace(engine, max_columns=1000)
    busy(engine)
    while engine.has_work:
        step(engine)
        snapshot, column = take_snapshot(engine), trace.columns[-1]
        summary = snapshot.summary()
        for tier, pool in column.pools.items():
            assert (pool.owners.tolist(), pool.shared.tolist()) == seen_in(snapshot, trace, tier)
            assert pool.held / len(pool.owners) == summary[tier]["utilisation"]
        assert column.pools["device"].fragmentation == pytest.approx(summary["fragmentation"])
        assert column.moved_bytes == summary["moved_bytes"]
    assert [c.step for c in trace.columns] == list(range(1, trace.num_steps + 1))
    assert [c.pools["device"].held for c in trace.columns] == [r.blocks_in_use for r in engine.records]
    assert engine.memory.counters.swapped_in and any(c.pools["host"].held for c in trace.columns)


def test_a_long_run_is_thinned_evenly_and_ends_with_its_last_step(engine):
    whole, thin = PoolTrace(engine, max_columns=1000), PoolTrace(engine, max_columns=4)
    busy(engine)
    for _ in range(30):
        step(engine)
        steps = [c.step for c in thin.columns]
        assert len(steps) <= 4 + 1 and steps[0] == 1 and steps[-1] == whole.num_steps
        assert len(set(np.diff(steps[:-1]))) <= 1
        for column in thin.columns:
            same = whole.columns[column.step - 1]
            assert (column.pools["device"].owners == same.pools["device"].owners).all()


def test_it_begins_anew_with_the_records(engine):
    trace = PoolTrace(engine)
    busy(engine)
    run(engine)
    before = engine.memory.counters.queried_tokens
    first = trace.counters
    assert first["queried_tokens"] == before > 0
    engine.records.clear()
    engine.add_request(prompt_of(9), asking(3), request_id="later")
    run(engine)
    # 9 + 2 tokens are computed or found, in three blocks and three steps.
    assert trace.counters["queried_tokens"] == 9 and engine.memory.counters.queried_tokens == before + 9
    assert sum(trace.num_blocks_by_origin.values()) == 3
    assert trace.requests == {"later": 0} and trace.num_steps == len(engine.records) == 3
    assert trace.columns[0].time_s == 0


def test_watching_changes_nothing(engine):
    other = make_engine(num_blocks=12, host_slots=8, caching=True, preempt="swap", max_model_len=40)
    PoolTrace(engine)
    texts = []
    for each in (engine, other):
        busy(each)
        requests = list(each.requests.values())
        run(each)
        texts.append([c.token_ids for r in requests for c in r.output().outputs])
    assert texts[0] == texts[1]
    assert [r[1:] for r in engine.records] == [r[1:] for r in other.records]

"""A snapshot states every block's place, owner and content; its numbers add up."""

import dataclasses

import numpy as np
import pytest

from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.engine.inspect.snapshot import STATES, BlockRecord, Ownership, Snapshot, snapshot_of, take_snapshot
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import memory_owners, moving_blocks
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.tier import DEVICE, HOST
from tests.fake_pool import StoringExecutor
from tests.fakes import asking, make_engine, prompt_of, step


def assert_adds_up(engine):
    """Compares a snapshot with the books and with each running row's computed tokens."""
    memory, snapshot = engine.memory, take_snapshot(engine)
    summary = snapshot.summary()
    for name, tier in (("device", memory.device), ("host", memory.host)):
        if tier is None:
            assert name not in summary
            continue
        blocks = snapshot.of(name)
        assert [b.block for b in blocks] == list(range(tier.pool.num_blocks))
        assert [len(b.owners) for b in blocks] == [b.ref_count for b in blocks] == tier.pool.ref_count.tolist()
        assert sum(summary[name][state] for state in STATES) == summary[name]["blocks"] == tier.pool.num_blocks
        assert summary[name]["free"] == tier.pool.num_free
        assert summary[name]["cached"] <= tier.pool.num_idle
        assert {b.block: b.hash for b in blocks if b.hash} == {i: n.key.hex() for i, n in tier.node_of.items()}
    scheduler = engine.scheduler
    assert summary["unshared_blocks"] == sum(summary["blocks_by_origin"].values())
    rows = scheduler.rows
    for row in scheduler.order:
        seq = rows.seqs[row]
        mine = [
            b
            for b in snapshot.of_request(seq.request_id)
            if b.tier == "device"
            if any(o.index == seq.index and o.doing == "runs" for o in b.owners)
        ]
        assert [b.block for b in mine] == rows.block_ids(row).tolist()
        assert [b.start for b in mine] == rows.of_blocks(rows.block_starts, row).tolist()
        done = int(rows.num_computed[row])
        for b in mine:
            here = min(max(done - b.start, 0), snapshot.block_size)
            assert b.num_tokens == here or (b.num_tokens > here and b.ref_count > 1)
    return summary


@pytest.mark.parametrize("seed", range(6))
def test_owners_are_those_of_the_books_after_every_step(seed):
    rng = np.random.default_rng(seed)
    full = bool(seed % 2)
    engine = make_engine(
        (FULL, FULL) if full else (AttentionPattern(window=6, num_sinks=2),) * 2,
        num_blocks=22 if full else 16,
        host_slots=10 * (seed > 1),
        caching=seed != 0,
        preempt="swap",
        max_num_batched_tokens=12,
        max_model_len=40,
    )
    utilisations, shared, at = [], False, 0
    kinds = [{"beam_width": 3}, {"n": 3, "temperature": 1.0, "seed": seed}, {}]
    while at < 40 or engine.has_work:
        if at % 3 == 0 and at < 40:
            prompt = prompt_of(int(rng.integers(5, 18)), int(rng.integers(0, 3)))
            engine.add_request(prompt, asking(8, **kinds[rng.integers(0, 3)]))
        if rng.random() < 0.1 and engine.requests:
            engine.abort(next(iter(engine.requests)))
        step(engine)
        at += 1
        summary = assert_adds_up(engine)
        utilisations.append(summary["device"]["utilisation"])
        shared |= summary["shared_saving"] > 0
    assert max(utilisations) > 0.5 and shared and utilisations[-1] == 0


def test_a_block_says_what_it_holds():
    engine = make_engine(num_blocks=6, caching=True)
    engine.add_request(prompt_of(9), asking(4), request_id="mine")
    step(engine)
    full, second, last, *rest = take_snapshot(engine).blocks
    node = engine.memory.device.node_of[0]
    own = (Ownership("mine", 0, "runs", "computed"),)
    # Nine tokens in blocks of four: two full ones, which are indexed, and one token in the third.
    assert full == BlockRecord("device", 0, "held", 1, own, node.key.hex(), 0, 4, node.last_use)
    assert (second.start, second.num_tokens, second.hash is None) == (4, 4, False)
    assert last == BlockRecord("device", 2, "held", 1, own, None, 8, 1, None)
    assert rest == [BlockRecord("device", i, "free") for i in (3, 4, 5)]


def test_fragmentation_is_the_waste_in_last_blocks():
    engine = make_engine(num_blocks=8)
    engine.add_request(prompt_of(9), asking(4))
    step(engine)
    assert take_snapshot(engine).summary()["fragmentation"] == 1 - 9 / 12
    engine.abort("request-0")
    assert take_snapshot(engine).summary()["fragmentation"] == 0


def test_a_windows_blocks_keep_their_text_positions():
    engine = make_engine((AttentionPattern(window=4, num_sinks=1),) * 2, num_blocks=8, max_num_batched_tokens=4)
    engine.add_request(prompt_of(20), asking(8), request_id="long")
    for _ in range(7):
        step(engine)
    starts = [b.start for b in take_snapshot(engine).of_request("long")]
    assert starts[0] == 0 and starts[1] >= 16  # the sink's block, then the window's


@pytest.mark.parametrize("waits", [False, True])
def test_blocks_of_a_row_that_evicted_say_where_in_the_cache_their_tokens_are(waits):
    stored = {"kv_eviction": {"method": "window", "budget": 6, "interval": 4, "prompts": "streamed"}}
    settings = {"num_blocks": 8, "host_slots": 8, "preempt": "swap"}
    engine = make_engine(stored=stored, make_executor=StoringExecutor, **settings)
    engine.add_request(prompt_of(20), asking(8), request_id="evicting")
    for _ in range(6):
        step(engine)
    if waits:
        engine.scheduler._preempt(0)
    blocks = take_snapshot(engine).of_request("evicting")
    assert {b.tier for b in blocks} == {"host" if waits else "device"}
    assert [(b.start, b.num_tokens) for b in blocks] == [(0, 4), (4, 1)]  # of 21 tokens, 16 went in fours


def test_who_waits_is_an_owner_too():
    engine = make_engine(num_blocks=6, host_slots=6, preempt="swap", max_model_len=24)
    for _ in range(2):
        engine.add_request(prompt_of(8, _), asking(16), request_id=f"r{_}")
    while not engine.scheduler.num_preemptions:
        step(engine)
    blocks = take_snapshot(engine).of_request("r1")
    assert {b.tier for b in blocks} == {"host"}
    assert {o for b in blocks for o in b.owners} == {Ownership("r1", 0, "waits", "swapped")}
    assert [b.start for b in blocks] == [0, 4, 8][: len(blocks)]


def test_a_block_whose_content_is_to_come_is_moving():
    memory = KVMemory(4, PrefixIndex(4), host_data=np.zeros((4, 1), np.float32))
    ids = memory.device.allocate(2)
    slots = memory.swap.move_out(ids)
    assert [b.state for b in snapshot_of(memory, memory_owners(memory)).of("host")] == ["moving"] * 2 + ["free"] * 2
    memory.take_moves()
    memory.commit()
    memory.device.release(ids)
    assert [b.state for b in snapshot_of(memory, memory_owners(memory)).of("host")] == ["held", "held", "free", "free"]
    memory.swap.move_in(slots)
    device, host = (snapshot_of(memory, memory_owners(memory)).of(tier) for tier in ("device", "host"))
    assert [b.state for b in device] == ["moving", "moving", "free", "free"]
    # Until the copy is made, the slots belong to the move.
    assert [b.owners for b in host[:2]] == [(Ownership("", 0, "moves", None),)] * 2
    assert moving_blocks(memory, DEVICE) == {0, 1} and moving_blocks(memory, HOST) == set()


def test_numbers_by_hand():
    a, b = (Ownership(name, 0, "runs", "computed") for name in "ab")
    blocks = [
        BlockRecord("device", 0, "held", 2, (a, b._replace(origin="shared")), "00", 0, 4, 7),
        BlockRecord("device", 1, "held", 1, (a,), None, 4, 2),
        BlockRecord("device", 2, "cached", 0, (), "01", 0, 4, 3),
        BlockRecord("device", 3, "free"),
        BlockRecord("disk", 0, "cached", hash="02", start=8, num_tokens=4),
    ]
    names = (
        "queried_tokens hit_tokens hits_device hits_host hits_disk saved loaded copied disk_written disk_read".split()
    )
    counters = dict(zip(names, (40, 10, 2, 1, 0, 5, 3, 1, 4, 2), strict=True))
    assert Snapshot(4, 100, blocks, counters).summary() == {
        "device": {"blocks": 4, "free": 1, "held": 2, "cached": 1, "moving": 0, "utilisation": 0.5},
        "disk": {"blocks": 1, "free": 0, "held": 0, "cached": 1, "moving": 0, "utilisation": 0.0},
        "fragmentation": 0.25,
        "unshared_blocks": 3,
        "shared_saving": pytest.approx(1 / 3),
        "blocks_by_origin": {"computed": 2, "shared": 1},
        "hit_rate": 0.25,
        "hit_blocks": {"device": 2, "host": 1, "disk": 0},
        "moved_bytes": {
            "device to host": 500,
            "host to device": 300,
            "within device": 100,
            "host to disk": 400,
            "disk to host": 200,
        },
    }


def test_as_text_each_block_in_use_has_a_line():
    engine = make_engine(num_blocks=6, caching=True)
    engine.add_request(prompt_of(5), asking(4, n=2, temperature=1.0, seed=0), request_id="r")
    while engine.scheduler.waiting or not engine.records:
        step(engine)
    lines = str(take_snapshot(engine)).splitlines()
    assert "r/0 (computed), r/1 (shared)" in lines[1] and "0+4" in lines[1]
    assert lines[-1] == "free: 3 of the device"
    assert len(lines) == 5


def test_it_is_a_picture_of_one_moment():
    engine = make_engine(num_blocks=8, caching=True)
    engine.add_request(prompt_of(9), asking(4))
    step(engine)
    snapshot = take_snapshot(engine)
    before = dataclasses.replace(snapshot, blocks=list(snapshot.blocks), counters=dict(snapshot.counters))
    while engine.has_work:
        step(engine)
    assert snapshot == before != take_snapshot(engine)

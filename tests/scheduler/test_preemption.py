"""A preempted sequence is computed again from its start and gives the same; the oldest is never preempted."""

import pytest

from tests.expected import expect_reference
from tests.fakes import FULLY, SINKS, make_engine, run, step
from tests.scheduler.requests import add, tokens_of, watch_batches


def test_a_preempted_sequence_with_output_is_computed_in_chunks_from_its_start():
    # Class of bug: prefill inferred from "no output yet", which is wrong after a preemption.
    engine = make_engine(num_blocks=7, max_num_batched_tokens=8)
    old, new = add(engine, 8, 20), add(engine, 7, 13)
    batches = watch_batches(engine)
    [seq] = [c.seq for c in new.completions]
    generated, preempted = 0, 0
    while seq.finish_reason is None:
        step(engine)
        if seq.num_preemptions > preempted:
            preempted, generated = seq.num_preemptions, len(seq.token_ids) - seq.num_prompt
            del batches[:]
    assert generated > 1
    # Since the last preemption: chunks of 7 beside a decoding row or 8 alone, then one by one to the last but one.
    counts = [batch[seq] for batch in batches if seq in batch]
    first_single = counts.index(1)
    assert counts[0] in (7, 8) and max(counts) <= 8 and set(counts[first_single:]) == {1}
    assert sum(counts[:first_single]) == seq.num_prompt + generated
    assert sum(counts) == seq.num_prompt + seq.params.max_tokens - 1
    expect_reference([old, new])


def test_a_row_scheduled_first_and_preempted_in_the_same_step_is_not_in_the_batch():
    # Class of bug: state read before something in the same schedule() changes it.
    engine = make_engine(num_blocks=4, max_num_batched_tokens=4, policy="shortest_first")
    long = add(engine, 8, 5)  # which ends in its third block, so that nothing stays free for it
    while len(engine.records) < 3:
        step(engine)  # two chunks of the prompt, then a token of decode in the third block
    short = add(engine, 7, 5)
    step(engine), step(engine)  # three tokens of the short one's prompt, and the one for which its block has room
    batches = watch_batches(engine)
    [long_seq], [short_seq] = [c.seq for c in long.completions], [c.seq for c in short.completions]
    # Both run; the long one decodes, and decoding rows are chosen first. The short one's next chunk takes its blocks.
    assert [engine.scheduler.rows.seqs[row] for row in engine.scheduler.order] == [short_seq, long_seq]
    assert engine.scheduler.blocks.num_free == 0
    before = tokens_so_far(engine, long_seq)
    step(engine)
    assert batches == [{short_seq: 3}]
    assert long_seq.row is None and long_seq.num_preemptions == 1
    assert long_seq.token_ids.tolist() == before
    run(engine)
    expect_reference([long, short])


def tokens_so_far(engine, seq) -> list[int]:
    rows = engine.scheduler.rows
    return rows.token_ids[seq.row, : rows.num_tokens[seq.row]].tolist()


@pytest.mark.parametrize("budget", [2, 3, 16])
def test_after_a_preemption_all_generated_tokens_are_recomputed_and_kept(budget):
    # Class of bug: the token that a second prefill ends with is dropped, or sampled twice.
    engine = make_engine(num_blocks=7, max_num_batched_tokens=budget, max_num_seqs=3)
    requests = [add(engine, 5, 16, seed=s) for s in range(3)]
    run(engine)
    assert any(r.metrics.num_preemptions for r in requests)
    assert [len(tokens_of(r)) for r in requests] == [16] * 3
    expect_reference(requests)


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_no_token_is_dropped_when_a_text_is_computed_again(preempt):
    # Class of bug: the token that a second prefill ends with is dropped.
    engine = make_engine(num_blocks=7, caching=True, host_slots=8, preempt=preempt, max_num_seqs=3)
    requests = [add(engine, 5, 16, seed=s) for s in range(3)]
    run(engine)
    assert any(r.metrics.num_preemptions for r in requests)
    assert bool(engine.memory.counters.swapped_in) == (preempt == "swap")
    assert all(len(r.output().outputs[0].token_ids) == 16 for r in requests)
    expect_reference(requests)


@pytest.mark.parametrize("policy", ["fcfs", "shortest_first", "fewest_tokens_left"])
@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks"])
def test_preempted_sequence_continues_with_the_same_tokens(policy, patterns):
    texts = []
    for num_blocks in (64, 8):
        engine = make_engine(patterns, num_blocks=num_blocks, block_size=2, policy=policy, max_model_len=16)
        requests = [add(engine, 3 + s, 8, seed=s) for s in range(5)]
        run(engine)
        texts.append([tokens_of(r) for r in requests])
        assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 8)
        expect_reference(requests, patterns)
    assert texts[0] == texts[1]


def test_a_pool_that_holds_one_sequence_serves_many_by_preempting_at_every_turn():
    engine = make_engine(num_blocks=15, block_size=1, max_model_len=16, max_num_batched_tokens=64)
    requests = [add(engine, 4, 12, seed=s) for s in range(6)]
    run(engine)
    # Every sequence but the first is in the way of one before it.
    assert [r.metrics.num_preemptions > 0 for r in requests] == [False] + [True] * 5
    expect_reference(requests)


def test_oldest_is_never_preempted_by_a_newer_one():
    engine = make_engine(num_blocks=9, block_size=2, max_num_batched_tokens=6, max_model_len=18)
    requests, last_running = [], set()
    for turn in range(60):
        if turn % 3 == 0:
            requests.append(add(engine, 2 + turn % 7, 9, seed=turn))
        step(engine)
        running = {engine.scheduler.rows.seqs[row].seq_id for row in engine.scheduler.order}
        waiting = {seq_id for _, seq_id, _ in engine.scheduler.waiting}
        assert not running or not waiting or max(running) < min(waiting)
        if last_running & waiting:
            assert min(last_running) not in waiting
        last_running = running
    run(engine)
    assert engine.scheduler.num_preemptions > 5
    expect_reference(requests)

"""What runs, who waits, who is preempted, and that nobody's text changes by it."""

import pytest

from ksana_jax.patterns import AttentionPattern
from ksana_jax.request import FinishReason
from ksana_jax.step.contract import Part
from tests.expected import expect_reference
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens, run, step, two_layers

SINKS = two_layers(AttentionPattern(window=6, num_sinks=2))


def add(engine, length: int, max_tokens: int = 8, seed: int = 0, **settings):
    return engine.add_request(prompt_of(length, seed), asking(max_tokens, **settings))


def tokens_of(request) -> list[int]:
    return request.output().outputs[0].token_ids


def watch_batches(engine) -> list:
    """Batches as they are scheduled: (their rows' sequences, tokens of each)."""
    scheduler, seen = engine.scheduler, []
    schedule = scheduler.schedule

    def watched():
        batch = schedule()
        if batch is not None:
            seqs = [scheduler.rows.seqs[row] for row in batch.rows]
            seen.append(dict(zip(seqs, batch.num_per_row.tolist(), strict=True)))
            assert len(seen[-1]) == len(batch.rows), "a row is scheduled twice"
        return batch

    scheduler.schedule = watched
    return seen


# ------------------------------------------------------------------ five classes of bugs that schedulers have had


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


@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks"])
@pytest.mark.parametrize("num_blocks", [7, 64])
def test_every_scheduled_row_computes_at_least_one_token(patterns, num_blocks):
    # Class of bug: a zero-length query, once all of a prompt is found in the cache.
    engine = make_engine(patterns, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=8)
    batches = watch_batches(engine)
    # Prompts that fill blocks and budgets exactly, and others.
    requests = [add(engine, length, 9, seed=length) for length in (4, 8, 16, 1, 7, 12)]
    run(engine)
    assert all(count >= 1 for batch in batches for count in batch.values())
    assert all(1 <= sum(batch.values()) <= 8 for batch in batches)
    expect_reference(requests, patterns)


@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks"])
def test_a_reused_block_never_shows_what_it_held_before(patterns):
    # Class of bug: a stale hash survives the reuse of its block. The executor's slots are not cleared here.
    engine = make_engine(patterns, num_blocks=4, max_num_seqs=1)
    held: list[set[int]] = []
    requests = [add(engine, 9, 8, seed=1), add(engine, 9, 8, seed=2), add(engine, 3, 6, seed=3)]
    for request in requests:
        held.append(set())
        while not request.finished:
            engine.step()
            row = request.completions[0].seq.row
            held[-1] |= set() if row is None else set(engine.scheduler.rows.block_ids(row).tolist())
    assert held[0] & held[1] and held[1] & held[2]
    expect_reference(requests, patterns)


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


# ------------------------------------------------------------------ preemption


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


# ------------------------------------------------------------------ order


@pytest.mark.parametrize(
    ("policy", "served"),
    [("fcfs", [0, 1, 2, 3]), ("shortest_first", [1, 3, 2, 0]), ("fewest_tokens_left", [3, 2, 0, 1])],
)
def test_policies_serve_in_their_order(policy, served):
    engine = make_engine(policy=policy, max_num_seqs=1)
    # Prompt and output, in tokens; where a policy sees no difference, who came first is first.
    requests = [add(engine, length, count) for length, count in ((9, 4), (3, 20), (6, 6), (3, 2))]
    batches = watch_batches(engine)
    run(engine)
    order = list(dict.fromkeys(seq.seq_id for batch in batches for seq in batch))
    assert order == served
    expect_reference(requests)


def test_a_shorter_request_that_arrives_late_is_served_before_longer_ones_that_wait():
    engine = make_engine(policy="shortest_first", max_num_seqs=1)
    running, long, short = add(engine, 5), add(engine, 9), None
    step(engine)
    short = add(engine, 2)
    run(engine)
    assert running.metrics.finished_s < short.metrics.finished_s < long.metrics.finished_s


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="policy is 'lifo', must be one of fcfs, shortest_first, fewest_tokens_left"):
        make_engine(policy="lifo")


# ------------------------------------------------------------------ budgets


@pytest.mark.parametrize("budget", [1, 2, 5, 16, 100])
def test_text_does_not_depend_on_the_token_budget(budget):
    engine = make_engine(SINKS, max_num_batched_tokens=budget)
    requests = [add(engine, length, 10, seed=length) for length in (1, 5, 30, 17)]
    batches = watch_batches(engine)
    run(engine)
    assert max(sum(batch.values()) for batch in batches) <= budget
    assert max(len(batch) for batch in batches) <= min(4, budget)
    expect_reference(requests, SINKS)


def test_prompts_are_packed_into_one_step_and_join_rows_that_decode():
    engine = make_engine(max_num_batched_tokens=16, query_tile=4)
    batches = watch_batches(engine)
    first = add(engine, 4)
    step(engine)
    others = [add(engine, length, seed=length) for length in (4, 6)]
    step(engine)
    seqs = [r.completions[0].seq for r in (first, *others)]
    assert batches == [{seqs[0]: 4}, {seqs[0]: 1, seqs[1]: 4, seqs[2]: 6}]


def test_a_step_of_short_prompts_is_limited_by_its_tokens():
    engine = make_engine(num_blocks=300, max_num_seqs=80, max_num_batched_tokens=512, query_tile=32)
    requests = [add(engine, 8, 2, seed=seed) for seed in range(80)]
    batches = watch_batches(engine)
    step(engine)
    assert list(batches[0].values()) == [8] * 64
    assert engine.executor.steps[0].shape.parts == (Part(80, 1), Part(64, 8))
    run(engine)
    expect_reference(requests)


def test_long_prompts_fill_wide_tiles_and_short_ones_what_is_left():
    engine = make_engine(num_blocks=300, max_num_seqs=80, max_num_batched_tokens=64, query_tile=32)
    requests = [add(engine, length, 2, seed=length) for length in (33, 6, 30)]
    batches = watch_batches(engine)
    step(engine)
    # In tiles of 32 there is no room for 6 beside 33, in tiles of 8 there is; 30 would be cut to 16.
    assert list(batches[0].values()) == [33, 6]
    assert engine.executor.steps[0].shape.parts[-1] == Part(8, 8)
    step(engine)
    assert list(batches[1].values()) == [1, 1, 30]
    assert engine.executor.steps[1].shape.parts[-1] == Part(1, 32)
    run(engine)
    expect_reference(requests)


@pytest.mark.parametrize("budget", [1, 13])
def test_a_prompt_of_one_token_waits_for_no_tile(budget):
    engine = make_engine(max_num_batched_tokens=budget, query_tile=4)
    requests = [add(engine, length, 2, seed=length) for length in ((9, 2, 1) if budget > 1 else (1,))]
    batches = watch_batches(engine)
    step(engine)
    assert sorted(batches[0].values()) == ([1, 2, 9] if budget > 1 else [1])
    run(engine)
    expect_reference(requests)


def test_a_request_waits_until_its_first_chunk_fits_beside_those_that_run():
    engine = make_engine(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    first, second = add(engine, 16, 2), add(engine, 12, 2)
    step(engine)
    assert second.completions[0].seq.row is None  # 3 blocks are needed, 2 are free
    run(engine)
    assert not engine.scheduler.num_preemptions
    expect_reference([first, second])


@pytest.mark.parametrize(("max_tokens", "starts"), [(9, False), (5, True)])
def test_a_request_waits_while_it_would_take_the_next_block_of_one_that_runs(max_tokens, starts):
    engine = make_engine(num_blocks=6, max_num_batched_tokens=64)
    first = add(engine, 8, max_tokens)
    step(engine)
    second = add(engine, 12, 2)  # 3 blocks of the 3 that are free when the first one has taken its third
    step(engine)
    assert (second.completions[0].seq.row is not None) == starts
    run(engine)
    assert not engine.scheduler.num_preemptions
    expect_reference([first, second])


def test_a_windowed_text_of_any_length_needs_no_more_blocks_than_its_window():
    engine = make_engine(SINKS, num_blocks=4, block_size=4, max_model_len=400, max_num_batched_tokens=7)
    request = add(engine, 300, 90)
    run(engine)
    assert max(r.blocks_in_use for r in engine.records) <= 1 + 2 + 1
    assert max(r.peak_blocks for r in engine.records) <= 4
    expect_reference([request], SINKS)


# ------------------------------------------------------------------ refusals and the end


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = make_engine(num_blocks=5, block_size=4)
    # Of 21 tokens, 20 are computed: five blocks. The 22nd would need another.
    add(engine, 3, 18)
    with pytest.raises(ValueError, match="3 tokens and max_tokens 19 need 6 KV blocks of 4 tokens, the pool has 5"):
        add(engine, 3, 19)
    assert len(engine.requests) == len(engine.scheduler.waiting) == 1


def test_the_largest_request_that_is_accepted_also_finishes():
    engine = make_engine(num_blocks=5, block_size=4)
    request = add(engine, 3, 18)
    run(engine)
    assert max(r.peak_blocks for r in engine.records) == 5
    expect_reference([request])


def stopped_in(state: str):
    """An engine in which a request is in some state, and that request."""
    engine = make_engine(num_blocks=7, max_num_batched_tokens=8)
    others = [add(engine, 8, 20, seed=1)]
    request = add(engine, 7, 12)
    seq, rows = request.completions[0].seq, engine.scheduler.rows
    reached = {
        "waiting": lambda: True,
        "part of its prompt computed": lambda: seq.row is not None and 0 < rows.num_computed[seq.row] < 7,
        "decoding": lambda: seq.row is not None and rows.num_tokens[seq.row] > 9,
        "preempted": lambda: seq.num_preemptions and seq.row is None,
        "computed again": lambda: seq.num_preemptions and seq.row is not None,
        "finished": lambda: request.finished,
    }[state]
    if state == "part of its prompt computed":
        engine.scheduler.max_num_batched_tokens = 5
        step(engine)
        step(engine)
    while not reached():
        step(engine)
    return engine, request, others


STATES = ["waiting", "part of its prompt computed", "decoding", "preempted", "computed again", "finished"]


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state_leaks_nothing_and_leaves_the_others_alone(state):
    engine, request, others = stopped_in(state)
    engine.abort(request.request_id)
    engine.scheduler.check()
    engine.abort(request.request_id)  # again, and by a name that nobody has
    engine.abort("nobody")
    reason = FinishReason.LENGTH if state == "finished" else FinishReason.ABORT
    assert request.output().outputs[0].finish_reason is reason and request.finished
    got = tokens_of(request)
    assert got == reference_tokens(request.prompt_token_ids, 12, FULLY)[: len(got)]
    assert len(got) == {"waiting": 0, "part of its prompt computed": 0, "finished": 12}.get(state, len(got))
    run(engine)
    assert engine.scheduler.blocks.num_used == 0 and not engine.requests
    expect_reference(others)


def test_a_request_aborted_while_it_waits_is_never_computed():
    engine = make_engine(max_num_seqs=1)
    batches = watch_batches(engine)
    first, second, third = (add(engine, 5, seed=s) for s in range(3))
    engine.step()
    engine.abort(second.request_id)
    run(engine)
    assert {seq.seq_id for batch in batches for seq in batch} == {0, 2}
    expect_reference([first, third])


def test_the_pattern_does_not_change_under_a_running_sequence():
    engine = make_engine()
    add(engine, 5)
    with pytest.raises(AssertionError, match="cannot change"):
        engine.scheduler.set_layout(engine.scheduler.layout.with_patterns(SINKS))


@pytest.mark.parametrize("harm", ["a block lost", "a block held twice", "blocks out of order", "a visible block gone"])
def test_check_sees_books_that_are_wrong(harm):
    engine = make_engine(num_blocks=8)
    add(engine, 9, seed=1), add(engine, 9, seed=2)
    step(engine), step(engine)
    scheduler, rows = engine.scheduler, engine.scheduler.rows
    one, other = scheduler.order
    scheduler.check()
    if harm == "a block lost":
        rows.num_blocks[0, one] -= 1
    elif harm == "a block held twice":
        rows.block_tables[0, one, 0] = rows.block_tables[0, other, 0]
    elif harm == "blocks out of order":
        rows.block_starts[0, one, :2] = rows.block_starts[0, one, 1::-1]
    else:
        scheduler.blocks.release(rows.block_tables[0, one, :1])
        for column in (rows.block_tables, rows.block_starts):
            column[0, one, :2] = column[0, one, 1:3]
        rows.num_blocks[0, one] -= 1
    with pytest.raises(AssertionError):
        scheduler.check()

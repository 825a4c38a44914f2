"""Order of service, aborts in every state, refusals, and the check of the books."""

import pytest

from ksana_jax.core.request import FinishReason
from tests.expected import expect_reference
from tests.fakes import FULLY, SINKS, make_engine, reference_tokens, run, step
from tests.scheduler.requests import add, tokens_of, watch_batches


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


HARMS = ["a block lost", "a block held twice", "blocks out of order", "a visible block gone", "blocks miscounted"]


@pytest.mark.parametrize("harm", HARMS)
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
    elif harm == "blocks miscounted":
        scheduler.row_blocks.num_ahead += 1
    else:
        scheduler.blocks.release(rows.block_tables[0, one, :1])
        for column in (rows.block_tables, rows.block_starts):
            column[0, one, :2] = column[0, one, 1:3]
        rows.num_blocks[0, one] -= 1
    with pytest.raises(AssertionError):
        scheduler.check()

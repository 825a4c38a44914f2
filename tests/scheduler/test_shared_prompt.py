"""Completions of one prompt share its blocks: each counts once and is freed by its last owner."""

import pytest

from ksana_jax.core.request import FinishReason
from tests.expected import expect_reference
from tests.fakes import FULLY, make_engine, prompt_of, reference_tokens, run, step
from tests.guessing import ANSWERS
from tests.scheduler.requests import add, expect_empty


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_the_last_owner_frees_what_many_have_shared(caching, num_blocks):
    engine = make_engine(num_blocks=num_blocks, caching=caching, max_num_seqs=6)
    requests = [add(engine, length, 9, n=n) for n, length in ((4, 11), (1, 11), (3, 8), (2, 17))]
    usages = []
    while engine.has_work:
        step(engine)
        last = engine.records[-1]
        usages.append(max(last.blocks_in_use, last.peak_blocks) / num_blocks)
        assert last.cached_blocks + last.blocks_in_use <= num_blocks
    assert 0 < max(usages) <= 1
    expect_reference(requests)
    expect_empty(engine)


def test_shared_blocks_count_once_beside_what_they_would_be_unshared():
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=64)
    add(engine, 16, 4, n=4, temperature=1)
    run(engine)
    # Three full blocks of the prompt in common, then one block each for its end and a token.
    both = [(r.peak_blocks, r.unshared_blocks) for r in engine.records if r.num_running == 4]
    assert (3 + 4 + 4, 20) in both and max(engine.records, key=lambda r: r.peak_blocks).peak_blocks == 11


@pytest.mark.parametrize("leader_goes", [True, False])
def test_completions_whose_leader_ends_before_its_prompt_is_computed_still_run_or_end(leader_goes):
    engine = make_engine(caching=True, max_num_batched_tokens=4)
    request = add(engine, 14, 5, n=3)
    step(engine)
    seqs = [c.seq for c in request.completions]
    if leader_goes:
        engine.scheduler.finish(seqs[0], FinishReason.ABORT)
        run(engine)
        expected = reference_tokens(prompt_of(14), 5, FULLY)
        assert [c.token_ids for c in request.output().outputs] == [[], expected, expected]
    else:
        engine.abort(request.request_id)
    assert all(seq.finish_reason is not None for seq in seqs)
    expect_empty(engine)


def test_completions_part_from_a_leader_whose_first_step_accepts_drafts(monkeypatch):
    guessing = {"method": "tests.guessing:Guessing", "num_speculative_tokens": 7}
    engine = make_engine(caching=True, max_num_batched_tokens=8, speculative_config=guessing)
    request, prompt = add(engine, 9, 12, n=3, temperature=1), prompt_of(9)
    seeds = [c.seq.seed for c in request.completions]
    answers = [reference_tokens(prompt, 12, FULLY, seed=seed) for seed in seeds]
    monkeypatch.setitem(ANSWERS, prompt.tobytes(), answers)
    run(engine)
    assert engine.scheduler.speculation.counts.num_accepted_tokens > 0
    assert [c.token_ids for c in request.output().outputs] == answers
    expect_empty(engine)

"""Several decode steps in one call give the tokens of single steps, and requests that end within leave nothing."""

import numpy as np
import pytest

from ksana_jax.core.request import FinishReason
from tests.engine.test_one_step_ahead import WAITS, expected, tokens_of
from tests.fakes import FULLY, SINKS, asking, make_engine, prompt_of, reference_tokens, run, step

BOTH = pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "ahead"])


def several(k: int = 4, **settings):
    return make_engine(num_scheduler_steps=k, **settings)


@BOTH
def test_calls_take_as_many_steps_as_asked_for_and_the_rest_is_computed_one_by_one(ahead):
    engine = several(4, async_scheduling=ahead)
    request = engine.add_request(prompt_of(5), asking(24))
    run(engine)
    # The prompt, five calls of four decodes, and three more.
    assert engine.executor.num_calls_together == 5 and len(engine.executor.steps) == len(engine.records) == 24
    assert tokens_of(request) == expected(request, 24)


@BOTH
def test_tokens_are_reported_step_by_step_after_their_call(ahead):
    engine = several(4, async_scheduling=ahead)
    request = engine.add_request(prompt_of(5), asking(24), streams=True)
    counts = []
    while engine.has_work:
        step(engine)
        counts.append((len(request.completions[0].token_ids), len(engine.executor.steps)))
    executed = [5, *[9] * 4, *[13] * 4, *[17] * 4, *[21] * 4, *[24] * 7] if ahead else [1, *[5] * 4, *[9] * 4]
    assert [reported for reported, _ in counts] == list(range(1, 25))
    assert [done for _, done in counts[: len(executed)]] == executed


@BOTH
def test_requests_that_come_and_go_at_any_time_get_their_own_tokens(ahead):
    engine, requests = several(3, async_scheduling=ahead, max_num_seqs=3), []
    for number in range(9):
        params = asking(9 + 5 * number % 7, logprobs=0, temperature=number % 2, seed=number)
        requests.append(engine.add_request(prompt_of(3 + number, number), params))
        for _ in range(5):
            step(engine)
    run(engine)
    assert engine.executor.num_calls_together > 5
    for request in requests:
        params = request.params
        seed = params.seed if params.temperature else None
        tokens = reference_tokens(request.prompt_token_ids, params.max_tokens, FULLY, seed=seed)
        assert tokens_of(request) == tokens and len(request.output().outputs[0].logprobs) == len(tokens)


@BOTH
@pytest.mark.parametrize("caching", [False, True])
def test_tokens_after_a_stop_within_a_call_are_dropped_and_their_blocks_returned(caching, ahead):
    prompt = prompt_of(6)
    tokens = reference_tokens(prompt, 12, FULLY)
    at = next(i for i in range(3, 12) if tokens[i] not in tokens[:i] and i % 4 != 0)
    engine = several(4, async_scheduling=ahead, block_size=1, caching=caching)
    request = engine.add_request(prompt, asking(40, stop_token_ids=[tokens[at]]), streams=True)
    other = engine.add_request(prompt_of(4, 1), asking(31))
    run(engine)
    [output] = request.output().outputs
    assert output.token_ids == tokens[: at + 1] and output.finish_reason is FinishReason.STOP
    assert tokens_of(other) == expected(other, 31) and engine.executor.num_calls_together
    assert engine.scheduler.blocks.num_used == 0
    if caching:
        again = engine.add_request(np.append(prompt, tokens[: at + 1]).astype(np.int32), asking(1))
        run(engine)
        # Step by step, the last token would never have been computed.
        assert again.output().num_cached_tokens == len(prompt) + at


@BOTH
def test_a_request_that_is_aborted_within_a_call_gets_no_more_tokens_and_its_row_goes_to_another_one(ahead):
    engine = several(4, async_scheduling=ahead, max_num_seqs=1)
    request = engine.add_request(prompt_of(6), asking(40, logprobs=0), streams=True)
    for _ in range(3):
        step(engine)
    assert engine.num_steps_under_way >= 2
    engine.abort(request.request_id)
    following = engine.add_request(prompt_of(9, 3), asking(5, logprobs=1, prompt_logprobs=1))
    run(engine)
    assert tokens_of(request) == expected(request, 3)
    assert tokens_of(following) == expected(following, 5)
    output = following.output()
    assert len(output.prompt_logprobs) == 9 and len(output.outputs[0].logprobs) == 5


@BOTH
def test_steps_are_single_while_requests_wait(ahead):
    engine = several(2, async_scheduling=ahead, max_num_seqs=1)
    for number in range(2):
        engine.add_request(prompt_of(4, number), asking(9))
    while engine.scheduler.waiting:
        assert not engine.executor.num_calls_together
        step(engine)
    run(engine)
    assert engine.executor.num_calls_together == 4


@BOTH
@pytest.mark.parametrize("name", WAITS)
def test_steps_that_depend_on_tokens_are_single(name, ahead):
    settings, params = WAITS[name]
    engine = several(2, async_scheduling=ahead, **settings)
    engine.add_request(prompt_of(6), asking(**params))
    run(engine)
    assert not engine.executor.num_calls_together and len(engine.executor.steps) == len(engine.records)


@BOTH
def test_a_pool_without_blocks_for_a_whole_call_is_served_step_by_step(ahead):
    engine = several(8, async_scheduling=ahead, num_blocks=10, max_model_len=36)
    requests = [engine.add_request(prompt_of(8, s), asking(20)) for s in range(4)]
    run(engine)
    assert engine.scheduler.num_preemptions and engine.executor.num_calls_together
    for request in requests:
        assert tokens_of(request) == expected(request, 20)


@BOTH
@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks and window"])
def test_records_count_the_blocks_of_single_steps(patterns, ahead):
    records = []
    for k in (1, 4):
        engine = several(k, async_scheduling=ahead, patterns=patterns, block_size=2, max_num_batched_tokens=64)
        for seed in range(3):
            engine.add_request(prompt_of(17 + seed, seed), asking(22))
        run(engine)
        records.append([(r.num_tokens, r.num_running, r.blocks_in_use, r.peak_blocks) for r in engine.records])
        assert engine.executor.num_calls_together == (0, 5)[k == 4]
    assert records[0] == records[1]


@BOTH
def test_a_call_that_fails_takes_its_requests_along_and_nothing_else(ahead):
    engine = several(4, async_scheduling=ahead)
    requests = [engine.add_request(prompt_of(5, s), asking(20)) for s in range(3)]
    step(engine)

    def fail(steps):
        raise MemoryError("the device is out of memory")

    submit, engine.executor.submit_together = engine.executor.submit_together, fail
    with pytest.raises(MemoryError):
        for _ in range(5):
            engine.step()
    engine.executor.submit_together = submit
    engine.scheduler.check()
    assert not engine.has_work and not engine.num_steps_under_way and engine.scheduler.blocks.num_used == 0
    assert all(r.output().outputs[0].finish_reason is FinishReason.ERROR for r in requests)
    again = engine.add_request(prompt_of(5), asking(20))
    run(engine)
    assert tokens_of(again) == expected(again, 20)

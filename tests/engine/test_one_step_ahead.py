"""A step that is submitted before the previous one's tokens are known: it decodes them on the device, and requests
that they end leave nothing behind."""

import functools

import numpy as np
import pytest

from ksana_jax.core.request import FinishReason
from tests.fakes import FULLY, SINKS, asking, make_engine, prompt_of, reference_tokens, run, step


class Late:
    """A pending step that is computed when its result is asked for, and notes the order of events."""

    def __init__(self, submit, events, step):
        events.append("submit")
        self._compute, self._events = functools.partial(submit, step), events

    def result(self):
        self._events.append("collect")
        return self._compute().result()


def ahead(**settings):
    return make_engine(async_scheduling=True, **settings)


def fed_steps(engine) -> int:
    """Number of executed steps that took tokens from the step before them."""
    return sum(bool((executed.arrays.tokens < 0).any()) for executed in engine.executor.steps)


def expected(request, count: int) -> list[int]:
    return reference_tokens(request.prompt_token_ids, count, FULLY)


def tokens_of(request) -> list[int]:
    return request.output().outputs[0].token_ids


def test_the_next_step_is_submitted_before_the_last_one_is_collected():
    engine, events = ahead(), []
    engine.executor.submit = functools.partial(Late, engine.executor.submit, events)
    request = engine.add_request(prompt_of(5), asking(4))
    run(engine)
    # The last token is never computed, so the length needs no step in vain.
    assert events == ["submit", *["submit", "collect"] * 3, "collect"]
    assert tokens_of(request) == expected(request, 4)
    assert fed_steps(engine) == 3 and len(engine.records) == 4


@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks and window"])
def test_records_count_the_blocks_that_the_step_by_step_engine_holds(patterns):
    records = []
    for settings in ({"async_scheduling": False}, {"async_scheduling": True}):
        engine = make_engine(patterns=patterns, block_size=2, max_num_batched_tokens=8, **settings)
        for seed in range(3):
            engine.add_request(prompt_of(17 + seed, seed), asking(9 + 4 * seed))
        run(engine)
        records.append([(r.num_tokens, r.blocks_in_use) for r in engine.records])
    assert fed_steps(engine) > 12 and records[0] == records[1]


def test_requests_that_come_and_go_at_any_time_get_their_own_tokens():
    engine = ahead(max_num_seqs=3)
    requests = []
    for number in range(9):
        requests.append(engine.add_request(prompt_of(3 + number, number), asking(2 + 5 * number % 7)))
        step(engine), step(engine)
    run(engine)
    assert fed_steps(engine) > 9
    for request in requests:
        assert tokens_of(request) == expected(request, request.params.max_tokens)


@pytest.mark.parametrize("caching", [False, True])
def test_a_token_computed_after_the_end_is_dropped_and_its_block_returned(caching):
    prompt = prompt_of(6)
    tokens = reference_tokens(prompt, 12, FULLY)
    at = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    # The step after the end fills a block: its hash would be that of a text that was never continued.
    engine = ahead(block_size=1, caching=caching)
    request = engine.add_request(prompt, asking(40, stop_token_ids=[tokens[at]]))
    other = engine.add_request(prompt_of(4, 1), asking(30))
    run(engine)
    [output] = request.output().outputs
    assert output.token_ids == tokens[: at + 1] and output.finish_reason is FinishReason.STOP
    assert tokens_of(other) == expected(other, 30)
    assert engine.scheduler.blocks.num_used == 0
    if caching:
        again = engine.add_request(np.append(prompt, tokens[: at + 1]).astype(np.int32), asking(1))
        run(engine)
        # The synchronous engine has never computed the last token either.
        assert again.output().num_cached_tokens == len(prompt) + at


def test_a_row_whose_sequence_has_ended_unnoticed_may_go_to_another_one_at_once():
    engine = ahead(max_num_seqs=1)
    tokens = reference_tokens(prompt_of(6), 8, FULLY)
    stopped = engine.add_request(prompt_of(6), asking(40, stop_token_ids=[tokens[2]]))
    following = engine.add_request(prompt_of(7, 2), asking(6, logprobs=1, prompt_logprobs=1))
    run(engine)
    assert tokens_of(stopped) == tokens[: tokens.index(tokens[2]) + 1]
    assert tokens_of(following) == expected(following, 6)
    assert len(following.output().outputs[0].logprobs) == 6 and len(following.output().prompt_logprobs) == 7


def test_an_aborted_request_gets_nothing_from_the_step_under_way():
    engine = ahead(max_num_seqs=1)
    request = engine.add_request(prompt_of(6), asking(40, logprobs=0), streams=True)
    for _ in range(4):
        step(engine)
    engine.abort(request.request_id)
    count = len(tokens_of(request))
    following = engine.add_request(prompt_of(9, 3), asking(5))
    run(engine)
    assert len(tokens_of(request)) == count == 4 and tokens_of(request) == expected(request, 4)
    assert tokens_of(following) == expected(following, 5)


def test_an_idle_engine_with_a_step_under_way_changes_its_pattern():
    engine = ahead()
    request = engine.add_request(prompt_of(6), asking(40))
    for _ in range(3):
        step(engine)
    engine.abort(request.request_id)
    assert not engine.has_work and engine.num_steps_under_way
    engine.set_patterns(FULLY)
    following = engine.add_request(prompt_of(5), asking(5))
    run(engine)
    assert tokens_of(following) == expected(following, 5)


WAITS = {
    "beams": ({}, {"beam_width": 2}),
    "penalties": ({}, {"frequency_penalty": 0.5}),
    "several completions": ({}, {"n": 3, "max_tokens": 1}),
    "a tier on the host": ({"host_slots": 4}, {}),
    "prefix caching under a window": ({"patterns": SINKS, "caching": True}, {}),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_step_that_depends_on_tokens_waits_for_them(name):
    settings, params = WAITS[name]
    engine = ahead(**settings)
    engine.add_request(prompt_of(6), asking(**params))
    run(engine)
    assert not fed_steps(engine) and len(engine.executor.steps) == len(engine.records)


def test_a_pool_that_is_nearly_full_is_served_step_by_step():
    engine = ahead(num_blocks=10, max_model_len=36)
    requests = [engine.add_request(prompt_of(8, s), asking(20)) for s in range(4)]
    run(engine)
    assert engine.scheduler.num_preemptions and fed_steps(engine)
    for request in requests:
        assert tokens_of(request) == expected(request, 20)


@pytest.mark.parametrize("when", ["submitted", "collected"])
def test_a_failure_of_a_step_under_way_takes_its_requests_along_and_nothing_else(when):
    engine = ahead()
    requests = [engine.add_request(prompt_of(5, s), asking(20)) for s in range(3)]
    for _ in range(4):
        step(engine)

    class Failing:
        def __init__(self, _):
            if when == "submitted":
                raise MemoryError("the device is out of memory")

        def result(self):
            raise MemoryError("the device is out of memory")

    submit, engine.executor.submit = engine.executor.submit, Failing
    with pytest.raises(MemoryError):
        for _ in range(2):
            engine.step()
    engine.executor.submit = submit
    engine.scheduler.check()
    assert not engine.has_work and not engine.num_steps_under_way and engine.scheduler.blocks.num_used == 0
    assert all(r.output().outputs[0].finish_reason is FinishReason.ERROR for r in requests)
    again = engine.add_request(prompt_of(5), asking())
    run(engine)
    assert tokens_of(again) == expected(again, 8)

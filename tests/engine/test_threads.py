"""Several threads and one engine: requests share steps, failures reach every caller, Ctrl-C the main thread."""

import concurrent.futures
import signal
import threading
import time

import numpy as np
import pytest

from ksana_jax import SamplingParams
from tests.engine.small import BOS, Letters, assert_idle, make_llm
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens

NUM_THREADS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def slowed(engine, seconds=0.001):
    """The engine, with steps that let other threads run."""
    execute = engine.executor.submit

    def slow(step):
        time.sleep(seconds)
        return execute(step)

    engine.executor.submit = slow
    return engine


def serve(engine, requests) -> list[list[int]]:
    """Serves requests as `LLM.generate` does."""
    outputs = {o.request_id: o for o in engine.serve(requests) if o.finished}
    return [[c.token_ids for c in outputs[r.request_id].outputs] for r in requests]


def in_threads(work, count=NUM_THREADS) -> list:
    """Results of work(0), work(1), ..., or their exceptions, from as many threads that begin together."""
    barrier = threading.Barrier(count)

    def begin(index):
        barrier.wait()
        return work(index)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(begin, index) for index in range(count)]
        return [future.exception() or future.result() for future in futures]


def test_requests_of_several_threads_share_steps_and_get_their_own_tokens():
    engine = slowed(make_engine(max_num_seqs=2 * NUM_THREADS, max_num_batched_tokens=64, num_blocks=200))

    def work(index):
        requests = [engine.new_request(prompt_of(5, 2 * index + i), asking(30)) for i in range(2)]
        return [(r.prompt_token_ids, tokens) for r, [tokens] in zip(requests, serve(engine, requests), strict=True)]

    for found in in_threads(work):
        assert isinstance(found, list), found
        for prompt, tokens in found:
            assert tokens == reference_tokens(prompt, 30, FULLY)
    assert 30 <= len(engine.records) < NUM_THREADS * 30 / 2
    engine.scheduler.check()
    assert not engine.has_work and not engine.requests


def test_every_stream_grows_to_its_end_whichever_thread_computes_it():
    engine = slowed(make_engine(max_num_seqs=NUM_THREADS, max_num_batched_tokens=64, num_blocks=200))

    def work(index):
        request = engine.new_request(prompt_of(4, index), asking(20), streams=True)
        return [o.outputs[0].token_ids for o in engine.serve([request])]

    for index, seen in enumerate(in_threads(work)):
        expected = reference_tokens(prompt_of(4, index), 20, FULLY)
        assert seen[-1] == expected and len(seen) > 5
        assert all(tokens == expected[: len(tokens)] for tokens in seen)
        assert [len(tokens) for tokens in seen] == sorted({len(tokens) for tokens in seen})


def test_streams_of_one_thread_report_what_steps_of_the_other_have_brought():
    engine = make_engine()
    requests = [engine.new_request(prompt_of(4, s), asking(8), streams=True) for s in range(2)]
    streams = [engine.serve([request]) for request in requests]
    for stream in streams:
        next(stream)
    [*_, last] = streams[0]
    assert last.finished and len(requests[1].completions[0].token_ids) >= 7
    steps = len(engine.records)
    news = next(streams[1])  # without another step
    assert len(news.outputs[0].token_ids) >= 7 and len(engine.records) == steps
    [*_, last] = streams[1]
    assert last.outputs[0].token_ids == reference_tokens(prompt_of(4, 1), 8, FULLY)


def test_a_failing_step_is_raised_in_every_thread_and_nobody_gets_half_an_answer():
    engine = slowed(make_engine(max_num_seqs=NUM_THREADS, max_num_batched_tokens=64, num_blocks=200))
    execute, failure = engine.executor.submit, MemoryError("the device is out of memory")

    def fail_later(step):
        if len(engine.requests) == NUM_THREADS and len(engine.records) > 5:
            engine.executor.submit = execute
            raise failure
        return execute(step)

    engine.executor.submit = fail_later

    def work(index):
        return serve(engine, [engine.new_request(prompt_of(4, index), asking(40))])

    raised = in_threads(work)
    assert raised.count(failure) == 1
    others = [error for error in raised if error is not failure]
    assert all(type(error) is RuntimeError and error.__cause__ is failure for error in others)
    assert "MemoryError: the device is out of memory" in str(others[0])
    engine.scheduler.check()
    again = in_threads(work)
    assert again == [[[reference_tokens(prompt_of(4, i), 40, FULLY)]] for i in range(NUM_THREADS)]


def test_ctrl_c_between_steps_aborts_the_requests_of_its_thread_and_keeps_cached_prefixes():
    llm = make_llm(Letters(), enable_prefix_caching=True)
    other = llm.engine.add_request(np.array([BOS, *[5] * 20]), GREEDY)
    request = llm.engine.new_request(np.array([BOS, *[6] * 20]), GREEDY, streams=True)
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.engine.serve([request]):
            signal.raise_signal(signal.SIGINT)
    assert request.output().outputs[0].finish_reason == "abort" and list(llm.engine.requests.values()) == [other]
    while not other.finished:
        llm.engine.step()
    assert other.output().outputs[0].finish_reason == "length"
    assert_idle(llm)
    [again] = llm.generate({"prompt_token_ids": [BOS, *[6] * 20]}, GREEDY)
    assert again.num_cached_tokens == 16


def test_ctrl_c_within_a_step_ends_all_requests_and_the_engine_serves_again(monkeypatch):
    llm = make_llm(Letters(), enable_prefix_caching=True)
    expected = llm.generate("x.y", GREEDY)[0].outputs[0]
    other, submit = llm.engine.add_request(np.array([BOS, 5]), GREEDY), llm.runner.submit

    def interrupted(step):
        submit(step)  # which donates the pool
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as pressed:
        pressed.setattr(llm.runner, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("x.y", GREEDY)
    assert other.output().outputs[0].finish_reason == "error" and not llm.engine.requests
    assert_idle(llm)
    assert llm.engine.memory.blocks.num_free == llm.num_blocks, "cached prefixes are lost with the pool"
    assert llm.generate("x.y", GREEDY)[0].outputs[0] == expected


def test_threads_share_the_steps_of_a_real_model():
    llm = make_llm(Letters())
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["the cat", "a", "x.y", "then he"]
    alone = [llm.generate(prompt, params)[0].outputs[0].text for prompt in prompts]
    llm.clear_records()
    texts = in_threads(lambda i: llm.generate(prompts[i], params)[0].outputs[0].text, len(prompts))
    assert texts == alone
    assert len(llm.records) < 24 * len(prompts) * 0.8
    assert_idle(llm)

"""The engine's loop around a fake executor: reports and their times, the traces of a bad request or a failing step,
and the cost of a decode step."""

import functools
import gc
import sys

import numpy as np
import pytest

from experiments.benches.host_engine import RandomTokens
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.core.request import FinishReason, RequestInput
from tests.fakes import (
    FULLY,
    VOCAB,
    asking,
    make_engine,
    prompt_of,
    reference_hidden,
    reference_tokens,
    run,
    score,
    step,
    two_layers,
    until_stop,
)


def outputs_of(request) -> list[list[int]]:
    return [o.token_ids for o in request.output().outputs]


# ------------------------------------------------------------------ what is reported


def test_a_stream_reports_every_token_once_and_in_order():
    engine = make_engine(num_blocks=7, max_num_batched_tokens=8)
    requests = [engine.add_request(prompt_of(7, s), asking(12), streams=True) for s in range(3)]
    seen = {r: [] for r in requests}
    while engine.has_work:
        for request in step(engine):
            [tokens] = outputs_of(request)
            assert tokens[: len(seen[request])] == seen[request] and len(tokens) == len(seen[request]) + 1
            seen[request] = tokens
    assert engine.scheduler.num_preemptions
    for request in requests:
        assert seen[request] == reference_tokens(request.prompt_token_ids, 12, FULLY)


def test_streams_are_reported_in_the_order_of_arrival():
    engine = make_engine(max_num_seqs=24, max_num_batched_tokens=24 * 4, num_blocks=200)
    requests = [engine.add_request(prompt_of(2, s), asking(5), streams=True) for s in range(24)]
    for _ in range(5):
        assert step(engine) == requests


def test_a_request_that_does_not_stream_is_reported_when_it_ends():
    engine = make_engine()
    short, long = (engine.add_request(prompt_of(4, n), asking(n)) for n in (2, 5))
    assert [step(engine) for _ in range(5)] == [[], [short], [], [], [long]]
    assert not engine.requests


def test_completions_of_one_prompt_have_streams_of_their_own():
    engine = make_engine(num_blocks=10)
    prompt = prompt_of(6)
    request = engine.add_request(prompt, asking(10, n=4, temperature=1, seed=5))
    run(engine)
    outputs = outputs_of(request)
    assert len({tuple(tokens) for tokens in outputs}) == 4
    assert outputs == [reference_tokens(prompt, 10, FULLY, seed=c.seq.seed) for c in request.completions]
    assert request.completions[0].seq.seed == 5 and engine.scheduler.num_preemptions


def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch():
    texts = []
    for neighbours, num_blocks in ((0, 64), (3, 64), (3, 8)):
        engine = make_engine(num_blocks=num_blocks, max_num_batched_tokens=7)
        for s in range(neighbours):
            engine.add_request(prompt_of(3 + s, s), asking(15, temperature=1))
        request = engine.add_request(prompt_of(8), asking(12, temperature=1, seed=11))
        run(engine)
        texts.append(outputs_of(request))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_an_output_ends_with_the_first_stop_id_after_min_tokens(min_tokens):
    engine = make_engine(eos_ids=(1, 2), max_num_seqs=3, max_model_len=200, num_blocks=200)
    stops = (*range(10, 24),)
    ends = set()
    for s in range(8):
        prompt = prompt_of(5, s)
        request = engine.add_request(prompt, asking(30, stop_token_ids=stops, min_tokens=min_tokens))
        run(engine)
        expected = until_stop(reference_tokens(prompt, 30, FULLY), (*stops, 1, 2), min_tokens)
        [output] = request.output().outputs
        assert output.token_ids == expected
        by_id = len(expected) < 30 or expected[-1] in (*stops, 1, 2)
        assert output.finish_reason is (FinishReason.STOP if by_id else FinishReason.LENGTH)
        assert output.stop_reason == (expected[-1] if by_id else None)
        assert len(expected) > min_tokens
        ends.add(len(expected))
    assert len(ends) > 2


def test_ignore_eos_goes_on_after_an_end_of_sequence_id():
    engine = make_engine(eos_ids=tuple(range(VOCAB)))
    requests = [engine.add_request(prompt_of(5), asking(9, ignore_eos=ignored)) for ignored in (False, True)]
    run(engine)
    assert [len(outputs_of(r)[0]) for r in requests] == [1, 9]


@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_every_token_is_scored_once_however_often_it_is_computed(budget, num_blocks):
    engine = make_engine(num_blocks=num_blocks, max_num_batched_tokens=budget)
    requests = [engine.add_request(prompt_of(9, s), asking(12, logprobs=2, prompt_logprobs=0)) for s in range(3)]
    run(engine)
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 8 and budget > 1)
    for request in requests:
        output = request.output()
        [completion] = output.outputs
        text = np.concatenate([request.prompt_token_ids, completion.token_ids])
        expected = score(reference_hidden(text, FULLY)[:-1], text[1:], 2, VOCAB)
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert [e[t].logprob for e, t in zip(entries, text[1:].tolist(), strict=True)] == expected.logprob.tolist()
        for entry, tops in zip(completion.logprobs, expected.top_ids[8:], strict=True):
            assert set(tops.tolist()) <= set(entry)


def test_metrics_tell_the_first_token_the_last_and_the_preemptions():
    engine = make_engine(num_blocks=7, max_num_batched_tokens=8)
    requests = [engine.add_request(prompt_of(10, s), asking(12)) for s in range(2)]
    arrived = [r.metrics.arrival_s for r in requests]
    ended = []
    while engine.has_work:
        step(engine)
        ended.append(engine.records[-1].ended_s)
    first, second = (r.metrics for r in requests)
    # Ten tokens at eight a step: the first token comes with the second step, then one a step.
    assert arrived[0] < ended[0] and first.first_token_s == ended[1] and first.finished_s == ended[12]
    assert first.tpot_s == (ended[12] - ended[1]) / 11 and first.ttft_s == ended[1] - arrived[0]
    assert first.num_output_tokens == second.num_output_tokens == 12
    assert (first.num_preemptions, second.num_preemptions > 0) == (0, True)
    assert second.finished_s == ended[-1]


def test_the_first_token_of_a_request_is_that_of_its_first_completion():
    engine = make_engine(max_num_batched_tokens=8)
    request = engine.add_request(prompt_of(8), asking(6, n=2))
    run(engine)
    # The second prompt is computed beside the first completion's decode, and takes two steps.
    assert request.metrics.first_token_s == engine.records[0].ended_s


def test_records_add_up():
    engine = make_engine(num_blocks=64)
    requests = [engine.add_request(prompt_of(4 + s, s), asking(6)) for s in range(5)]
    run(engine)
    assert sum(r.num_tokens for r in engine.records) == sum(len(r.prompt_token_ids) + 5 for r in requests)
    assert all(r.blocks_in_use <= r.peak_blocks for r in engine.records)
    assert engine.records[-1][3:6] == (0, 0, 0)


# ------------------------------------------------------------------ what is refused, and what fails


@pytest.mark.parametrize(
    ("length", "settings", "words"),
    [
        (0, {}, "prompt is empty"),
        (64, {}, "prompt has 64 tokens, max_model_len is 64"),
        (40, {"max_tokens": 20}, "40 tokens and max_tokens 20 need 15 KV blocks of 4 tokens, the pool has 12"),
        (4, {"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token id {VOCAB}, ids go from 0 to {VOCAB - 1}"),
        (4, {"stop_token_ids": [VOCAB]}, f"stop_token_ids has token id {VOCAB}"),
        (4, {"detokenize": True}, "no tokenizer: set detokenize=False"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_the_numbers_and_leaves_the_others_alone(
    length, settings, words
):
    engine = make_engine(num_blocks=12)
    other = engine.add_request(prompt_of(5), asking(8))
    step(engine)
    used, waiting = engine.scheduler.blocks.num_used, list(engine.scheduler.waiting)
    with pytest.raises(ValueError, match=words):
        engine.add_request(prompt_of(length), asking(**settings))
    assert list(engine.requests.values()) == [other]
    assert engine.scheduler.blocks.num_used == used and engine.scheduler.waiting == waiting
    run(engine)
    assert outputs_of(other) == [reference_tokens(other.prompt_token_ids, 8, FULLY)]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ValueError, match=f"token id {token}, ids go from 0 to {VOCAB - 1}"):
        make_engine().add_request(np.array([3, token], np.int32), asking())


def test_a_refused_call_makes_none_of_its_requests_and_later_ones_draw_the_same_tokens():
    refused, other = make_engine(), make_engine()
    good, bad = RequestInput(prompt_of(5), asking()), RequestInput(prompt_of(0), asking())
    with pytest.raises(ValueError, match="prompt is empty"):
        refused.new_requests([good, good, bad])
    first, second = (engine.add_request(prompt_of(5), asking(temperature=1)) for engine in (refused, other))
    assert first.request_id == second.request_id
    assert first.completions[0].seq.seed == second.completions[0].seq.seed


def test_an_id_that_is_in_use_is_refused():
    engine = make_engine()
    engine.add_request(prompt_of(5), asking(), request_id="a")
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.add_request(prompt_of(5), asking(), request_id="a")
    run(engine)
    engine.add_request(prompt_of(5), asking(), request_id="a")


def test_a_request_is_cut_at_max_model_len():
    engine = make_engine(max_model_len=16)
    request = engine.add_request(prompt_of(10), asking(50))
    run(engine)
    [output] = request.output().outputs
    assert len(output.token_ids) == 6 and output.finish_reason is FinishReason.LENGTH


def test_a_step_that_fails_takes_its_requests_along_and_nothing_else():
    engine = make_engine(num_blocks=16)
    requests = [engine.add_request(prompt_of(5, s), asking()) for s in range(6)]
    step(engine), step(engine)
    execute = engine.executor.submit

    def fail(_):
        raise MemoryError("the device is out of memory")

    engine.executor.submit = fail
    with pytest.raises(MemoryError):
        engine.step()
    engine.executor.submit = execute
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_used == 0 and not engine.has_work and not engine.requests
    outputs = [r.output().outputs[0] for r in requests]
    assert {o.finish_reason for o in outputs} == {FinishReason.ERROR}
    assert {o.error for o in outputs} == {"MemoryError: the device is out of memory"}
    again = engine.add_request(prompt_of(5), asking())
    run(engine)
    assert outputs_of(again) == [reference_tokens(again.prompt_token_ids, 8, FULLY)]


class ComputedLate:
    """A pending step: nothing of it, not even its moves, happens before its result is requested."""

    def __init__(self, submit, step):
        self.result = lambda: submit(step).result()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    "settings", [{}, {"caching": True}, {"host_slots": 8, "preempt": "swap"}, {"async_scheduling": True}], ids=str
)
def test_nothing_that_is_booked_before_the_tokens_disturbs_the_step_under_way(window, settings):
    patterns = two_layers(AttentionPattern(window=window))
    engine = make_engine(patterns, num_blocks=12, max_model_len=40, **settings)
    engine.executor.submit = functools.partial(ComputedLate, engine.executor.submit)
    requests = [engine.add_request(prompt_of(9 + 3 * s, s), asking(12, n=1 + s % 3)) for s in range(6)]
    run(engine)
    assert window or engine.scheduler.num_preemptions
    for r in requests:
        assert outputs_of(r) == r.params.n * [reference_tokens(r.prompt_token_ids, 12, patterns)]


def test_blocks_out_of_the_window_are_returned_before_the_tokens_are_known():
    engine = make_engine(two_layers(AttentionPattern(window=4)), num_blocks=12)
    engine.add_request(prompt_of(16), asking(2))
    in_use = []
    settle = engine.scheduler.settle
    engine.scheduler.settle = lambda *given: (in_use.append(engine.scheduler.blocks.num_used), settle(*given))[1]
    engine.step()
    assert in_use == [1] and engine.records[0].peak_blocks == 4


def test_an_idle_engine_steps_without_effect():
    engine = make_engine()
    assert engine.step() == [] and not engine.records


# ------------------------------------------------------------------ what a step costs


def count_bytecodes(call) -> int:
    """Bytecode instructions of Python that a call executes, in whatever functions."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # jax is called after a collection, in Python
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks when tracing starts whether any frame asks for it
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("pattern", [FULL, AttentionPattern(window=20, num_sinks=2)], ids=["full", "sinks"])
@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "sampled"])
def test_a_decode_step_runs_no_python_per_sequence(pattern, temperature):
    counts = []
    for rows in (8, 64):
        engine = make_engine(
            two_layers(pattern),
            num_blocks=64 * 20,
            block_size=4,
            max_num_seqs=rows,
            max_num_batched_tokens=64 * 32,
            query_tile=32,
            max_model_len=80,
            eos_ids=(0,),
        )
        for s in range(rows):
            engine.add_request(prompt_of(30, s), asking(40, ignore_eos=True, temperature=temperature))
        engine.step()
        engine.executor = RandomTokens(rows)
        taken = []
        for _ in range(12):  # all take a block in every fourth step, and return one under a window
            taken.append(count_bytecodes(engine.step))
            assert engine.records[-1].num_decodes == len(engine.scheduler.order) == rows
        counts.append(taken)
    assert min(counts[0]) > 100 and len(set(counts[0])) > 1
    assert counts[0] == counts[1]

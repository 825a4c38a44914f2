"""Beams on the fake device equal the plain search's whatever the pool, and leave nothing behind."""

import pytest

from ksana_jax.core.request import FinishReason
from tests.expected import expected_beams
from tests.fakes import FULLY, SINKS, asking, make_engine, prompt_of, step

SETTINGS = {
    "room for all": {"num_blocks": 64},
    "cached": {"num_blocks": 64, "caching": True},
    "preempted": {"num_blocks": 26},
    "preempted, cached": {"num_blocks": 26, "caching": True},
    "swapped": {"num_blocks": 26, "host_slots": 40, "preempt": "swap"},
    "swapped, cached": {"num_blocks": 26, "host_slots": 12, "preempt": "swap", "caching": True},
    "chunks": {"num_blocks": 26, "max_num_batched_tokens": 3},
    "as few rows as beams": {"num_blocks": 64, "max_num_seqs": 4},
}


@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks"])
@pytest.mark.parametrize("name", SETTINGS)
def test_beams_are_those_of_the_plain_search_whatever_the_pool(name, patterns):
    engine = make_engine(patterns, **({"max_num_seqs": 16, "eos_ids": (3,)} | SETTINGS[name]))
    asked = [(13, 4, 1.0, 12), (13, 3, 1.0, 9), (6, 4, 0.5, 14), (17, 1, 1.0, 7), (9, 2, 2.0, 12)]
    requests = []
    for length, width, penalty, max_tokens in asked:
        params = asking(max_tokens, beam_width=width, n=width, length_penalty=penalty)
        requests.append(engine.add_request(prompt_of(length), params))
        if length == 6:
            requests.append(engine.add_request(prompt_of(8), asking(10)))  # another kind among them
        step(engine)
    for _ in range(1500):
        if not engine.has_work:
            break
        step(engine)
    assert not engine.requests and engine.scheduler.blocks.num_used == 0
    plain = requests.pop(3)
    assert plain.finished
    for request, (_, width, penalty, max_tokens) in zip(requests, asked, strict=True):
        expected = expected_beams(request.prompt_token_ids.tobytes(), width, penalty, patterns, (3,), max_tokens)
        given = [(c.cumulative_logprob, tuple(c.token_ids)) for c in request.output().outputs]
        assert given == expected
    if patterns is FULLY and ("preempted" in name or "swapped" in name):
        assert engine.scheduler.num_preemptions > 0
        assert bool(engine.memory.counters.swapped_in) == ("swapped" in name)


def test_beams_share_the_blocks_of_their_prompt():
    engine = make_engine(num_blocks=64)
    engine.add_request(prompt_of(29), asking(3, beam_width=4))
    for _ in range(4):
        step(engine)
    assert max(r.unshared_blocks for r in engine.records) >= 4 * 8
    assert max(r.peak_blocks for r in engine.records) <= 7 + 2 * 4


@pytest.mark.parametrize("after", range(1, 12))
def test_an_abort_amid_a_search_leaves_nothing_behind(after):
    engine = make_engine(num_blocks=28, host_slots=8, preempt="swap", caching=True)
    request = engine.add_request(prompt_of(13), asking(12, beam_width=4, n=2))
    other = engine.add_request(prompt_of(11), asking(12, beam_width=3))
    for _ in range(after):
        step(engine)
    engine.abort(request.request_id)
    engine.scheduler.check()
    assert request.finished and request.output().outputs[0].finish_reason is FinishReason.ABORT
    while engine.has_work:
        step(engine)
    assert engine.scheduler.blocks.num_used == 0 and not engine.requests
    [found] = [(c.cumulative_logprob, tuple(c.token_ids)) for c in other.output().outputs]
    assert found == expected_beams(other.prompt_token_ids.tobytes(), 3, 1.0, FULLY, (), 12)[0]


def test_a_search_reports_its_metrics_as_other_requests_do():
    engine = make_engine(num_blocks=28, max_num_seqs=16)
    requests = [engine.add_request(prompt_of(13 + i), asking(12, beam_width=4)) for i in range(4)]
    while engine.has_work:
        step(engine)
    assert engine.scheduler.num_preemptions > 0
    assert sum(r.metrics.num_preemptions for r in requests) == engine.scheduler.num_preemptions
    for request in requests:
        metrics = request.output().metrics
        assert metrics.num_output_tokens == metrics.longest_output == 12
        assert metrics.first_token_s is not None and metrics.first_token_s <= metrics.finished_s

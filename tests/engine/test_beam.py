"""Beam search is the one written down here without blocks, sharing or batches: on a toy language, on the fake network
under every pressure, on the real network, and beside transformers."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax import LLM, SamplingParams
from ksana_jax.engine.beam import Beams, advance
from ksana_jax.models.dense import dense_logits
from ksana_jax.patterns import AttentionPattern
from ksana_jax.request import FinishReason
from ksana_jax.sequence import Sequence
from tests.engine.small import VOCAB, assert_idle, make_llm, model
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_hidden, score, step, two_layers, until_stop
from tests.fakes import VOCAB as FAKE_VOCAB

SINKS = two_layers(AttentionPattern(window=6, num_sinks=2))


def searched(continuations, width: int, penalty: float, stops, max_tokens: int) -> list[tuple[float, tuple[int, ...]]]:
    """(sum of log-probabilities, tokens) of the best hypotheses, the best first.

    Args:
      continuations: tokens so far -> [(token, log-probability)], all of them or the 2 x width best.
    """
    running, done = [(0.0, ())], []
    for length in range(1, max_tokens + 1):
        options = [(total + p, text + (t,)) for total, text in running for t, p in continuations(text)]
        options = sorted(options, key=lambda option: -option[0])[: 2 * width]
        done += [option for option in options[:width] if option[1][-1] in stops]
        running = [option for option in options if option[1][-1] not in stops][:width]
        if length == max_tokens:
            done += running
        done = sorted(done, key=lambda option: -option[0] / len(option[1]) ** penalty)[:width]
        if len(done) == width and running:
            worst = done[-1][0] / len(done[-1][1]) ** penalty
            if running[0][0] / length**penalty <= worst:
                break
    return done


# ------------------------------------------------------------------ a toy language: the last token and the place decide


class Toy:
    """What `advance` needs of a scheduler; nothing runs in rows."""

    rows = None

    def __init__(self):
        self.forked, self.ended = [], []

    def append(self, seq, token):
        seq.token_ids = np.append(seq.token_ids, np.int32(token))

    def fork(self, parent, child):
        assert child.token_ids[:-1].tolist() == parent.token_ids.tolist(), "the parent has gone on already"
        self.forked.append(child)

    def finish(self, seq, reason):
        assert reason is FinishReason.ABORT and seq not in self.ended
        self.ended.append(seq)


def toy_search(table: np.ndarray, first: int, width: int, penalty: float, stops, max_tokens: int) -> Beams:
    """Runs `Beams` on log-probabilities table[place, last token] [max_tokens, V, V], or [V, V] for all places."""
    table = np.broadcast_to(table, (max_tokens, *table.shape[-2:]))
    ids = itertools.count()

    def new_sequence(token_ids) -> Sequence:
        return Sequence(next(ids), np.asarray(token_ids, np.int32), asking(max_tokens), tuple(stops), 1 + max_tokens)

    scheduler = Toy()
    start = new_sequence([first])
    beams = Beams(width, penalty, tuple(stops), 1 + max_tokens, 1, {start: 0.0})
    everyone = {start}
    for place in range(max_tokens):
        alive = list(beams.alive)
        assert 1 <= len(alive) <= width
        for seq in alive:
            row = table[place, seq.token_ids[-1]]
            best = np.argsort(-row)[: 2 * width]
            assert beams.report(seq, best, row[best]) == (seq is alive[-1])
        goes_on = advance(beams, scheduler, new_sequence)
        everyone |= set(scheduler.forked)
        # Everyone who ever was a beam still is one, or was let go once.
        assert set(beams.alive) | set(scheduler.ended) == everyone
        assert not set(beams.alive) & set(scheduler.ended) and goes_on == bool(beams.alive)
        if not goes_on:
            return beams
    raise AssertionError("the search did not end at max_len")


def toy_table(max_tokens: int, vocab: int, seed: int) -> np.ndarray:
    # Each place has its own: or two texts with the same transitions in another order would be equally probable.
    logits = np.random.default_rng((vocab, seed)).normal(0, 1.5, (max_tokens, vocab, vocab))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def expect_hypotheses(found, expected, penalty: float, stops) -> None:
    assert [tuple(h.token_ids) for h in found] == [text for _, text in expected]
    for hypothesis, (total, text) in zip(found, expected, strict=True):
        assert hypothesis.logprob == pytest.approx(total)
        assert hypothesis.score == pytest.approx(total / len(text) ** penalty)
        by_id = text[-1] in stops
        assert hypothesis.finish_reason is (FinishReason.STOP if by_id else FinishReason.LENGTH)
        assert hypothesis.stop_reason == (text[-1] if by_id else None)


@given(
    vocab=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    num_stops=st.integers(0, 2),
    max_tokens=st.integers(1, 9),
)
def test_beams_of_a_toy_language_are_those_of_the_plain_search(vocab, seed, width, penalty, num_stops, max_tokens):
    table, stops = toy_table(max_tokens, vocab, seed), tuple(range(num_stops))
    first = vocab - 1

    def continuations(text):
        return list(enumerate(table[len(text), text[-1] if text else first]))

    beams = toy_search(table, first, width, penalty, stops, max_tokens)
    expect_hypotheses(beams.finished, searched(continuations, width, penalty, stops, max_tokens), penalty, stops)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize(("vocab", "max_tokens"), [(2, 5), (3, 4), (4, 3)])
def test_with_as_many_beams_as_there_are_texts_the_best_of_all_texts_are_found(vocab, max_tokens, penalty):
    """By counting all of them out: no search at all."""
    for seed in range(5):
        table, first = toy_table(max_tokens, vocab, seed), vocab - 1
        texts = {}
        for length in range(1, max_tokens + 1):
            for text in itertools.product(range(vocab), repeat=length):
                inner, last = text[:-1], text[-1]
                if 0 in inner or not (last == 0 or length == max_tokens):
                    continue
                steps = zip((first, *inner), text, strict=True)
                texts[text] = sum(table[place, a, b] for place, (a, b) in enumerate(steps))
        ranked = sorted(texts.items(), key=lambda item: -item[1] / len(item[0]) ** penalty)
        beams = toy_search(table, first, len(texts), penalty, (0,), max_tokens)
        assert [tuple(h.token_ids) for h in beams.finished] == [text for text, _ in ranked]


def test_a_search_ends_when_no_beam_that_goes_on_is_better_than_the_finished_ones():
    # Token 0 ends. Nearly sure of 0 after anything: both beams of width 2 finish at once or after one step.
    table = np.log(np.array([[0.9, 0.06, 0.04], [0.9, 0.06, 0.04], [0.9, 0.06, 0.04]]))
    beams = toy_search(table, 1, 2, 1.0, (0,), max_tokens=50)
    assert [h.token_ids for h in beams.finished] == [[0], [1, 0]]


def test_beams_are_weighed_at_their_present_length_though_they_might_become_better():
    # Ending at once: ln 0.6 = -0.51. Going on: ln 0.4 = -0.92 now, and -0.92 / 4 with a sure second token.
    table = np.log(np.array([[0.5, 0.5], [0.6, 0.4]]))
    sure = np.log(np.array([[0.5, 0.5], [1e-9, 1 - 1e-9]]))
    beams = toy_search(np.stack([table, sure, sure]), 1, 1, 2.0, (0,), max_tokens=3)
    assert [h.token_ids for h in beams.finished] == [[0]]


def test_a_continuation_that_ends_beyond_the_first_width_is_not_taken():
    # After 2: 1 and 3 before 0. With one beam, 0 is the second best, and never an end.
    table = np.log(np.array([[0.25] * 4, [0.1, 0.6, 0.2, 0.1], [0.3, 0.4, 0.2, 0.1], [0.25] * 4]))
    beams = toy_search(table, 2, 1, 1.0, (0,), max_tokens=3)
    assert [h.token_ids for h in beams.finished] == [[1, 1, 1]]


def test_a_length_penalty_of_zero_favours_the_short_and_a_large_one_the_long():
    # Ending costs ln 0.4 once; going on costs ln 0.6 each time.
    table = np.log(np.array([[0.5, 0.5], [0.4, 0.6]]))
    short = toy_search(table, 1, 3, 0.0, (0,), 6).finished[0]
    long = toy_search(table, 1, 3, 3.0, (0,), 6).finished[0]
    assert short.token_ids == [0] and long.token_ids == [1] * 6
    assert (short.finish_reason, long.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)


# ------------------------------------------------------------------ the engine around the fake network


def fake_beams(prompt, patterns, width: int, penalty: float, stops, max_tokens: int):
    @functools.cache
    def continuations(text):
        hidden = reference_hidden(np.concatenate([prompt, np.array(text, int)]), patterns)[-1:]
        top = score(hidden, [0], 2 * width, FAKE_VOCAB)
        return list(zip(top.top_ids[0].tolist(), top.top_logprobs[0].tolist(), strict=True))

    return searched(continuations, width, penalty, stops, max_tokens)


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
        expected = fake_beams(request.prompt_token_ids, patterns, width, penalty, (3,), max_tokens)
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
    assert found == fake_beams(other.prompt_token_ids, FULLY, 3, 1.0, (), 12)[0]


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


# ------------------------------------------------------------------ the real network


LONGEST = 32


def dense_beams(config, params, prompts, asked):
    """Of each prompt, over the unpaged network; texts are padded to one length, which a causal network does not see."""
    scores = jax.jit(lambda text: jax.nn.log_softmax(dense_logits(params, text, config=config)))

    def continuations(prompt, text):
        whole = np.zeros(LONGEST, np.int32)
        whole[: len(prompt) + len(text)] = [*prompt, *text]
        return list(enumerate(np.asarray(scores(whole))[len(prompt) + len(text) - 1].tolist()))

    return [
        searched(functools.cache(functools.partial(continuations, prompt)), *settings[:2], config.eos_ids, settings[2])
        for prompt, settings in zip(prompts, asked, strict=True)
    ]


def expect_beams(output, expected) -> None:
    assert [tuple(c.token_ids) for c in output.outputs] == [text for _, text in expected[: len(output.outputs)]]
    given = [c.cumulative_logprob for c in output.outputs]
    np.testing.assert_allclose(given, [total for total, _ in expected[: len(given)]], atol=1e-4)


PROMPTS = [np.random.default_rng(s).integers(2, VOCAB, 14 + s).tolist() for s in range(3)]
ASKED = [(3, 1.0, 16), (3, 0.6, 14), (2, 1.5, 16)]  # width, length penalty, tokens


def beams_of(llm, prompts, asked):
    given = [
        SamplingParams(beam_width=w, n=w, length_penalty=p, max_tokens=m, temperature=0, detokenize=False)
        for w, p, m in asked
    ]
    return llm.generate([{"prompt_token_ids": p} for p in prompts], given)


@functools.cache
def expected_beams():
    return dense_beams(*model(), PROMPTS, ASKED)


SMALL_POOL = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 8}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": True},
        {"preempt": "swap", "host_cache_bytes": 2**20},
    ],
    ids=["recomputed", "cached", "swapped"],
)
def test_beams_of_the_paged_network_are_those_of_the_dense_one_in_a_small_pool(settings):
    llm = make_llm(**SMALL_POOL, **settings)
    for output, expected in zip(beams_of(llm, PROMPTS, ASKED), expected_beams(), strict=True):
        expect_beams(output, expected)
    assert_idle(llm)
    assert llm.engine.scheduler.num_preemptions > 0
    assert bool(llm.engine.memory.counters.swapped_in) == ("preempt" in settings)


def test_beams_of_the_embedded_model_are_those_of_its_dense_network():
    llm = LLM(
        "ksana-tiny",
        dtype="f32",
        block_size=8,
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        query_tile=16,
        max_model_len=LONGEST,
    )
    buckets = llm.engine.builder.buckets  # of each kind one, to compile little
    few = dataclasses.replace(
        buckets, decodes=buckets.decodes[-1:], tiles=buckets.tiles[-1:], widths=buckets.widths[-1:]
    )
    llm.engine.builder = dataclasses.replace(llm.engine.builder, buckets=few)
    prompts = [llm.tokenizer.encode(text) for text in ("def __init__(self, ", "import ")]
    asked = [(3, 1.0, 10), (2, 0.0, 6)]
    outputs = beams_of(llm, prompts, asked)
    expected = dense_beams(llm.model_config, llm.runner.params, prompts, asked)
    for output, best in zip(outputs, expected, strict=True):
        expect_beams(output, best)
    assert_idle(llm)


@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
@pytest.mark.parametrize("num_ends", [0, 1, 2])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_are_those_of_transformers(penalty, num_ends, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ksana_jax.loading import export_hf

    config, params = model()
    asked = [(width, penalty, 12) for width in (1, 2, 4)]
    # Ends that these texts come across: of tokens that beams without an end take.
    endless = dense_beams(dataclasses.replace(config, eos_ids=()), params, PROMPTS, asked)
    seen = dict.fromkeys(token for _, text in endless[2] for token in text[4:])
    ends = tuple(seen)[:num_ends]
    assert len(ends) == num_ends
    config = dataclasses.replace(config, eos_ids=ends)
    export_hf(tmp_path, config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    llm = make_llm(block_size=4, num_blocks=40)
    llm.engine.intake.eos_ids = ends
    stopped = 0
    for (width, _, count), prompt in zip(asked, PROMPTS, strict=True):
        [output] = beams_of(llm, [prompt], [(width, penalty, count)])
        with torch.no_grad():
            found = theirs.generate(
                torch.tensor([prompt]),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                length_penalty=penalty,
                early_stopping=False,
                max_new_tokens=count,
                pad_token_id=0,
                eos_token_id=list(ends) or None,
            )
        texts = [until_stop(text[len(prompt) :].tolist(), ends) for text in found]  # what follows an end is filled up
        assert [c.token_ids for c in output.outputs] == texts
        stopped += sum(c.finish_reason is FinishReason.STOP for c in output.outputs)
    assert bool(stopped) == bool(num_ends)

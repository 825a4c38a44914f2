"""Streams: output is never taken back, and a reader that leaves frees everything."""

import copy

import pytest

from ksana_jax import SamplingParams
from tests.engine.small import BOS, FIRST_BYTE, assert_idle

PROMPTS = ["x.y", "a", "in the end", "he", "0", "there"]  # more than max_num_seqs 4


def greedy(**given) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | given)


# Bytes that begin and continue characters, at random: whole, broken and unfinished ones.
BYTE_SOUP = greedy(temperature=1, seed=3, n=2, logit_bias={FIRST_BYTE + i: 100.0 for i in range(7)})
ASKED = {
    "greedy": greedy(),
    "sampled, n = 3": greedy(temperature=1.2, seed=9, n=3),
    "ends at its own time": greedy(temperature=1.2, seed=9, n=4, stop_token_ids=list(range(3, 24, 2))),
    "stop strings": greedy(stop=["fe", "0fff", "de", "~~~"]),
    "stop strings after some tokens": greedy(stop=["f", "e"], min_tokens=6),
    "bytes": BYTE_SOUP,
    "bytes and stop strings": greedy(temperature=1, seed=5, logit_bias=BYTE_SOUP.logit_bias, stop=["\u00e9\u00fc"]),
    "log-probabilities": greedy(logprobs=2, prompt_logprobs=1),
}


def rest(output):
    """The part that does not depend on the number of the request and on time."""
    return output.prompt, output.prompt_token_ids, output.outputs, output.prompt_logprobs


@pytest.mark.parametrize("name", ASKED)
def test_every_snapshot_is_a_beginning_of_the_final_output_which_is_that_of_generate(llm, name):
    params = ASKED[name]
    expected = llm.generate(PROMPTS, params)
    snapshots = {}
    for output in llm.stream(PROMPTS, params):
        snapshots.setdefault(output.prompt, []).append((output, copy.deepcopy(output)))
    assert set(snapshots) == set(PROMPTS)
    for final in expected:
        given = snapshots[final.prompt]
        assert rest(given[-1][0]) == rest(final)
        assert [output.finished for output, _ in given] == [False] * (len(given) - 1) + [True]
        sizes = [sum(len(c.token_ids) for c in output.outputs) for output, _ in given]
        assert sizes == sorted(set(sizes)), "each snapshot has something new"
        assert params.n > 1 or sizes == list(range(1, sizes[-1] + 1)), "one snapshot for each token"
        for output, as_it_came in given:
            assert output == as_it_came, "a snapshot changed after it was given out"
            for completion, whole in zip(output.outputs, final.outputs, strict=True):
                assert whole.text.startswith(completion.text)
                assert whole.token_ids[: len(completion.token_ids)] == completion.token_ids
                if completion.finished:
                    assert completion == whole


@pytest.mark.parametrize("name", ASKED)
def test_deltas_join_to_the_output_of_generate_and_repeat_nothing(llm, name):
    params = ASKED[name]
    expected = {o.prompt: o for o in llm.generate(PROMPTS, params)}
    joined, unfinished = {}, set(PROMPTS)
    for delta in llm.stream(PROMPTS, params, delta=True):
        assert sum(len(c.token_ids) for c in delta.outputs) <= params.n, "at most one new token for each completion"
        whole = joined.setdefault(delta.prompt, delta)
        if whole is not delta:
            for part, new in zip(whole.outputs, delta.outputs, strict=True):
                new.text, new.token_ids = part.text + new.text, part.token_ids + new.token_ids
                new.logprobs = None if new.logprobs is None else part.logprobs + new.logprobs
            if delta.prompt_logprobs is not None:
                delta.prompt_logprobs = whole.prompt_logprobs + delta.prompt_logprobs
            joined[delta.prompt] = delta
        if delta.finished:
            unfinished.remove(delta.prompt)
    assert not unfinished
    assert {prompt: rest(o) for prompt, o in joined.items()} == {prompt: rest(o) for prompt, o in expected.items()}


def test_these_requests_have_whole_broken_and_unfinished_characters(llm):
    texts = [c.text for o in llm.generate(PROMPTS, BYTE_SOUP) for c in o.outputs]
    assert any("\u00e9" in t for t in texts) and any("\ufffd" in t for t in texts)
    assert any(t.endswith("\ufffd") for t in texts)


def test_new_text_comes_with_every_token_unless_it_may_belong_to_a_stop_string(llm):
    text = llm.generate("x.y", greedy())[0].outputs[0].text
    start = text.index("gee")
    stop = "gee~"  # its beginning comes, its end does not
    shown = [o.outputs[0].text for o in llm.stream("x.y", greedy(stop=stop))]
    assert shown[-1] == text
    assert text[: start + 1] not in shown and text[: start + 2] not in shown and text[: start + 3] not in shown
    assert text[:start] in shown
    free = [o.outputs[0].text for o in llm.stream("x.y", greedy())]
    assert text[: start + 1] in free and text[: start + 2] in free


@pytest.mark.parametrize("seen", [1, 2, 7, 40])
def test_closing_a_stream_frees_its_blocks_in_whatever_state_its_requests_are(llm, seen):
    # Six prompts in four rows, one of them several chunks long: some run, some wait, some have ended.
    prompts = [{"prompt_token_ids": [BOS] * 40}, *PROMPTS]
    params = [greedy(max_tokens=n, n=2) for n in (3, 4, 20, 20, 20, 5, 20)]
    stream = llm.stream(prompts, params)
    for _ in range(seen):
        next(stream)
    assert llm.engine.has_work
    stream.close()
    assert_idle(llm)


def test_an_exception_in_the_readers_loop_frees_the_blocks_too(llm):
    def read():
        for _ in llm.stream(PROMPTS, greedy()):
            raise KeyError("the reader's own mistake")

    with pytest.raises(KeyError):
        read()
    assert_idle(llm)


def test_a_stream_that_nobody_reads_takes_nothing(llm):
    llm.stream(PROMPTS, greedy())
    assert_idle(llm)


def test_an_aborted_request_says_so_and_the_others_go_on(llm):
    expected = [o.outputs[0].text for o in llm.generate(["a", "he"], greedy())]
    stream = llm.stream(["a", "he"], greedy())
    first = next(stream)
    llm.engine.abort(first.request_id)
    last = {o.prompt: o for o in stream}
    assert last["a"].outputs[0].finish_reason == "abort" and last["a"].finished
    assert expected[0].startswith(last["a"].outputs[0].text) and last["a"].outputs[0].text != expected[0]
    assert last["he"].outputs[0].text == expected[1]
    llm.engine.abort(first.request_id)  # again: nothing
    llm.engine.abort("nobody")


def test_two_streams_read_in_turns_both_come_to_their_end(llm):
    expected = [o.outputs[0] for o in llm.generate(["a", "he"], [greedy(max_tokens=9), greedy()])]
    one, two = llm.stream("a", greedy(max_tokens=9)), llm.stream("he", greedy())
    last = {}
    for pair in zip(one, two, strict=False):
        last.update({o.prompt: o for o in pair})
    last.update({o.prompt: o for stream in (one, two) for o in stream})
    assert [last["a"].outputs[0], last["he"].outputs[0]] == expected


def test_a_generate_in_the_middle_of_a_stream_loses_none_of_its_output(llm):
    expected = llm.generate("a", greedy())[0].outputs[0]
    stream = llm.stream("a", greedy())
    next(stream)
    llm.generate("he", greedy())  # takes the stream's request along to its end
    final = [*stream][-1]
    assert final.finished and final.outputs[0] == expected

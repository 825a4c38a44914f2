"""/v1/completions: fields, streams, echo, log-probabilities, usage."""

import numpy as np
import pytest

from tests.fakes import FULLY, reference_tokens
from tests.serve.server.serving import Letters, text_of

PROMPT = "Once upon a time"
IDS = Letters().encode(PROMPT)


def expected(ids, count, **settings):
    return text_of(reference_tokens(np.array(ids), count, FULLY, **settings))


def test_a_completion_has_the_tokens_of_the_engine(served):
    reply = served.post("/v1/completions", prompt=PROMPT, max_tokens=10, temperature=0)
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    answer = reply.json
    [choice] = answer["choices"]
    assert choice == {"index": 0, "text": expected(IDS, 10), "logprobs": None, "finish_reason": "length"}
    assert answer["object"] == "text_completion" and answer["model"] == "ksana" and answer["id"].startswith("cmpl-")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (16, 26)


def test_a_stream_adds_up_to_the_completion(served):
    fields = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": True}
    reply = served.post("/v1/completions", **fields, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream") and reply.headers["x-accel-buffering"] == "no"
    *events, last = reply.events
    assert "".join(event["choices"][0]["text"] for event in events) == expected(IDS, 30)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 30
    assert len({(event["id"], event["created"], event["model"]) for event in (*events, last)}) == 1


def test_without_usage_chunks_have_none(served):
    reply = served.post("/v1/completions", prompt=PROMPT, max_tokens=3, stream=True)
    assert reply.events and not any("usage" in event for event in reply.events)


def test_every_chunk_may_have_the_usage_so_far(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = served.post("/v1/completions", prompt=PROMPT, max_tokens=6, stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in reply.events]
    assert counts == sorted(counts) and counts[-1] == 6


@pytest.mark.parametrize(
    "prompt", [PROMPT, IDS, [PROMPT], [IDS]], ids=["text", "token ids", "list of texts", "list of lists"]
)
def test_a_prompt_may_have_four_forms(served, prompt):
    [choice] = served.post("/v1/completions", prompt=prompt, max_tokens=5, temperature=0).json["choices"]
    assert choice["text"] == expected(IDS, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_completions_are_told_apart_by_index(served, stream):
    prompts = ["one", "two", "three"]
    fields = {"prompt": prompts, "n": 2, "max_tokens": 12, "temperature": 0, "stream": stream}
    reply, texts = served.post("/v1/completions", **fields), [""] * 6
    chunks = reply.events if stream else [reply.json]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [expected(Letters().encode(prompt), 12) for prompt in prompts for _ in range(2)]


def test_log_probabilities_of_an_echo_are_those_of_prompt_and_output(served):
    fields = {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    [choice] = served.post("/v1/completions", **fields).json["choices"]
    assert choice["text"] == PROMPT + expected(IDS, 1)
    logprobs = choice["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [17] * 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == list(range(17))


def test_a_stream_of_an_echo_has_the_same_log_probabilities(served):
    fields = {"prompt": IDS, "echo": True, "logprobs": 3, "max_tokens": 9, "temperature": 0}
    [whole] = served.post("/v1/completions", **fields).json["choices"]
    chunks = [event["choices"][0] for event in served.post("/v1/completions", **fields, stream=True).events]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values


def test_no_tokens_with_an_echo_only_score_the_prompt(served):
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = served.post("/v1/completions", **fields).json
    [choice] = answer["choices"]
    assert choice["text"] == PROMPT and len(choice["logprobs"]["tokens"]) == 16
    assert answer["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"


def test_equal_seeds_give_equal_texts(served):
    one, two, other = (
        served.post("/v1/completions", prompt=PROMPT, max_tokens=40, seed=seed).json["choices"][0]["text"]
        for seed in (1, 1, 2)
    )
    assert one == two != other


def test_a_stop_string_ends_the_text_before_it(served):
    text = expected(IDS, 40)
    stop = text[20:23]
    fields = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": stop}
    [choice] = served.post("/v1/completions", **fields).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    events = served.post("/v1/completions", **fields, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_null_means_that_a_field_is_absent(served):
    nothing = {"stop": None, "logprobs": None, "n": None, "stream": None, "stream_options": None, "suffix": None}
    [choice] = served.post("/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0, **nothing).json["choices"]
    assert choice["text"] == expected(IDS, 5)


def test_prompt_logprobs_are_those_of_vllm(served):
    answer = served.post("/v1/completions", prompt=PROMPT, max_tokens=1, prompt_logprobs=2).json
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == 15
    for token, found in zip(IDS[1:], others, strict=True):
        assert found[str(token)]["decoded_token"] == text_of([token]) and found[str(token)]["rank"] >= 1


def test_cached_tokens_are_counted(served):
    fields = {"prompt": "counted " * 5, "max_tokens": 1}
    first, second = (served.post("/v1/completions", **fields).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0 < second["prompt_tokens_details"]["cached_tokens"]

"""vLLM's fields of requests: token ids in answers, ids from clients, prompts without their start, kept stop strings."""

import concurrent.futures

import pytest

from tests.serve.server.serving import make_llm, serving, text_of

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "hi there", "max_tokens": 12, "temperature": 0}
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}


@pytest.mark.parametrize("stop", [None, "~~"])
def test_completions_return_the_token_ids_of_prompt_and_text(served, stop):
    asked = {**TEXT, "prompt": ["hi", "there"], "return_token_ids": True, "stop": stop}
    whole = served.post(COMPLETION, **asked).json["choices"]
    assert [text_of(choice["prompt_token_ids"]) for choice in whole] == ["hi", "there"]
    assert all(text_of(choice["token_ids"]) == choice["text"] and len(choice["token_ids"]) == 12 for choice in whole)
    chunks = [chunk["choices"][0] for chunk in served.post(COMPLETION, **asked, stream=True).events]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert [chunk["prompt_token_ids"] for chunk in own] == [choice["prompt_token_ids"], *[None] * (len(own) - 1)]
        assert [token for chunk in own for token in chunk["token_ids"]] == choice["token_ids"]


def test_chats_return_the_token_ids_of_prompt_and_answer(served):
    prompt = served.post("/tokenize", messages=TALK["messages"]).json["tokens"]
    whole = served.post(CHAT, **TALK, n=2, return_token_ids=True).json
    assert whole["prompt_token_ids"] == prompt
    assert [text_of(one["token_ids"]) for one in whole["choices"]] == [
        one["message"]["content"] for one in whole["choices"]
    ]
    first, *others = served.post(CHAT, **TALK, n=2, return_token_ids=True, stream=True).events
    assert first["prompt_token_ids"] == prompt and not any("prompt_token_ids" in chunk for chunk in others)
    for one in whole["choices"]:
        deltas = [c["choices"][0] for c in [first, *others] if c["choices"][0]["index"] == one["index"]]
        assert [token for delta in deltas for token in delta.get("token_ids", [])] == one["token_ids"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETION, TEXT), (CHAT, TALK)])
def test_answers_have_no_token_ids_unless_asked(served, path, body):
    assert b"token_ids" not in served.post(path, **body).body + served.post(path, **body, stream=True).body


@pytest.mark.parametrize(("path", "body", "prefix"), [(COMPLETION, TEXT, "cmpl-"), (CHAT, TALK, "chatcmpl-")])
def test_an_answer_carries_the_id_that_its_client_gives(served, path, body, prefix):
    assert served.post(path, **body, request_id="job 7").json["id"] == f"{prefix}job 7"
    events = served.post(path, **body, request_id="job 7", stream=True).events
    assert {event["id"] for event in events} == {f"{prefix}job 7"}


def test_requests_that_run_at_once_may_share_an_id():
    with serving(make_llm(slow_s=0.01)) as slow, concurrent.futures.ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: slow.post(COMPLETION, **TEXT, request_id="same"), range(4)))
    assert [(reply.status, reply.json["id"]) for reply in replies] == [(200, "cmpl-same")] * 4


def test_the_last_tokens_of_a_prompt_are_kept(served):
    kept = served.post(COMPLETION, **{**TEXT, "prompt": "there"}).json["choices"][0]["text"]
    for prompt in ("hi there", served.post("/tokenize", prompt="hi there", add_special_tokens=False).json["tokens"]):
        reply = served.post(COMPLETION, **{**TEXT, "prompt": prompt}, truncate_prompt_tokens=5, echo=True).json
        assert reply["choices"][0]["text"] == f"there{kept}" and reply["usage"]["prompt_tokens"] == 5
    assert served.post(CHAT, **TALK, truncate_prompt_tokens=3).json["usage"]["prompt_tokens"] == 3
    assert served.post(CHAT, **TALK, truncate_prompt_tokens=300).json["usage"]["prompt_tokens"] == 7


def test_minus_one_keeps_what_fits_with_max_tokens(served):
    reply = served.post(COMPLETION, **{**TEXT, "prompt": "x" * 300}, truncate_prompt_tokens=-1).json
    assert reply["usage"] == {**reply["usage"], "prompt_tokens": 128 - 12, "completion_tokens": 12}
    long = {**TALK, "messages": [{"role": "user", "content": "x" * 300}]}
    assert served.post(CHAT, **long, truncate_prompt_tokens=-1).json["usage"]["prompt_tokens"] == 128 - 12


def test_a_stop_string_is_part_of_the_text_where_that_is_asked_for(served):
    text = served.post(COMPLETION, **TEXT).json["choices"][0]["text"]
    asked = {**TEXT, "stop": text[5:8], "include_stop_str_in_output": True}
    whole = served.post(COMPLETION, **asked).json["choices"][0]
    assert whole["text"] == text[: text.index(text[5:8]) + 3] and whole["finish_reason"] == "stop"
    chunks = served.post(COMPLETION, **asked, stream=True).events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_a_given_output_is_decoded(served):
    asked = {**TEXT, "forced_token_ids": [9, 4, 7], "return_token_ids": True}
    [choice] = served.post(COMPLETION, **asked).json["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([9, 4, 7], "length")
    events = served.post(CHAT, **TALK, forced_token_ids=[9, 4, 7], stream=True).events
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == choice["text"]

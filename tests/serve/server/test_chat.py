"""/v1/chat/completions: messages, streams, log-probabilities."""

import numpy as np
import pytest

from tests.fakes import FULLY, VOCAB, reference_tokens
from tests.serve.server.serving import Letters, text_of

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
IDS = Letters().encode("s:be kind;u:hi;a:")


def expected(count):
    return text_of(reference_tokens(np.array(IDS), count, FULLY))


def test_an_answer_continues_what_the_template_writes(served):
    answer = served.post("/v1/chat/completions", messages=MESSAGES, max_tokens=10, temperature=0).json
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": expected(10)}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["prompt_tokens"] == len(IDS)


def test_contents_may_be_lists_of_parts(served):
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    answer = served.post("/v1/chat/completions", messages=parts, max_completion_tokens=10, temperature=0).json
    assert answer["choices"][0]["message"]["content"] == expected(10)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
CALLING = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role[0] }}:"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %};{% endfor %}"
    "{% if not thinking | default(true) %}no{% endif %}"
)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tools_and_a_history_of_calls_reach_the_template(served, monkeypatch, content, choice):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", CALLING, raising=False)
    history = [
        {"role": "user", "content": "hi", "tool_calls": None},
        {"role": "assistant", "tool_calls": CALLS, "refusal": None, "annotations": [], **content},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
    ]
    fields = {"messages": history, "tools": TOOLS, "chat_template_kwargs": {"thinking": False}}
    ids = Letters().encode("add u:hi;a:1;t:2;no")
    assert served.post("/tokenize", **fields).json["tokens"] == ids
    fields |= {"tool_choice": choice, "parallel_tool_calls": True, "temperature": 0, "max_tokens": 4}
    answer = served.post("/v1/chat/completions", **fields).json
    message = {"role": "assistant", "content": text_of(reference_tokens(np.array(ids), 4, FULLY))}
    assert answer["choices"][0]["message"] == message and answer["usage"]["prompt_tokens"] == len(ids)


def test_the_last_message_can_be_continued(served):
    messages = [*MESSAGES, {"role": "assistant", "content": "we"}]
    found = served.post("/tokenize", messages=messages, continue_final_message=True).json["tokens"]
    assert found == Letters().encode("s:be kind;u:hi;a:we")
    reply = served.post("/tokenize", messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert (reply.status, reply.error["param"]) == (400, "add_generation_prompt")


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(served):
    fields = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "stream": True}
    first, *middle, last = served.post("/v1/chat/completions", **fields).events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [set(event["choices"][0]["delta"]) for event in middle] == [{"content"}] * len(middle)
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == expected(20)
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert first["object"] == "chat.completion.chunk" and first["id"] == last["id"]


def test_choices_of_a_stream_interleave(served):
    fields = {"messages": MESSAGES, "max_tokens": 20, "n": 3, "temperature": 0, "stream": True}
    choices = [event["choices"][0] for event in served.post("/v1/chat/completions", **fields).events]
    texts = [""] * 3
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [expected(20)] * 3
    last_of = [max(i for i, c in enumerate(choices) if c["index"] == index) for index in range(3)]
    assert min(last_of) > [c["index"] for c in choices].index(2), "one choice ended before another began"


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_an_entry_of_log_probabilities(served, stream):
    fields = {"messages": MESSAGES, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "temperature": 0}
    reply = served.post("/v1/chat/completions", **fields, stream=stream)
    chunks = reply.events if stream else [reply.json]
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [bytes(entry["bytes"]) for entry in entries] == [bytes([b]) for b in expected(12).encode()]
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)


def test_an_answer_without_a_limit_goes_on_to_max_model_len(served):
    answer = served.post("/v1/chat/completions", messages=MESSAGES, temperature=0).json
    assert answer["usage"]["total_tokens"] == 128 and answer["choices"][0]["finish_reason"] == "length"


def test_a_text_with_an_id_that_the_embedding_lacks_is_refused(served, monkeypatch):
    monkeypatch.setattr(served.llm.tokenizer, "vocab_size", VOCAB + 1, raising=False)
    assert served.ask("GET", "/tokenizer_info").json["vocab_size"] == VOCAB
    monkeypatch.setattr(served.llm.tokenizer, "_encode", lambda text, add_special_tokens: [VOCAB])
    reply = served.post("/v1/chat/completions", messages=MESSAGES)
    said = f"prompt has token id {VOCAB}, ids go from 0 to {VOCAB - 1}"
    assert (reply.status, reply.error["message"]) == (400, said)
    monkeypatch.undo()
    assert served.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2).status == 200


def test_a_model_without_a_template_says_so(served, monkeypatch):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", None)
    reply = served.post("/v1/chat/completions", messages=MESSAGES)
    assert reply.status == 400 and "no chat template: ask /v1/completions" in reply.error["message"]
    monkeypatch.setattr(served.llm.tokenizer, "no_template", "f: chat_template is int, must be a string", raising=False)
    reply = served.post("/v1/chat/completions", messages=MESSAGES)
    assert reply.status == 400 and "no chat template, for f: chat_template is int" in reply.error["message"]

"""Invalid requests: each gets one error with field, value and limit, and other requests continue."""

import json
from pathlib import Path

import pytest

from ksana_jax.serve.server.request_models import UNSUPPORTED, ChatRequest, CompletionRequest
from tests.serve.server.serving import Letters

GOOD = {"prompt": "hi", "max_tokens": 2}
MESSAGES = [{"role": "user", "content": "hi"}]
WRONG = {
    "n": [0, 65, -1, 1.5, "2", True, [1]],
    "response_format": ["json", {"type": "xml"}, [1]],
    "structured_outputs": ["a", {}, {"regex": 1}, {"colour": "red"}],
    "temperature": [-0.1, 101, "hot", True, [0]],
    "top_p": [0, 1.1, -1, "all"],
    "top_k": [-2, 1.5, "4", 2**31],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 3],
    "frequency_penalty": [-2.1, 3],
    "repetition_penalty": [0, 101],
    "max_tokens": [-1, 1.5, "8", True, 2**31],
    "seed": [2**63, 0.5, "1"],
    "stop": ["", ["a"] * 17, ["x" * 257], [1], {"a": 1}, "x" * 2**20],
    "stop_token_ids": ["1", [True], [-1], [2**31]],
    "logit_bias": [{"abc": 1}, {"1": 1e9}, {"1": "x"}, [1], {str(i): 0 for i in range(1025)}, {"-1": 0}],
    "ignore_eos": [1, "yes"],
    "min_tokens": [-1, "x"],
    "bad_words": ["x", [""], ["x"] * 257],
    "allowed_token_ids": [[], [1.5], 3],
    "forced_token_ids": [[], [1.5], [-1], 3],
    "prompt_logprobs": [-1, 21, True],
    "stream": [1, "true"],
    "stream_options": [[], {"include_usage": 1}, {"colour": True}],
    "include_stop_str_in_output": [1],
    "truncate_prompt_tokens": [0, -2, 1.5],
    "return_token_ids": [1],
    "request_id": ["", 7, "x" * 129],
    "cache_salt": [1, "x" * 257],
    "user": [1],
    "logprobs": [-1, 21, "2", True],
    "echo": [1, "x"],
    "spaces_between_special_tokens": [1],
    "prompt": [1, [], {}, [[]], [1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [1.5], [True], [-1], [2**31], [[1], []]],
}
TOOL = {"type": "function", "function": {"name": "add"}}
WRONG_CHAT = {
    "messages": [
        [],
        "hi",
        [1],
        [{"role": "user"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "url": "file:///etc/passwd"}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        [{"role": "tool", "content": "a", "tool_call_id": 5}],
        [{"role": "user", "content": "a", "name": "x" * 257}],
        [{"role": "user", "content": "a", "colour": "red"}],
        [{"role": "assistant", "content": "a", "audio": {"id": "1"}}],
    ],
    "logprobs": [1, 5, "true"],
    "top_logprobs": [21, -1, 2],  # 2: without logprobs
    "max_completion_tokens": [0, "5"],
    "tools": ["f", {"name": "f"}, ["f"], [[1]], [{}] * 1025, [TOOL, TOOL], [{"type": "web_search"}]]
    + [[{"type": "function", "function": wrong}] for wrong in ({}, {"name": "a b"}, {"name": "f", "parameters": [1]})],
    "tool_choice": ["any", "required", 1, {"type": "function"}, {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [1, "no"],
    "add_generation_prompt": [1, "yes"],
    "continue_final_message": [1, "yes"],
    "chat_template_kwargs": [[1], "a", {"messages": []}, {"range": 1}],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_of_a_field_of_a_completion_are_named(served, name):
    for value in WRONG[name]:
        reply = served.post("/v1/completions", **{**GOOD, name: value})
        assert reply.status == 400, (value, reply.body)
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["param"] == name and name in reply.error["message"], (value, reply.error)
        assert len(reply.error["message"]) < 600


@pytest.mark.parametrize("name", WRONG_CHAT)
def test_wrong_values_of_a_field_of_a_chat_are_named(served, name):
    for value in WRONG_CHAT[name]:
        reply = served.post("/v1/chat/completions", **{"messages": MESSAGES, name: value})
        assert (reply.status, reply.error["param"]) == (400, name), (value, reply.error)
        assert name in reply.error["message"]


def test_every_field_has_wrong_values_here():
    fields, chat = CompletionRequest.model_fields, ChatRequest.model_fields
    unread = {"model", "metadata", "safety_identifier", "prompt_cache_key"}
    assert set(fields) - set(WRONG) - unread == {"skip_special_tokens", "add_special_tokens"}
    assert set(chat) - set(fields) == set(WRONG_CHAT) - set(fields)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_that_are_not_supported_are_refused_unless_their_value_changes_nothing(served, name):
    bodies = [
        ("/v1/completions", CompletionRequest, GOOD),
        ("/v1/chat/completions", ChatRequest, {"messages": MESSAGES}),
    ]
    for path, model, body in bodies:
        if name in model.model_fields:
            continue
        for value in ({"a": 1}, ["a"], "required", 2, True):
            reply = served.post(path, **body, **{name: value})
            assert (reply.status, reply.error["param"]) == (400, name), (path, value, reply.body)
            assert reply.error["code"] == "unsupported_parameter" and name in reply.error["message"]
        for value in (*UNSUPPORTED[name], None):
            assert served.post(path, **body, **{name: value}).status == 200, (path, value)
    page = Path(__file__).parents[3] / "docs/use/coming-from-vllm.md"
    assert f"`{name}`" in page.read_text().partition("## Requests over HTTP")[2]


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"n": 65}, ["65", "64"]),
        ({"temperature": 101}, ["101", "100"]),
        ({"logprobs": 21}, ["21", "20"]),
        ({"stop": ["a"] * 17}, ["17", "16"]),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, ["1,025", "1,024"]),
        ({"prompt": "x" * 128}, ["128"]),
        ({"prompt": "x" * 100, "max_tokens": 50}, ["100", "50", "128"]),
        ({"prompt": [97]}, ["97", "96"]),
        ({"min_tokens": 3}, ["3", "2"]),
        ({"logit_bias": {"97": 1}}, ["97", "96"]),
    ],
)
def test_messages_have_value_and_limit(served, fields, numbers):
    reply = served.post("/v1/completions", **{**GOOD, **fields})
    assert reply.status == 400 and all(number in reply.error["message"] for number in numbers), reply.error


def test_unknown_fields_are_refused_with_the_nearest_name(served):
    reply = served.post("/v1/completions", **GOOD, temprature=1)
    assert reply.status == 400 and "did you mean temperature?" in reply.error["message"]
    assert (reply.error["param"], reply.error["code"]) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/detokenize", {"tokens": [1, 95178.5]}, "tokens[1] is 95,178.5, must be a valid integer"),
        ("/v1/completions", {**GOOD, "prompt": [1, 95178.5]}, "prompt[1] is 95,178.5, must be a valid integer"),
        ("/v1/completions", {**GOOD, "prompt": {"1": 1}}, "prompt is {'1': 1}, must be a valid string or a valid list"),
        (
            "/v1/completions",
            {**GOOD, "temperature": 95178.0},
            "temperature is 95,178, must be less than or equal to 100",
        ),
        ("/v1/completions", {**GOOD, "stop": [1]}, "stop[0] is 1, must be a valid string"),
        ("/v1/completions", {**GOOD, "cache_salt": "x" * 257}, "cache_salt has 257 characters, must have at most 256"),
        ("/v1/completions", {**GOOD, "best_of": 4}, "best_of is 4: not supported, must be 1 or absent"),
        ("/v1/completions", {**GOOD, "a.b": 4}, "a.b is an unknown field"),
        (
            "/v1/chat/completions",
            {"messages": [{**MESSAGES[0], "colour": "red"}]},
            "messages[0].colour is an unknown field",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}]}]},
            "messages[0].content[0].colour is an unknown field",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name is missing",
        ),
    ],
)
def test_errors_say_what_was_sent(served, path, body, said):
    assert served.post(path, **body).error["message"].startswith(said)


def test_a_missing_prompt_is_named(served):
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"), ("/detokenize", "tokens")):
        reply = served.post(path)
        assert (reply.status, reply.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [("x" * 128, "context_length_exceeded"), ("x" * 2049, "context_length_exceeded"), ("", None), ("日本", None)],
)
def test_prompts_that_cannot_be_served_are_refused(served, prompt, code):
    used = served.llm.stats().blocks_in_use
    reply = served.post("/v1/completions", **{**GOOD, "prompt": prompt})
    assert (reply.status, reply.error["code"], served.llm.stats().blocks_in_use) == (400, code, used), reply.error


def test_a_request_that_the_pool_can_never_hold_is_refused():
    from tests.serve.server.serving import make_llm, serving

    with serving(make_llm(num_blocks=8)) as served:
        reply = served.post("/v1/completions", prompt="x" * 30, max_tokens=30)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "KV blocks" in reply.error["message"]
        assert served.post("/v1/completions", prompt="x" * 20, max_tokens=5).status == 200


BODIES = {
    "not JSON": (b"{", 400),
    "an array": (b"[]", 400),
    "a number": (b"3", 400),
    "nothing": (b"", 400),
    "NaN": (b'{"prompt":"a","temperature":NaN}', 400),
    "infinity": (b'{"prompt":"a","temperature":-Infinity}', 400),
    "a float that overflows": (b'{"prompt":"a","temperature":1e999}', 400),
    "an endless integer": (b'{"prompt":"a","n":' + b"1" * 10000 + b"}", 400),
    "a key twice": (b'{"prompt":"a","n":1,"n":2}', 400),
    "bytes that are not UTF-8": (b'{"prompt":"\xff\xfe"}', 400),
    "UTF-16": ('{"prompt":"a"}'.encode("utf-16"), 400),
    "half of a surrogate pair": (b'{"prompt":"\\ud800"}', 400),
    "half of one in a key": (b'{"prompt":"a","\\udc00":1}', 400),
    "a NUL byte": (b'{"prompt":"a\x00b"}', 400),
    "deep arrays": (b'{"prompt":' + b"[" * 100000 + b"]" * 100000 + b"}", 400),
    "deep objects": (b'{"a":' * 100000 + b"1" + b"}" * 100000, 400),
    "33 levels": (b'{"prompt":' + b"[" * 33 + b"]" * 33 + b"}", 400),
    "too many values": (b'{"prompt":[' + b"1," * 2**18 + b"1]}", 400),
    "9 MiB": (b'{"prompt":"' + b"a" * (9 * 2**20) + b'"}', 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies_get_an_error(served, name):
    body, status = BODIES[name]
    reply = served.ask("POST", "/v1/completions", body)
    assert reply.status == status and reply.error["type"] == "invalid_request_error", reply.body[:200]


def test_bodies_of_other_types_are_refused(served):
    body = json.dumps(GOOD).encode()
    assert served.ask("POST", "/v1/completions", body, content_type="text/plain").status == 415
    assert served.ask("POST", "/v1/completions", body, content_encoding="gzip").status == 400
    assert served.ask("POST", "/v1/completions", body, content_type="application/json; charset=utf-8").status == 200


def test_unknown_models_paths_and_methods(served):
    reply = served.post("/v1/completions", **GOOD, model="gpt-5")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert served.ask("GET", "/v1/models/gpt-5").status == 404
    assert served.ask("GET", "/v1/models/").json == served.ask("GET", "/v1/models").json
    assert served.ask("GET", "/v1/audio").error["type"] == "not_found_error"
    reply = served.ask("GET", "/v1/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST") and reply.error["code"] == "method_not_allowed"


def test_replies_carry_the_id_of_their_request(served):
    assert served.ask("GET", "/health", x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    own = served.ask("GET", "/health", x_request_id="a b\tc").headers["x-request-id"]
    assert len(own) == 32 and own.isalnum()
    assert served.ask("POST", "/v1/completions", b"{", x_request_id="abc-2").headers["x-request-id"] == "abc-2"


def test_names_in_errors_are_escaped_and_cut(served):
    for wrong in ("a\nb\x1b[31mred", "m" * 2**20):
        reply = served.post("/v1/completions", **GOOD, model=wrong)
        message = reply.error["message"]
        assert reply.status in (400, 404) and len(message) < 400 and message.isprintable()


def test_tokenize_and_detokenize_are_inverse(served):
    tokens = served.post("/tokenize", prompt="a café", add_special_tokens=False, return_token_strs=True).json
    assert tokens["count"] == 7 and tokens["token_strs"][:3] == ["a", " ", "c"]
    assert served.post("/detokenize", tokens=tokens["tokens"]).json == {"prompt": "a café"}
    chat = served.post("/tokenize", messages=MESSAGES).json
    assert chat["tokens"] == Letters().encode("u:hi;a:")
    assert served.post("/tokenize").status == 400
    assert served.post("/detokenize", tokens=[97]).error["param"] == "tokens"
    assert served.ask("GET", "/tokenizer_info").json["eos_token"] == "~"

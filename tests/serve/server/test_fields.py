"""Fields that change nothing: null, neutral values, and integers written as floats."""

import pytest

from ksana_jax.core.request import SamplingParams
from ksana_jax.serve.server.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)

ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 4, "temperature": 0}),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0},
    ),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
}
NEUTRAL = {
    "n": 1,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "logits_processors": [],
    "response_format": {"type": "text"},
    "return_tokens_as_token_ids": False,
    "vllm_xargs": {},
    "stream": False,
    "stream_options": {"include_usage": True, "include_obfuscation": None, "later": None},
    "metadata": {},
    "store": False,
    "service_tier": "auto",
    "priority": 0.0,
    "kv_transfer_params": None,
}
NEUTRAL_COMPLETION = {"echo": False, "suffix": "", "add_special_tokens": True}
NEUTRAL_CHAT = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "auto",
    "parallel_tool_calls": True,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "add_special_tokens": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
    "documents": [],
    "modalities": ["text"],
    "mm_processor_kwargs": {},
}


def answer(reply) -> dict:
    """A reply's content without the fields that differ between requests."""
    assert reply.status == 200, reply.body
    answer = {key: value for key, value in reply.json.items() if key not in ("id", "created")}
    answer.get("usage", {}).pop("prompt_tokens_details", None)  # a second request finds the first one's prompt cached
    return answer


@pytest.mark.parametrize("path", ENDPOINTS)
def test_null_is_an_absent_field_known_or_not(served, path):
    model, body = ENDPOINTS[path]
    absent = dict.fromkeys({*model.model_fields, *model.unsupported, "kv_transfer_params"} - body.keys())
    assert answer(served.post(path, **body, **absent)) == answer(served.post(path, **body))


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/completions", NEUTRAL_COMPLETION), ("/v1/chat/completions", NEUTRAL_CHAT)]
)
def test_values_that_ask_for_what_happens_anyway_change_nothing(served, path, more):
    _, body = ENDPOINTS[path]
    plain = answer(served.post(path, **body))
    assert answer(served.post(path, **body, **NEUTRAL, **more)) == plain
    for name, value in {**NEUTRAL, **more}.items():
        reply = served.post(path, **body, **{name: value})
        assert reply.status == 200 and answer(reply) == plain, (name, reply.body)


def test_null_within_objects_is_an_absent_key(served):
    part = {"type": "text", "text": "hi", "cache_control": None, "image_url": None}
    message = {"role": "user", "content": [part], "name": None, "tool_calls": None, "later": None}
    _, body = ENDPOINTS["/v1/chat/completions"]
    plain = answer(served.post("/v1/chat/completions", **body))
    assert answer(served.post("/v1/chat/completions", **{**body, "messages": [message]})) == plain


def test_an_integer_may_be_written_as_a_float(served):
    ids = served.post("/tokenize", prompt="hi", add_special_tokens=False).json["tokens"]
    body = {"max_tokens": 4.0, "n": 1.0, "seed": -0.0, "best_of": 1.0, "stop_token_ids": [96.0], "temperature": 0}
    written = served.post("/v1/completions", **body, prompt=list(map(float, ids)))
    assert answer(written) == answer(served.post("/v1/completions", prompt="hi", max_tokens=4, temperature=0))
    assert answer(served.post("/detokenize", tokens=list(map(float, ids)))) == {"prompt": "hi"}
    for prompt in ([1, 2.5], [1.0, True], [1.0, 1e300]):
        reply = served.post("/v1/completions", prompt=prompt)
        assert reply.status == 400 and "prompt[1] is " in reply.error["message"], reply.body


@pytest.mark.parametrize("name", ["best_of", "priority", "use_beam_search"])
def test_true_is_not_one_and_zero_is_not_false(served, name):
    for value in (True, 0) if name != "priority" else (False,):
        assert served.post("/v1/completions", prompt="hi", **{name: value}).error["param"] == name


def test_defaults_of_sampling_are_those_of_sampling_params():
    assert {name: field.default for name, field in Sampling.model_fields.items()} == {
        name: getattr(SamplingParams(), name) for name in Sampling.model_fields
    }

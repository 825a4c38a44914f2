"""`response_format` and `structured_outputs` over HTTP, with a real model."""

import json
import re

import openai
import pytest

from ksana_jax import AsyncLLM
from tests.engine.test_structured_outputs import bounded, tiny
from tests.serve.server.serving import serving

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "x = ", "max_tokens": 60, "temperature": 1, "seed": 1}
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 110, "temperature": 0}
AGE = bounded(age={"type": "integer", "minimum": 0, "maximum": 120})
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": AGE}}


@pytest.fixture(scope="module")
def served():
    llm = tiny(max_model_len=128)
    llm.tokenizer.set_templates({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "test")
    with serving(AsyncLLM.around(llm)) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_schema(served, stream):
    if not stream:
        [choice] = served.post(CHAT, **TALK, response_format=SCHEMA).json["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    else:
        chunks = [
            event["choices"][0] for event in served.post(CHAT, **TALK, response_format=SCHEMA, stream=True).events
        ]
        text, reason = "".join(c["delta"].get("content") or "" for c in chunks), chunks[-1]["finish_reason"]
    assert {*json.loads(text)} == {"age"} and reason == "stop"


def test_openais_client_parses_an_answer_into_a_pydantic_model(served):
    from pydantic import BaseModel

    class Age(BaseModel):
        age: int

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(model="around", **TALK, response_format=Age)
    assert isinstance(parsed.choices[0].message.parsed, Age)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"regex": "[a-c]{4}", "json": None}}, "[a-c]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
)
def test_completions_follow_other_grammars(served, fields, pattern):
    [choice] = served.post(COMPLETION, **TEXT, **fields).json["choices"]
    assert re.fullmatch(pattern, choice["text"], re.DOTALL)


def test_scores_of_forbidden_tokens_are_finite_numbers(served):
    fields = {"structured_outputs": {"choice": ["yes"]}, "logprobs": 3}
    [choice] = served.post(COMPLETION, **TEXT, **fields).json["choices"]
    assert min(choice["logprobs"]["top_logprobs"][0].values()) == -9999


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            '"not"',
        ),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs", '"uniqueItems"'),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"schema": {}}}, "structured_outputs", "unknown fields schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "type is 'xml', must be one of text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object with a schema"),
        (
            {"response_format": {"type": "json_object", "x": 1}},
            "response_format",
            "x does not go with type json_object",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "it needs triggers"),
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "response_format", "does not go with"),
        ({"response_format": SCHEMA, "ignore_eos": True}, "response_format", "ignore_eos"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_a_token(served, fields, param, message):
    steps = served.num_steps()
    reply = served.post(CHAT, **TALK, **fields)
    error = reply.json["error"]
    assert reply.status == 400 and error["param"] == param and message in error["message"], error
    assert served.num_steps() == steps

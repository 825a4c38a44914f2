"""Tool calls and reasoning over HTTP: answers given by forced_token_ids, and grammars with a real model."""

import json

import openai
import pytest

from ksana_jax import AsyncLLM
from tests.engine.test_structured_outputs import bounded, tiny
from tests.serve.server.serving import serving

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if x %}<tool_call></think>{% endif %}"
)
AGE = bounded(age={"type": "integer", "minimum": 0, "maximum": 120})
TOOLS = [{"type": "function", "function": {"name": name, "parameters": AGE, "strict": True}} for name in ("f", "g")]
LOOSE = [{"type": "function", "function": {"name": "f"}}]
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150}
CALL = '<tool_call>\n{"name": "f", "arguments": {"age": 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def served():
    llm = tiny(max_model_len=512, num_blocks=128)
    llm.tokenizer.set_templates({"default": TEMPLATE, "thinking": TEMPLATE + "<think>"}, "test")
    with serving(AsyncLLM.around(llm)) as server:
        yield server


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def answers(served, text, **fields):
    """The choice of a model that answers with a text, whole and put together from a stream."""
    ids = served.llm.tokenizer.encode(text, add_special_tokens=False)
    asked = {**HI, "forced_token_ids": ids, **fields}
    [whole] = served.post(CHAT, **asked).json["choices"]
    message, reason = {"role": "assistant", "content": ""}, None
    for event in served.post(CHAT, **asked, stream=True).events:
        [choice] = event["choices"]
        reason = choice["finish_reason"]
        for key in ("content", "reasoning_content"):
            if choice["delta"].get(key):
                message[key] = message.get(key, "") + choice["delta"][key]
        for call in choice["delta"].get("tool_calls", ()):
            message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
            assert call["index"] == len(message["tool_calls"]) - 1
    for one in (whole["message"], message):
        for call in one.get("tool_calls", ()):
            assert len(call.pop("id")) == 9
    assert (message["content"] or None) == (whole["message"]["content"] or None) and reason == whole["finish_reason"]
    assert {**message, "content": 0} == {**whole["message"], "content": 0}
    return whole


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names"),
    [
        (CALL, None, None, ["f"]),
        (f"<think>Hm.</think>\n\nSo: {CALL}\n{CALL}", "So:", "Hm.", ["f", "f"]),
        ("<think>Hm.</think>Yes", "Yes", "Hm.", []),
        (CALL.replace('"f"', '"h"'), CALL.replace('"f"', '"h"'), None, []),
        ("<tool_call>{broken", "<tool_call>{broken", None, []),
    ],
)
def test_answers_have_calls_and_reasoning(served, text, content, reasoning, names):
    message = answers(served, text, tools=LOOSE)["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert calls == [{"name": name, "arguments": '{"age": 7}'} for name in names]


def test_channels_are_reasoning_text_and_calls_with_tools_and_without(served, monkeypatch):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", "{{ messages[0].content }}{# <|channel|>analysis #}")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    for fields in ({}, {"tools": LOOSE}):
        message = answers(served, text + "final<|message|>Yes", **fields)["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes", "Hm.")
    call = text + 'commentary to=functions.f <|constrain|>json<|message|>{"age": 7}'
    [made] = answers(served, call, tools=LOOSE)["message"]["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"age": 7}'}
    error = served.post(CHAT, **HI, tools=TOOLS).json["error"]
    assert error["message"] == "tools has strict, which needs tool_choice required with calls of this model"
    schema = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}
    message = served.post(CHAT, **HI, response_format=schema, seed=2).json["choices"][0]["message"]
    assert {*json.loads(message["content"])} == {"age"}


def test_arguments_in_tags_have_the_types_of_the_schema(served, monkeypatch):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", "{{ messages[0].content }}{# <parameter= #}")
    call = "<tool_call>\n<function=f>\n<parameter=age>\n7\n</parameter>\n</function>\n</tool_call>"
    for tools, value in ((LOOSE, "7"), ([{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": False}}], 7)):
        [made] = answers(served, call, tools=tools)["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"age": value}
    with_llamas = served.post(CHAT, **HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1)
    [made] = with_llamas.json["choices"][0]["message"]["tool_calls"]
    assert 0 <= json.loads(made["function"]["arguments"])["age"] <= 120


def test_calls_stay_text_unless_tools_are_wanted(served):
    for fields in ({}, {"tools": LOOSE, "tool_choice": "none"}):
        assert answers(served, CALL, **fields)["message"]["content"] == CALL
    several = answers(served, CALL * 2, tools=LOOSE, parallel_tool_calls=False)["message"]
    assert len(several["tool_calls"]) == 1 and several["content"] is None


def test_a_call_that_is_cut_off_stays_text(served):
    choice = answers(served, CALL, tools=LOOSE, max_tokens=20)
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith("<tool_call>")


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_required_and_named_tools_are_called_with_valid_arguments(served, client, choice, temperature):
    named = {"type": "function", "function": {"name": "g"}}
    settings = {"temperature": temperature, "seed": 1, "parallel_tool_calls": False, "n": 2, "max_tokens": 250}
    answer = client.chat.completions.create(
        model="around",
        messages=HI["messages"],
        tools=TOOLS,
        tool_choice=named if choice == "named" else choice,
        **settings,
    )
    for one in answer.choices:
        [call] = one.message.tool_calls
        assert 0 <= json.loads(call.function.arguments)["age"] <= 120
        assert call.function.name in (("g",) if choice == "named" else ("f", "g"))
        assert one.finish_reason == "tool_calls"


def test_an_answer_that_begins_like_a_call_becomes_a_valid_one_if_tools_are_strict(served, monkeypatch):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", "{{ messages[0].content }}")
    # The model begins with a brace, and then writes what the grammar leaves.
    brace = served.llm.tokenizer.encode("{", add_special_tokens=False)[-1]
    fields = {**HI, "tools": TOOLS, "parallel_tool_calls": False, "temperature": 0, "logit_bias": {str(brace): 90}}
    [choice] = served.post(CHAT, **fields).json["choices"]
    [call] = choice["message"]["tool_calls"]
    assert {*json.loads(call["function"]["arguments"])} == {"age"} and choice["finish_reason"] == "tool_calls"


def test_a_schema_begins_after_the_reasoning(served):
    schema = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}
    fields = {"response_format": schema, "temperature": 1, "seed": 2}
    message = served.post(CHAT, **HI, **fields).json["choices"][0]["message"]
    assert {*json.loads(message["content"])} == {"age"}


WRONG = [
    ({"tools": LOOSE, "response_format": {"type": "json_object"}}, "response_format", "does not go with tools"),
    ({"tools": LOOSE, "structured_outputs": {"regex": "a"}}, "structured_outputs", "unless tool_choice is none"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "tool_choice", "does not go with ignore_eos"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
        "tools",
        'tools has a schema that cannot be enforced: failed to compile JSON schema: Unimplemented keys: ["not"]',
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice",
        "tool_choice is 'h', tools has f, g",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_what_cannot_be_served_is_refused_before_a_token(served, fields, param, message):
    steps = served.num_steps()
    error = served.post(CHAT, **HI, **fields).json["error"]
    assert error["param"] == param and message in error["message"], error
    assert served.num_steps() == steps


def test_earlier_reasoning_reaches_the_template(served, monkeypatch):
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    messages = [{"role": "assistant", "content": "b", "reasoning_content": "a"}]
    ids = served.post("/tokenize", messages=messages).json["tokens"]
    assert ids == served.llm.tokenizer.encode("ab", add_special_tokens=False)

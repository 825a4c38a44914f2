"""/v1/responses: the chat's answer as items, whole and in events, for OpenAI's client."""

import json

import openai
import pytest
from pydantic import BaseModel

from ksana_jax import AsyncLLM
from ksana_jax.serve.server.responses_models import ResponsesRequest
from ksana_jax.serve.server.validation import validate
from tests.engine.test_structured_outputs import bounded, tiny
from tests.serve.server.serving import serving

PATH = "/v1/responses"
AGE = bounded(age={"type": "integer", "minimum": 0, "maximum": 120})
TOOLS = [{"type": "function", "name": "f", "parameters": AGE, "strict": True}]
SHORT = {"input": "hi", "temperature": 0, "max_output_tokens": 120}


class Age(BaseModel):
    age: int


@pytest.fixture(scope="module")
def served():
    llm = tiny(max_model_len=256, num_blocks=64)
    llm.tokenizer.set_templates(
        {"default": "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"}, "test"
    )
    with serving(AsyncLLM.around(llm)) as server:
        yield server


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def test_a_text_is_that_of_the_chat(served, client):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    chat = served.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=8).json
    answer = client.create(model="around", instructions="be", input="hi", temperature=0, max_output_tokens=8)
    assert answer.output_text == chat["choices"][0]["message"]["content"] and answer.status == "incomplete"
    assert answer.usage.total_tokens == chat["usage"]["total_tokens"]


def test_a_schema_is_followed_whole_and_streamed(client):
    whole = client.parse(model="around", text_format=Age, **SHORT)
    with client.stream(model="around", text_format=Age, **SHORT) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert whole.output_parsed == streamed.output_parsed and isinstance(whole.output_parsed, Age)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_tools_are_called_and_their_outputs_are_read(served, client):
    with client.stream(model="around", tools=TOOLS, tool_choice={"type": "function", "name": "f"}, **SHORT) as stream:
        numbers = [event.sequence_number for event in stream if hasattr(event, "sequence_number")]
        [call] = stream.get_final_response().output
    [whole] = client.create(
        model="around", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SHORT
    ).output
    assert (call.name, json.loads(call.arguments)) == (whole.name, json.loads(whole.arguments))
    assert numbers == sorted(numbers)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    history = [{"role": "user", "content": "hi"}, call.model_dump(), output]
    assert client.create(model="around", input=history, max_output_tokens=4).usage.output_tokens == 4


def test_items_become_messages():
    text = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "user", "content": text},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
    ]
    chat = validate(ResponsesRequest, {"input": items, "instructions": "be"}).chat()
    system, user, calls, tool = chat.messages
    assert (system.role, user.content, tool.tool_call_id) == ("system", "a\nb", "1")
    assert calls.reasoning_content == "Hm" and len(calls.tool_calls) == 2


WRONG = {
    "input": [1, [], [{"type": "x"}], [{"role": "user"}], [{"type": "function_call", "call_id": "a"}], "x" * 5000],
    "instructions": [1],
    "max_output_tokens": [0, "5", 1000],
    "temperature": [-1, "hot"],
    "top_p": [0, 2],
    "stream": [1],
    "tools": ["f", [{"type": "web_search"}], [TOOLS[0], TOOLS[0]]],
    "tool_choice": ["any", "required", {"type": "function"}],
    "parallel_tool_calls": [1],
    "text": [1, {"format": {"type": "xml"}}, {"verbosity": "low"}]
    + [{"format": {"type": "json_schema", "schema": {"not": {}}}}],
    "metadata": [1],
    "previous_response_id": ["a"],
    "store": [True],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named_before_a_token_is_computed(served, name):
    steps = served.num_steps()
    for value in WRONG[name]:
        reply = served.post(PATH, **{"input": "hi", name: value})
        assert (reply.status, reply.error["param"]) == (400, name), (value, reply.error)
        assert "messages" not in reply.error["message"] and "response_format" not in reply.error["message"]
    assert served.num_steps() == steps


def test_every_field_has_wrong_values_here():
    unread = {"model", "user", "safety_identifier", "prompt_cache_key"}
    assert set(ResponsesRequest.model_fields) - unread <= set(WRONG)

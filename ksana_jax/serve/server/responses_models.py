"""The body of POST /v1/responses as a pydantic model, and as the chat that answers it."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ksana_jax.serve.server.errors import APIError, bad_request
from ksana_jax.serve.server.message_models import MAX_MESSAGES, MAX_TOOLS, Name, Text, ToolFunction
from ksana_jax.serve.server.request_models import ChatRequest, Named, Positive
from ksana_jax.serve.server.validation import Body, validate

# Fields of a chat by those of a request, for errors.
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}


class Part(Body):
    """A part of a message's content."""

    unsupported: ClassVar = {"annotations": [[]], "logprobs": [[]]}

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: Text
    parsed: Any = None  # which OpenAI's client adds


Content = Annotated[
    list[Part],
    Field(min_length=1, fail_fast=True),
    AfterValidator(lambda parts: "\n".join(part.text for part in parts)),
]


class Item(Body):
    """A message, a call, its output, or the reasoning before an answer."""

    unsupported: ClassVar = {"encrypted_content": [""], "phase": []}

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | Content | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | Content | None = None
    id: Name | None = None
    status: Name | None = None
    summary: list[Any] | None = None
    parsed_arguments: Any = None  # which OpenAI's client adds

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise bad_request(f"input has an item of type {self.type} without {name}", "input")
        return self


class FunctionTool(ToolFunction):
    """A function that the model may call: the fields of a chat's tool in one object."""

    type: Literal["function"]


class NamedFunctionTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    name: Name


class Format(BaseModel):
    """The format of the text, as a chat's `response_format`, a schema's fields in one object."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    """Options of the text."""

    unsupported: ClassVar = {"verbosity": ["medium"]}

    format: Format | None = None


class ResponsesRequest(Named):
    """POST /v1/responses. Nothing is stored: each request brings its whole conversation."""

    unsupported: ClassVar = {
        "background": [False],
        "conversation": [],
        "include": [[]],
        "max_tool_calls": [],
        "previous_response_id": [],
        "prompt": [],
        "reasoning": [{}],
        "service_tier": ["auto", "default"],
        "store": [False],
        "stream_options": [{}],
        "top_logprobs": [0],
        "truncation": ["disabled"],
    }

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = Field(None, description="a system message before the others")
    max_output_tokens: Positive | None = Field(None, description="maximum tokens of output; absent takes what fits")
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    stream: bool = False
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def chat(self) -> ChatRequest:
        """Returns the chat whose answer is that of this request; raises APIError, status 400, in terms of this one."""
        same = "model temperature top_p stream parallel_tool_calls".split()
        body = {name: getattr(self, name) for name in same}
        tools = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        body |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": tool} for tool in tools] or None,
            "tool_choice": choice,
            "response_format": self._format(),
        }
        try:
            return validate(ChatRequest, body)
        except APIError as error:
            raise renamed(error) from None

    def _format(self) -> dict[str, Any] | None:
        if self.text.format is None:
            return None
        given = self.text.format.model_dump()
        if given["type"] != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": {name: v for name, v in given.items() if name != "type"}}

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the input as messages: calls and the reasoning before them are parts of one answer."""
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        reasoning: dict[str, Any] = {}
        for item in items:
            if item.type == "reasoning":
                reasoning = {"reasoning_content": item.content} if item.content else {}
            elif item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            elif item.type == "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None, **reasoning})
                    reasoning = {}
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            else:
                own = reasoning if item.role == "assistant" else {}
                messages.append({"role": item.role, "content": item.content, **own})
                reasoning = {}
        return messages

    def echoed(self) -> dict[str, Any]:
        """Returns the fields that an answer repeats."""
        names = "instructions max_output_tokens temperature top_p tools tool_choice parallel_tool_calls text metadata"
        given = json.loads(self.model_dump_json(include={*names.split()}))
        text = given["text"] if self.text.format else {"format": {"type": "text"}}
        return {**given, "tools": given["tools"] or [], "tool_choice": given["tool_choice"] or "auto", "text": text}


def renamed(error: APIError) -> APIError:
    """Returns an error of a chat in terms of the request that it answers."""
    message = re.sub(rf"\b({'|'.join(_FIELDS)})\b", lambda found: _FIELDS[found[0]], error.message)
    param = _FIELDS.get(error.param or "", error.param)
    return APIError(error.status, message, param=param, code=error.code, retry_after_s=error.retry_after_s)

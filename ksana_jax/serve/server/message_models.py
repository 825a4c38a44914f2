"""Messages and tools of conversations as pydantic models; `request_models` has the requests with them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ksana_jax.serve.server.validation import Body

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
# Characters of a text.
MAX_CHARS = 8 * 2**20

Text = Annotated[str, Field(max_length=MAX_CHARS)]
Name = Annotated[str, Field(max_length=256)]


class TextPart(Body):
    """A part of a message's content. Other services read cache_control; here prefixes are cached without it."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None


class Function(BaseModel):
    """The function of a tool call; the chat template gets all keys."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """A call of a tool in an earlier answer; the chat template gets all keys."""

    model_config = ConfigDict(extra="allow", strict=True)

    function: Function


class ToolFunction(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(pattern=r"^[\w.:/-]{1,128}$")
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments")
    strict: bool | None = Field(None, description="the arguments follow the schema")

    def enforced(self, forced: bool) -> dict[str, Any] | None:
        """Returns the schema that arguments must follow, None for any. forced: whether the request asks for a call."""
        return self.parameters if self.strict or (forced and self.strict is None) else None


class Tool(BaseModel):
    """A tool; the chat template gets the object as it came."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: ToolFunction
    _given: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(given)
        made._given = given
        return made

    def plain(self) -> dict[str, Any]:
        """Returns the tool for a chat template."""
        return self._given


class NamedFunction(Body):
    """The name of a function."""

    name: Name


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


Parts = Annotated[
    list[TextPart],
    Field(min_length=1, fail_fast=True),
    AfterValidator(lambda parts: "\n".join(part.text for part in parts)),
]


class Message(Body):
    """A message of a conversation. Clients send earlier answers back with all keys that they had."""

    unsupported: ClassVar = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"), ([], ""))

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    reasoning_content: Text | None = Field(None, description="of an earlier answer, for the chat template")
    tool_calls: list[ToolCall] = Field([], fail_fast=True)
    name: Name | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", "has tool_calls, its role must be assistant")
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "has neither content nor tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message for a chat template, with a content of None only if the client gave null."""
        given = self.model_dump(exclude_unset=True)
        return {key: value for key, value in given.items() if value is not None or key == "content"}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

"""Bodies of requests as pydantic models: one declaration for validation, defaults and the OpenAPI document.

Knows SamplingParams, no engine. A new field goes into its model; `UNSUPPORTED` has fields of OpenAI and vLLM that this
server refuses.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from ksana_jax.core.request import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from ksana_jax.serve.server.errors import APIError, bad_request
from ksana_jax.serve.server.message_models import MAX_TOOLS, Messages, Name, NamedTool, Text, Tool, ToolFunction
from ksana_jax.serve.server.response_format import structured
from ksana_jax.serve.server.validation import Body

MAX_N = 64
MAX_PROMPTS = 1024
# Token ids of a prompt.
MAX_IDS = 2**18
LARGEST = 2**31 - 1
# Fields of OpenAI and vLLM that are refused, except for values that change nothing.
UNSUPPORTED: dict[str, list[Any]] = {
    "add_special_tokens": [False],
    "audio": [],
    "best_of": [1],
    "chat_template": [],
    "documents": [[]],
    "early_stopping": [False],
    "echo": [False],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "length_penalty": [1],
    "logits_processors": [[]],
    "mm_processor_kwargs": [{}],
    "modalities": [["text"]],
    "prediction": [],
    "priority": [0],
    "reasoning_effort": [],
    "return_tokens_as_token_ids": [False],
    "service_tier": ["auto", "default"],
    "store": [False],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "use_beam_search": [False],
    "vllm_xargs": [{}],
}

# Lists fail at the first wrong entry: pydantic takes a tenth of a second to report 200,000.
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Word], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenIds = Annotated[list[Count], Field(max_length=MAX_IDS, fail_fast=True)]
Ids = Annotated[TokenIds, Field(min_length=1), AfterValidator(lambda ids: np.array(ids, np.int32))]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
LogitBias = Annotated[
    dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"additionalProperties": False}),
    AfterValidator(lambda bias: {int(token): value for token, value in bias.items()}),
]


class Named(Body):
    """A request to one of several models."""

    # The field with the prompt.
    prompt_field: ClassVar[str] = "prompt"

    model: str | None = Field(None, max_length=512, description="one of /v1/models; absent takes the first")


class Prompted(Named):
    """Fields of all that is computed from prompts. The last one is accepted and changes nothing."""

    truncate_prompt_tokens: Positive | Literal[-1] | None = Field(
        None, description="last tokens of the prompt that are kept; -1 keeps what fits with max_tokens"
    )
    request_id: str | None = Field(
        None, min_length=1, max_length=128, description="the end of the answer's id; absent takes a random one"
    )
    cache_salt: Name | None = Field(None, description="divides the prefix cache of your API key further")
    user: str | None = None

    def prompts(self) -> list[str | np.ndarray]:
        """Returns texts, or token ids as int32 [n], of one prompt or several."""
        given: Any = getattr(self, self.prompt_field)
        return [given] if isinstance(given, (str, np.ndarray)) else given


class Sampling(Body):
    """Fields of SamplingParams, with the same defaults."""

    n: int = Field(1, ge=1, le=MAX_N, description="completions of each prompt")
    temperature: float = Field(1.0, ge=0, le=100, description="0 takes the most probable token")
    top_p: float = Field(1.0, gt=0, le=1, description="the smallest set of tokens with this probability is kept")
    top_k: int = Field(0, ge=-1, le=LARGEST, description="most probable tokens kept; 0 or -1 keeps all")
    min_p: float = Field(0.0, ge=0, le=1, description="tokens below min_p x the largest probability are dropped")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted once from logits of tokens in the output")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted for each time a token is in the output")
    repetition_penalty: float = Field(
        1.0, ge=MIN_REPETITION_PENALTY, le=100, description="divides logits of tokens that came before"
    )
    logit_bias: LogitBias | None = Field(None, description="{token id: added to its logit}")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="gives the same tokens in any batch")
    stop: Word | Stops | None = Field(None, description="strings that end the output")
    stop_token_ids: TokenIds | None = Field(None, description="ids that end the output")
    include_stop_str_in_output: bool = Field(False, description="the text has the stop string or token that ended it")
    ignore_eos: bool = Field(False, description="continue after an end-of-sequence id")
    min_tokens: Count = Field(0, description="tokens before an end-of-sequence or stop id")
    bad_words: list[Word] | None = Field(
        None, max_length=MAX_BAD_WORDS, fail_fast=True, description="words that are never completed"
    )
    allowed_token_ids: TokenIds | None = Field(None, min_length=1, description="the only ids that may be chosen")
    forced_token_ids: TokenIds | None = Field(None, min_length=1, description="the output, decoded token by token")
    skip_special_tokens: bool = Field(True, description="omit special tokens from the text")
    prompt_logprobs: NumTop | None = Field(None, description="top tokens returned for each prompt token; not streamed")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="what the text must follow: one of json, regex, choice, grammar, json_object, structural_tag"
    )

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Returns the sampling parameters that these fields ask for.

        Raises:
          APIError: status 400: fields that are each valid contradict each other.
        """
        given = {name: getattr(self, name) for name in Sampling.model_fields}
        if (structured := given["structured_outputs"]) is not None:
            given["structured_outputs"] = {name: value for name, value in structured.items() if value is not None}
        try:
            return SamplingParams(**given | more)
        except ValueError as error:
            raise self.refused(error) from None


class StreamOptions(Body):
    """Options of a stream."""

    unsupported: ClassVar = {"include_obfuscation": [False]}

    include_usage: bool = Field(default=False, description="the last chunk has the usage")
    continuous_usage_stats: bool = Field(default=False, description="every chunk has the usage so far")


class Generation(Prompted, Sampling):
    """Fields that completions and chats share. The last four are accepted and change nothing."""

    unsupported = UNSUPPORTED

    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = Field(False, description="return the token ids of the prompt and of each choice")
    response_format: dict[str, Any] | None = Field(
        None, description="{type: text, json_object, json_schema with json_schema.schema, or structural_tag}"
    )
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    spaces_between_special_tokens: bool | None = None

    def sampling_params(self, **more: Any) -> SamplingParams:
        if self.response_format is not None:
            if self.structured_outputs is not None:
                raise bad_request("response_format does not go with structured_outputs", "response_format")
            try:
                more["structured_outputs"] = structured(self.response_format)
            except ValueError as error:
                raise self.refused(error) from None
        return super().sampling_params(**more)

    def refused(self, error: ValueError) -> APIError:
        if self.response_format is not None:
            error = ValueError(str(error).replace("structured_outputs", "response_format", 1))
        return super().refused(error)

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs does not go with stream", "prompt_logprobs")
        return self


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Text | Texts | Ids | IdLists = Field(description="a text, token ids, or a list of either")
    max_tokens: Count | None = Field(
        None, description="maximum tokens of output; absent takes up to 16 that fit; 0 only with echo"
    )
    logprobs: NumTop | None = Field(None, description="top tokens returned with the log-probability of each token")
    echo: bool = Field(False, description="return the prompt before the output")
    add_special_tokens: bool = Field(True, description="add the tokens that the model's files specify, usually BOS")

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens is 0, must be at least 1 without echo", "max_tokens")
        return self


class EmbeddingRequest(Prompted):
    """POST /v1/embeddings."""

    unsupported: ClassVar = {"embed_dtype": ["float32"], "endianness": ["native", "little"], "priority": [0]}
    prompt_field: ClassVar = "input"
    stream: ClassVar = False
    max_tokens: ClassVar = 1

    input: Text | Texts | Ids | IdLists = Field(description="a text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64 is of float32, little-endian")
    dimensions: Positive | None = Field(None, description="the model's own number only: nothing is truncated")
    pooling_type: Literal["LAST", "MEAN"] = Field("LAST", description="hidden state of the last token, or the mean")
    use_activation: bool = Field(True, description="scale embeddings to length 1")
    add_special_tokens: bool = Field(True, description="add the tokens that the model's files specify, usually BOS")

    def refused(self, error: ValueError) -> APIError:
        return super().refused(ValueError(re.sub("^prompt ", "input ", str(error))))


class Template(Body):
    """Fields that turn messages into a prompt."""

    unsupported = UNSUPPORTED

    add_generation_prompt: bool | None = Field(
        None, description="end the prompt where the assistant's answer begins; the default"
    )
    continue_final_message: bool = Field(False, description="let the model continue the last message")
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the chat template shows to the model"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="more names for the chat template, such as enable_thinking"
    )


class ChatRequest(Template, Generation):
    """POST /v1/chat/completions."""

    prompt_field = "messages"

    messages: Messages = Field(description="the conversation so far")
    max_completion_tokens: Positive | None = Field(None, description="maximum tokens of output; absent takes what fits")
    max_tokens: Positive | None = Field(None, description="an older name of max_completion_tokens")
    logprobs: bool = Field(False, description="return the log-probability of each token")
    top_logprobs: NumTop = Field(0, description="top tokens returned with them")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="whether the answer calls a tool; absent takes auto"
    )
    parallel_tool_calls: bool | None = Field(None, description="false keeps one call of an answer")

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_request(f"top_logprobs is {self.top_logprobs}, must be 0 without logprobs", "top_logprobs")
        return self

    @property
    def functions(self) -> list[ToolFunction]:
        """Returns the functions that the answer may call."""
        choice, tools = self.tool_choice, [tool.function for tool in self.tools or ()]
        if isinstance(choice, NamedTool):
            return [tool for tool in tools if tool.name == choice.function.name]
        return [] if choice == "none" else tools

    @property
    def forces_call(self) -> bool:
        """Returns whether the answer must be a call."""
        return self.tool_choice not in (None, "auto", "none")

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise bad_request(f"tools has {twice!r} twice", "tools")
        if self.forces_call and not self.functions:
            wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else "required"
            raise bad_request(f"tool_choice is {wanted!r}, tools has {', '.join(names) or 'none'}", "tool_choice")
        field = "structured_outputs" if self.structured_outputs is not None else "response_format"
        if self.functions and (getattr(self, field) or {"type": "text"}) != {"type": "text"}:
            raise bad_request(f"{field} does not go with tools, unless tool_choice is none", field)
        return self

    def refused(self, error: ValueError) -> APIError:
        if self.functions:
            # The grammar is made here: its lines say nothing to the client.
            text = re.sub(r"at \d+\(\d+\): | \d+ \| .*", "", str(error))
            text = re.sub("^structured_outputs has a grammar", "tools has a schema", text)
            error = ValueError(text.replace("structured_outputs", "tool_choice" if self.forces_call else "tools", 1))
        return super().refused(error)


class OnePrompt(Named, Template):
    """A text or a conversation."""

    prompt: Text | None = Field(None, description="the text; or messages")
    messages: Messages | None = Field(None, description="a conversation, instead of prompt")
    add_special_tokens: bool | None = Field(
        None, description="add the tokens that the model's files specify; of a conversation, none"
    )

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give prompt or messages, one of them", "prompt")
        if self.messages and self.add_special_tokens:
            raise bad_request("add_special_tokens is true: the template writes special tokens", "add_special_tokens")
        return self


class TokenizeRequest(OnePrompt):
    """POST /tokenize."""

    return_token_strs: bool = Field(False, description="return the text of each token too")


class DetokenizeRequest(Named):
    """POST /detokenize."""

    tokens: TokenIds = Field(description="token ids")


class SaveRequest(OnePrompt):
    """POST /sessions/NAME/save."""

    api_key: str | None = Field(None, min_length=1, max_length=512)
    cache_salt: Name | None = None


class UnloadRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Word


class LoadRequest(UnloadRequest):
    """POST /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=4096)

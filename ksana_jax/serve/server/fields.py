"""The fields of requests: kinds, limits, the settings behind them, and refused fields. Knows no engine.

Tables of this file are validation and documentation alike (`openapi`). `null` means that a field is absent, known or
not.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from ksana_jax.core.request import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_STOP_STRINGS, MIN_REPETITION_PENALTY
from ksana_jax.serve.server import structures
from ksana_jax.serve.server.errors import bad_request
from ksana_jax.serve.server.schema import (
    BOOLEAN,
    OBJECT,
    Ignored,
    Only,
    Schema,
    integer,
    list_of,
    number,
    object_of,
    one_or_list_of,
    optional,
    present,
    read_value,
    text,
)
from ksana_jax.serve.server.structures import LARGEST, MAX_CHARS, MAX_IDS

MAX_N = 64
MAX_STOP_CHARS = 256
MAX_TOOLS = 1024


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a request.

    Args:
      help: one line for the documentation.
      default: the value where the field is absent.
      sets: the field of SamplingParams that it sets.
      read: reads a value, given the field's name; None reads it by its schema.
    """

    schema: Schema
    help: str
    default: Any = None
    sets: str | None = None
    required: bool = False
    read: Callable[[str, Any], Any] | None = None


Fields = Mapping[str, Field]


def _sampling(name: str, schema: Schema, help: str, read: Any = None) -> dict[str, Field]:
    return {name: Field(schema, help, sets=name, read=read)}


_TOKEN_IDS = list_of(integer(0, LARGEST), MAX_IDS)

SAMPLING: Fields = {
    **_sampling("n", integer(1, MAX_N), "number of completions of each prompt"),
    **_sampling("temperature", number(0, 100), "0 takes the most probable token"),
    **_sampling(
        "top_p",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "smallest set of tokens with this probability is kept",
    ),
    **_sampling("top_k", integer(-1, LARGEST), "most probable tokens kept; 0 or -1 keeps all"),
    **_sampling("min_p", number(0, 1), "tokens below min_p x the largest probability are dropped"),
    **_sampling("presence_penalty", number(-2, 2), "subtracted once from the logits of tokens in the output"),
    **_sampling("frequency_penalty", number(-2, 2), "subtracted for each time a token is in the output"),
    **_sampling("repetition_penalty", number(MIN_REPETITION_PENALTY, 100), "divides logits of tokens that came before"),
    **_sampling(
        "logit_bias", structures.LOGIT_BIAS, "{token id: added to its logit}, -100 to 100", structures.read_logit_bias
    ),
    **_sampling("seed", integer(-(2**63), 2**63 - 1), "gives the same tokens in any batch"),
    **_sampling("stop", one_or_list_of(text(MAX_STOP_CHARS, 1), MAX_STOP_STRINGS), "strings that end the output"),
    **_sampling("stop_token_ids", _TOKEN_IDS, "ids that end the output"),
    **_sampling("include_stop_str_in_output", BOOLEAN, "the text has the stop string or token that ended it"),
    **_sampling("ignore_eos", BOOLEAN, "continue after an end-of-sequence id"),
    **_sampling("min_tokens", integer(0, LARGEST), "tokens before an end-of-sequence or stop id"),
    **_sampling("bad_words", list_of(text(256, 1), MAX_BAD_WORDS), "words that are never completed"),
    **_sampling("allowed_token_ids", list_of(integer(0, LARGEST), MAX_IDS, 1), "the only ids that may be chosen"),
    **_sampling("skip_special_tokens", BOOLEAN, "omit special tokens from the text"),
    **_sampling("prompt_logprobs", integer(0, MAX_LOGPROBS), "top tokens returned for each prompt token; not streamed"),
}

_STREAM_OPTIONS = object_of(
    {
        "include_usage": optional(BOOLEAN, "the last chunk has the usage"),
        "continuous_usage_stats": optional(BOOLEAN, "every chunk has the usage so far"),
        "include_obfuscation": optional(Only(False, why="chunks are not padded"), "not supported"),
    }
)

COMMON: Fields = {
    "model": Field(text(512), "one of /v1/models; absent takes the first"),
    **SAMPLING,
    "stream": Field(BOOLEAN, "answer with server-sent events", default=False),
    "stream_options": Field(_STREAM_OPTIONS, "what chunks of a stream have besides text", default={}),
    "truncate_prompt_tokens": Field(
        integer(-1, LARGEST), "the last tokens of the prompt that are kept; -1 keeps what fits with max_tokens"
    ),
    "return_token_ids": Field(BOOLEAN, "return the token ids of the prompt and of each choice", default=False),
    "request_id": Field(text(128, 1), "the end of the answer's id; absent takes a random one"),
    "cache_salt": Field(text(256), "divides the prefix cache of your API key further"),
    "user": Field(Ignored("string"), "for your records"),
    "metadata": Field(Ignored("object"), "for your records"),
    "store": Field(Only(False, why="answers are not stored"), "not supported"),
    "service_tier": Field(Only("auto", "default", why="there is one tier"), "not supported"),
    "safety_identifier": Field(Ignored("string"), "for your records"),
    "prompt_cache_key": Field(Ignored("string"), "for your records"),
    "priority": Field(Only(0, why="requests have no priorities"), "not supported"),
    "best_of": Field(Only(1, why="use n"), "not supported"),
    "use_beam_search": Field(Only(False, why="beams are not served over HTTP"), "not supported"),
    "length_penalty": Field(Only(1, why="beams are not served over HTTP"), "not supported"),
    "early_stopping": Field(Only(False, why="beams are not served over HTTP"), "not supported"),
    "spaces_between_special_tokens": Field(Ignored("boolean"), "a tokenizer's own spaces are kept"),
    "response_format": Field(Only({"type": "text"}, why="output is plain text"), "not supported"),
    "logits_processors": Field(Only([], why="use logit_bias, allowed_token_ids or bad_words"), "not supported"),
    "return_tokens_as_token_ids": Field(Only(False, why="tokens are shown as texts"), "not supported"),
    "vllm_xargs": Field(Only({}, why="there are no further arguments"), "not supported"),
}

COMPLETIONS: Fields = {
    "prompt": Field(
        structures.PROMPTS,
        "a text, a list of texts, token ids, or a list of lists of token ids",
        required=True,
        read=structures.read_prompts,
    ),
    **COMMON,
    "max_tokens": Field(integer(0, LARGEST), "maximum tokens of output; 0 only with echo", sets="max_tokens"),
    "logprobs": Field(
        integer(0, MAX_LOGPROBS), "top tokens whose log-probabilities are returned for each token", sets="logprobs"
    ),
    "echo": Field(BOOLEAN, "return the prompt before the output", default=False),
    "add_special_tokens": Field(BOOLEAN, "add the tokens that the model's files specify, usually BOS", default=True),
    "suffix": Field(Only("", why="text is not inserted"), "not supported"),
}

_TOOLS = "calls of tools are not enforced, and stay text in answers"
# Fields that turn messages into a prompt.
_TEMPLATE: Fields = {
    "add_generation_prompt": Field(BOOLEAN, "end the prompt where the assistant's answer begins; the default"),
    "continue_final_message": Field(BOOLEAN, "let the model continue the last message", default=False),
    "tools": Field(list_of(OBJECT, MAX_TOOLS), "functions that the chat template shows to the model"),
    "chat_template_kwargs": Field(OBJECT, "more names for the chat template, such as enable_thinking"),
    "chat_template": Field(Only(why="templates are the server's, requests bring none"), "not supported"),
    "documents": Field(Only([], why="give them in chat_template_kwargs"), "not supported"),
}

CHAT: Fields = {
    "messages": Field(structures.MESSAGES, "the conversation so far", required=True, read=structures.read_messages),
    **COMMON,
    "max_completion_tokens": Field(integer(1, LARGEST), "maximum tokens of output", sets="max_tokens"),
    "max_tokens": Field(integer(1, LARGEST), "an older name of max_completion_tokens", sets="max_tokens"),
    "logprobs": Field(BOOLEAN, "return the log-probability of each token", default=False),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS), "top tokens returned with them", default=0),
    **_TEMPLATE,
    "tool_choice": Field(Only("none", "auto", why=_TOOLS), "of no effect"),
    "parallel_tool_calls": Field(Ignored("boolean"), "of no effect"),
    "functions": Field(Only([], why="an older name of tools"), "not supported"),
    "function_call": Field(Only("none", "auto", why=_TOOLS), "of no effect"),
    "modalities": Field(Only(["text"], why="output is plain text"), "not supported"),
    "audio": Field(Only(why="only text content is supported"), "not supported"),
    "prediction": Field(Only(why="predicted outputs are not supported"), "not supported"),
    "echo": Field(Only(False, why="the template's text is no part of an answer"), "not supported"),
    "add_special_tokens": Field(Only(False, why="the chat template writes special tokens"), "not supported"),
    "mm_processor_kwargs": Field(Only({}, why="only text content is supported"), "not supported"),
    "reasoning_effort": Field(Only(why="the model's template decides"), "not supported"),
}

_ONE_PROMPT: Fields = {
    "model": COMMON["model"],
    "prompt": Field(text(MAX_CHARS), "the text; or messages"),
    "messages": Field(structures.MESSAGES, "a conversation, in the place of prompt", read=structures.read_messages),
    "add_special_tokens": Field(BOOLEAN, "add the tokens that the model's files specify; of a conversation, none"),
    **_TEMPLATE,
}

TOKENIZE: Fields = {
    **_ONE_PROMPT,
    "return_token_strs": Field(BOOLEAN, "return the text of each token too", default=False),
}

SAVE_SESSION: Fields = {
    **_ONE_PROMPT,
    "api_key": Field(text(512, 1), "the client's key, whose prefix cache has the text; absent where clients have none"),
    "cache_salt": COMMON["cache_salt"],
}

UNLOAD_ADAPTER: Fields = {"lora_name": Field(text(256, 1), "name of the adapter", required=True)}
LOAD_ADAPTER: Fields = {
    **UNLOAD_ADAPTER,
    "lora_path": Field(text(4096, 1), "its folder, on the server's machine", required=True),
}

DETOKENIZE: Fields = {
    "model": COMMON["model"],
    "tokens": Field(_TOKEN_IDS, "token ids", required=True),
}


def read_fields(body: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Returns the values of all fields; those that are absent have their default.

    Raises:
      APIError: status 400: a field is unknown or missing, or its value is not of its kind.
    """
    body = present(body)
    if unknown := [name for name in body if name not in fields]:
        near = difflib.get_close_matches(unknown[0][:64], fields, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise bad_request(f"field {unknown[0]!r:.80} is unknown{hint}", unknown[0][:80], "unknown_parameter")
    values = {}
    for name, field in fields.items():
        if name in body:
            value = body[name]
            values[name] = field.read(name, value) if field.read else read_value(name, value, field.schema)
        elif field.required:
            raise bad_request(f"{name} is missing", name, "missing_required_parameter")
        else:
            values[name] = field.default
    return values


def sampling_settings(values: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Returns the keywords of SamplingParams for those fields that were given."""
    pairs = [(field.sets, values[name]) for name, field in fields.items() if field.sets]
    settings = {}
    for name, value in pairs:
        if value is not None:
            settings.setdefault(name, value)
    return settings

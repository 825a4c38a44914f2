"""The server's OpenAPI document, made from the tables of `fields`. Knows no engine."""

from __future__ import annotations

import functools
from typing import Any

from ksana_jax.serve.server.auth import OPEN_PATHS
from ksana_jax.serve.server.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, Fields

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_STATUSES = {
    "400": "a field or the body is wrong",
    "401": "no valid API key",
    "404": "the model does not exist",
    "405": "the path does not take this method",
    "408": "the body did not arrive in time",
    "413": "the body is too long",
    "415": "the body is not application/json",
    "431": "line and headers are too long",
    "429": "the queue is full",
    "500": "the request failed",
    "503": "the model is loading, or the server shuts down",
}
_POSTED = {
    "/v1/completions": ("Continue texts or token ids", COMPLETIONS, "completion"),
    "/v1/chat/completions": ("Answer a conversation", CHAT, "completion"),
    "/tokenize": ("Token ids of a text or a conversation", TOKENIZE, "tokens"),
    "/detokenize": ("Text of token ids", DETOKENIZE, "text"),
}
_READ = {
    "/health": "Whether the engine lives",
    "/ready": "Whether requests are taken",
    "/v1/models": "Names of the model",
    "/version": "Version of ksana_jax",
    "/openapi.json": "This document",
    "/tokenizer_info": "Special tokens and chat template",
}
_USAGE = {
    "type": "object",
    "properties": {
        **{name: {"type": "integer", "minimum": 0} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": {"type": "integer", "minimum": 0}},
            "required": ["cached_tokens"],
        },
    },
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
}
_CHOICE = {
    "type": "object",
    "properties": {
        "index": {"type": "integer", "minimum": 0},
        "text": {"type": "string"},
        "message": {"type": "object"},
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length"]},
    },
    "required": ["index", "logprobs", "finish_reason"],
}
_ANSWERS: dict[str, dict[str, Any]] = {
    "completion": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"enum": ["text_completion", "chat.completion"]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string"},
            "choices": {"type": "array", "items": _CHOICE, "minItems": 1},
            "usage": _USAGE,
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    },
    "tokens": {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 0},
            "max_model_len": {"type": "integer", "minimum": 1},
            "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        },
        "required": ["count", "max_model_len", "tokens"],
    },
    "text": {"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
    "any": {"type": "object"},
}


@functools.cache
def document(version: str, guarded: bool = False) -> dict[str, Any]:
    """Returns the document (OpenAPI 3.1). guarded: whether requests need a key."""
    paths: dict[str, Any] = {path: {"get": _operation(summary, "any")} for path, summary in _READ.items()}
    for path in OPEN_PATHS:
        paths[path]["get"]["security"] = []
    for path, (summary, fields, answer) in _POSTED.items():
        body = {"required": True, "content": {"application/json": {"schema": body_schema(fields)}}}
        paths[path] = {"post": {**_operation(summary, answer), "requestBody": body}}
        if "stream" in fields:
            # Before OpenAPI 3.2, the schema of a stream is read as that of each event.
            events = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}}
            paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = events
    return {
        "openapi": "3.1.0",
        "info": {"title": "ksana_jax", "version": version, "description": "An OpenAI-compatible server."},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": {"Error": _ERROR}},
        "security": [{"key": []}] if guarded else [],
    }


def _operation(summary: str, answer: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {
        "200": {"description": "the answer", "content": {"application/json": {"schema": _ANSWERS[answer]}}}
    }
    for status, description in _STATUSES.items():
        responses[status] = {"description": description, "content": error}
    return {"summary": summary, "responses": responses}


def body_schema(fields: Fields) -> dict[str, Any]:
    """Returns the JSON schema of a request's body; null means that a field is absent."""
    return {
        "type": "object",
        "properties": {
            name: {
                **(field.kind.schema() if field.required else {"anyOf": [field.kind.schema(), {"type": "null"}]}),
                "description": field.help,
            }
            for name, field in fields.items()
        },
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": {"type": "null"},
    }

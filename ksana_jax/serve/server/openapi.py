"""The server's OpenAPI document: paths and answers, and the models of requests. Knows no engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from ksana_jax.serve.server import request_models
from ksana_jax.serve.server.auth import OPEN_PATHS
from ksana_jax.serve.server.responses_models import ResponsesRequest

Schema = dict[str, Any]
_OBJECT: Schema = {"type": "object"}
_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def _answer(required: Mapping[str, Schema], more: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(more or {})}, "required": [*required]}


_NO_TEXT = {"type": ["string", "null"]}
_ERROR = _answer({"error": _answer({"message": _TEXT, "type": _TEXT, "param": _NO_TEXT, "code": _NO_TEXT})})
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
    "/v1/completions": ("Continue texts or token ids", request_models.CompletionRequest, "completion"),
    "/v1/chat/completions": ("Answer a conversation", request_models.ChatRequest, "completion"),
    "/v1/responses": ("Answer a conversation by items", ResponsesRequest, "any"),
    "/v1/embeddings": ("Embeddings of texts or token ids", request_models.EmbeddingRequest, "any"),
    "/tokenize": ("Token ids of a text or a conversation", request_models.TokenizeRequest, "tokens"),
    "/detokenize": ("Text of token ids", request_models.DetokenizeRequest, "text"),
}
_READ = {
    "/health": "Whether the engine is alive",
    "/ready": "Whether requests are taken",
    "/v1/models": "Names of the model",
    "/version": "Version of ksana_jax",
    "/openapi.json": "This document",
    "/tokenizer_info": "Special tokens and chat template",
}
_USAGE = _answer(
    {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT),
        "prompt_tokens_details": _answer(
            {"cached_tokens": _COUNT}, {"cached_key_tokens": _COUNT, "cached_state_tokens": _COUNT}
        ),
    }
)
_CHOICE = _answer(
    {
        "index": _COUNT,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    },
    {"text": _TEXT, "message": _OBJECT},
)
_ANSWERS: dict[str, Schema] = {
    "completion": _answer(
        {
            "id": _TEXT,
            "object": {"enum": ["text_completion", "chat.completion"]},
            "created": {"type": "integer"},
            "model": _TEXT,
            "choices": {"type": "array", "items": _CHOICE, "minItems": 1},
            "usage": _USAGE,
        },
        {"system_fingerprint": _TEXT},
    ),
    "tokens": _answer(
        {
            "count": _COUNT,
            "max_model_len": {"type": "integer", "minimum": 1},
            "tokens": {"type": "array", "items": _COUNT},
        }
    ),
    "text": _answer({"prompt": _TEXT}),
    "any": _OBJECT,
}


@functools.cache
def document(version: str, guarded: bool = False) -> dict[str, Any]:
    """Returns the document (OpenAPI 3.1). guarded: whether requests need a key."""
    paths: dict[str, Any] = {path: {"get": _operation(summary, "any")} for path, summary in _READ.items()}
    for path in OPEN_PATHS:
        paths[path]["get"]["security"] = []
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for _, model, _ in _POSTED.values()]
    bodies, found = models_json_schema(models, ref_template="#/components/schemas/{model}")
    for path, (summary, model, answer) in _POSTED.items():
        body = {"required": True, "content": {"application/json": {"schema": bodies[model, "validation"]}}}
        paths[path] = {"post": {**_operation(summary, answer), "requestBody": body}}
        if "stream" in model.model_fields:
            # Before OpenAPI 3.2, the schema of a stream is read as each event's.
            events = {"schema": _answer({"data": _TEXT})}
            paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = events
    return {
        "openapi": "3.1.0",
        "info": {"title": "ksana_jax", "version": version, "description": "An OpenAI-compatible server."},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR, **found["$defs"]},
        },
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

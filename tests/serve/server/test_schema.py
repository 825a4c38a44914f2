"""The OpenAPI document against the server, in process: schemathesis draws requests from it, right and wrong ones."""

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from ksana_jax.serve.server.app import make_app
from ksana_jax.serve.server.auth import OPEN_PATHS
from ksana_jax.serve.server.openapi import document
from ksana_jax.serve.server.settings import ServerSettings
from tests.serve.server.serving import make_llm

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


def plain(body):
    """A valid body for the served model, with texts of its vocabulary, and the other drawn fields."""
    if not isinstance(body, dict):
        return body
    for name in {"model", "min_tokens", "allowed_token_ids", "stop_token_ids"} & body.keys():
        body[name] = None
    if isinstance(body.get("prompt"), (str, list)):
        body["prompt"] = "hi" if isinstance(body["prompt"], str) else [1, 2, 3]
    for message in body.get("messages") or ():
        content = message.get("content")
        message["content"] = [{"type": "text", "text": "hi"}] if isinstance(content, list) else "hi"
        if message["role"] != "assistant":
            message["tool_calls"] = None
    if "input" in body:
        return {"input": "hi", **{name: body[name] for name in {"top_p", "stream", "user", "metadata"} & body.keys()}}
    if all(body.get(name) is None for name in ("prompt", "messages", "tokens")):
        body["prompt"] = "hi"
    if "tokens" in body:
        body["tokens"] = [1, 2, 3]
    for name in {"max_tokens", "max_completion_tokens"} & body.keys():
        body[name] = 2
    return body


@pytest.fixture(scope="module")
def app():
    llm = make_llm()
    yield make_app(llm, ServerSettings(allowed_hosts=("testserver",)))
    llm.close()


@pytest.fixture(scope="module")
def schema(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


OPERATIONS = [(path, method) for path, item in document("1")["paths"].items() for method in item]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_replies_are_as_documented(schema, path, method, mode):
    operation = schema[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and method == "get":
        pytest.skip("a GET has no body that could be wrong")

    answered = []

    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(max_examples=20, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    def check(case):
        case.call_and_validate(checks=CHECKS)
        if mode is schemathesis.GenerationMode.POSITIVE:
            case.body = plain(case.body)
            answered.append(case.call_and_validate(checks=CHECKS).status_code)

    check()
    assert mode is schemathesis.GenerationMode.NEGATIVE or 5 * answered.count(200) >= len(answered), answered


def test_the_document_is_valid_and_lists_defaults_and_limits():
    schemathesis.openapi.from_dict(document("1")).validate()
    for model, required in (("CompletionRequest", ["prompt"]), ("ChatRequest", ["messages"])):
        schema = document("1")["components"]["schemas"][model]
        assert schema["required"] == required
        count, nothing = schema["properties"]["n"]["anyOf"]
        assert (schema["properties"]["n"]["default"], count["minimum"], count["maximum"]) == (1, 1, 64)
        assert nothing == {"type": "null"} and schema["properties"]["best_of"]["enum"] == [1, None]


def test_what_needs_no_key_says_so_in_the_document():
    paths = document("1", guarded=True)["paths"]
    assert document("1", guarded=True)["security"] == [{"key": []}]
    operations = {path: operation for path, item in paths.items() for operation in item.values()}
    assert {path for path, operation in operations.items() if operation.get("security") == []} == OPEN_PATHS


def test_the_document_has_the_routes_that_answer_with_json(app):
    documented = set(document("1")["paths"])
    routes = {route.path for route in app.routes}
    assert documented - routes == set()
    others = {"/", "/live", "/v1/models/", "/kv_events", "/metrics", "/v1/models/{name:path}"}
    assert routes - documented == others

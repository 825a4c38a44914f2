"""API keys: everything but two paths is behind them, and prefixes are cached separately for each key."""

import ast
import http.client
from pathlib import Path

import pytest
from starlette.routing import Route

import ksana_jax.serve.server.auth
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.server.app import make_app
from ksana_jax.serve.server.settings import ServerSettings, read_api_keys
from tests.serve.server.serving import make_llm, serving

KEYS = ("secret-1", "secret-2")


@pytest.fixture(scope="module")
def guarded():
    with serving(api_keys=KEYS) as server:
        yield server


def test_every_route_but_three_needs_a_key(guarded):
    app = make_app(None, ServerSettings(api_keys=KEYS))
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes) > 10
    for route in routes:
        path = route.path.replace("{name:path}", "ksana")
        for method in sorted(route.methods or ()):
            reply = guarded.ask(method, path, {} if method == "POST" else None)
            # The page has no data in it: what it shows is behind the key.
            expected = 200 if path in ("/health", "/ready", "/") else 401
            assert reply.status == expected, (method, path)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/nothing",
        "//v1/models",
        "/v1/models/",
        "/V1/models",
        "/health/",
        "/health/../v1/models",
        "/%2e%2e/v1/models",
        "/health%2f..%2fv1/models",
        "/health;/v1/models",
        "/ready/x",
        "http://localhost/health",
        "*",
    ],
)
def test_spellings_of_paths_do_not_pass_without_a_key(guarded, path):
    assert guarded.ask("GET", path).status in (400, 401)


@pytest.mark.parametrize("host", ["a/health?", "localhost/health", "x:80/health#", "/health"])
def test_the_header_host_does_not_matter(guarded, host):
    # CVE-2026-48746: a URL was built from it, and the path read from that.
    assert guarded.ask("GET", "/v1/models", host=host).status in (400, 401)


@pytest.mark.parametrize(
    "given",
    [
        "secret-1",
        "Basic secret-1",
        "Bearer",
        "Bearer ",
        "Bearer secret",
        "Bearer secret-12",
        "Bearer secret-1, secret-2",
        "Bearer sécret",
        "Bearer " + "x" * 10_000,
    ],
)
def test_wrong_keys_are_refused(guarded, given):
    reply = guarded.ask("GET", "/v1/models", authorization=given)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer" and "secret" not in reply.error["message"]


def test_two_keys_at_once_are_refused(guarded):
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=10)
    connection.putrequest("GET", "/v1/models")
    connection.putheader("authorization", "Bearer wrong")
    connection.putheader("authorization", "Bearer secret-1")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


@pytest.mark.parametrize("key", KEYS)
def test_right_keys_pass(guarded, key):
    assert guarded.ask("GET", "/v1/models", authorization=f"Bearer {key}").status == 200
    assert guarded.ask("GET", "/v1/models", authorization=f"bearer {key}").status == 200


def test_keys_are_compared_in_constant_time():
    tree = ast.parse(Path(ksana_jax.serve.server.auth.__file__).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "compare_digest" in names
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    parts = {part.id for node in compared for part in (node.left, *node.comparators) if isinstance(part, ast.Name)}
    assert not parts & {"token", "given", "value", "keys"}, "a key is compared with == or in"


def test_prefixes_are_shared_within_a_key_and_a_salt_only():
    fields = {"prompt": "a prompt of some blocks", "max_tokens": 1}

    def cached(server, key, **more):
        reply = server.ask("POST", "/v1/completions", {**fields, **more}, authorization=f"Bearer {key}")
        return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(make_llm(), api_keys=KEYS) as server:
        assert cached(server, "secret-1") == 0 < cached(server, "secret-1")
        assert cached(server, "secret-2") == 0 < cached(server, "secret-2")
        assert cached(server, "secret-1", cache_salt="mine") == 0 < cached(server, "secret-1", cache_salt="mine")
        # Another key's salt, as far as a client can write it, is not that key's.
        assert cached(server, "secret-2", cache_salt="mine") == 0


def test_key_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nsecret-1\n\n  secret-2  \n")
    assert read_api_keys(file) == KEYS
    for text in ("", "# none\n", "a b\n", "schlüssel\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="key"):
            read_api_keys(file)
    assert "secret" not in repr(ServerSettings(api_keys=KEYS))

"""Web pages may ask a server without keys only from its own origin or a configured one, and by its own names."""

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.server.settings import ServerSettings
from tests.serve.server.serving import serving

FIELDS = {"prompt": "a", "max_tokens": 1}
COMPLETIONS = "/v1/completions"
PREFLIGHT = {
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": "authorization,content-type,x-stainless-os",
}


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[fe80::1%eth0]", "10.0.0.1"]
)
def test_a_server_on_this_machine_answers_by_localhost_and_addresses(served, host):
    assert served.ask("GET", "/v1/models", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "a@localhost", "127.0.0.1.evil.example", "[", ""]
)
def test_it_refuses_other_names(served, host):
    for method, path, body in (("GET", "/v1/models", None), ("GET", "/", None), ("POST", COMPLETIONS, FIELDS)):
        reply = served.ask(method, path, body, Host=host)
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert served.ask("GET", "/health", Host=host).status == served.ask("GET", "/ready", Host=host).status == 200


def test_names_may_be_configured():
    with serving(allowed_hosts=("GPU1.lan",)) as server:
        assert server.ask("GET", "/v1/models", Host="gpu1.lan:8000").status == 200
        assert server.ask("GET", "/v1/models", Host="gpu2.lan:8000").status == 403


def test_only_pages_of_the_server_may_send_requests(served):
    own = f"127.0.0.1:{served.port}"
    assert served.ask("POST", COMPLETIONS, FIELDS, Origin=f"http://{own}").status == 200
    for origin in ("null", "https://evil.example", f"http://localhost:{served.port}", "http://127.0.0.1:1"):
        reply = served.ask("POST", COMPLETIONS, FIELDS, Origin=origin)
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed"), origin
    assert "access-control-allow-origin" not in served.ask("GET", "/v1/models", Origin="https://evil.example").headers
    assert served.ask("OPTIONS", COMPLETIONS, Origin="https://evil.example", **PREFLIGHT).status == 405


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_pages_of_a_configured_origin_may_ask(keys):
    key = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    with serving(allowed_origins=("https://chat.example",), api_keys=keys) as server:
        reply = server.ask("OPTIONS", COMPLETIONS, Origin="https://chat.example", **PREFLIGHT)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
        reply = server.ask("POST", COMPLETIONS, FIELDS, Origin="https://chat.example", **key)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert server.ask("OPTIONS", COMPLETIONS, Origin="https://evil.example", **PREFLIGHT).status == 400
        reply = server.ask("POST", COMPLETIONS, FIELDS, Origin="https://evil.example", **key)
        assert reply.status == (200 if keys else 403) and "access-control-allow-origin" not in reply.headers


def test_origins_are_checked_when_they_are_set():
    for wrong in ("chat.example", "https://chat.example/", "https://", ""):
        with pytest.raises(ConfigError, match="allowed_origins has"):
            ServerSettings(allowed_origins=(wrong,))
    ServerSettings(allowed_origins=("*", "https://chat.example:8443", "app://obsidian.md"))

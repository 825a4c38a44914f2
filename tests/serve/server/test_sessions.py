"""The server's owner saves and restores sessions by name, in the server's folder."""

from pathlib import Path

import pytest

from ksana_jax import LoRARequest
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.serve.server.settings import ServerSettings, read_lora_modules
from tests.engine import small
from tests.serve.server.serving import serving

GOLDEN = Path(__file__).parents[2] / "golden"
TEXT = "the other inn and the hen in the tin"


def served(folder, **settings):
    llm = small.make_llm(small.Letters(), block_size=4, num_blocks=64, enable_prefix_caching=True)
    return serving(AsyncLLM.around(llm), session_dir=str(folder), admin_keys=("owner",), **settings)


def post(server, path, body, key="owner"):
    return server.ask("POST", path, body, authorization=f"Bearer {key}")


def answer(server, key="a", **more):
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **more}
    reply = post(server, "/v1/completions", body, key)
    return reply.json["choices"][0]["text"], reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_another_server_continues_a_clients_text_for_that_client_alone(tmp_path):
    with served(tmp_path, api_keys=("a", "b")) as server:
        answer(server, cache_salt="mine")
        expected, _ = answer(server, "b", prompt=TEXT + " inn", cache_salt="other")
        saved = post(server, "/sessions/inn.1/save", {"prompt": TEXT, "api_key": "a", "cache_salt": "mine"})
        count = saved.json["num_tokens"]
        assert (saved.status, saved.json) == (200, {"name": "inn.1", "num_tokens": count}) and count > 8
        for given, param in (({"api_key": "b"}, "name"), ({"api_key": "c"}, "api_key"), ({}, "api_key")):
            reply = post(server, "/sessions/other/save", {"prompt": TEXT, **given})
            assert (reply.status, reply.error["param"]) == (400, param)
    assert [path.name for path in tmp_path.iterdir()] == ["inn.1"]
    (tmp_path / "inn.1" / ".blocks-0123.safetensors.01234567.tmp").write_bytes(b"of a server that was killed")
    with served(tmp_path, api_keys=("a", "b")) as server:
        assert len(list((tmp_path / "inn.1").iterdir())) == 2
        reply = post(server, "/sessions/inn.1/restore", {})
        assert (reply.status, reply.json) == (200, {"name": "inn.1", "num_tokens": count})
        assert answer(server, "b", prompt=TEXT + " inn", cache_salt="mine") == (expected, 0)
        assert answer(server, prompt=TEXT + " inn", cache_salt="mine") == (expected, count)


def test_a_session_of_an_adapter_has_the_adapters_prefix(tmp_path):
    [adapter] = read_lora_modules([f"tuned={GOLDEN / 'lora' / 'llama-gqa-tied-plain'}"])
    gone = LoRARequest("gone", 2, str(tmp_path / "gone"))
    asked = {"prompt": TEXT}
    options = {"block_size": 4, "num_blocks": 64, "enable_lora": True, "enable_prefix_caching": True}

    def restarted():
        llm = small.make_llm(small.Letters(), folder=GOLDEN / "llama-gqa-tied", **options)
        settings = {"session_dir": str(tmp_path), "admin_keys": ("owner",), "served_model_names": ("base",)}
        return serving(AsyncLLM.around(llm), lora_modules=(adapter, gone), **settings)

    with restarted() as server:
        answer(server, model="tuned")
        reply = post(server, "/sessions/base/save", asked | {"model": "base"})
        assert reply.status == 400 and "is cached" in reply.error["message"]
        answer(server, model="base", prompt=TEXT[:9])
        found = [post(server, f"/sessions/{name}/save", asked | {"model": name}).json for name in ("base", "tuned")]
        shorter, count = (session["num_tokens"] for session in found)
        assert count > shorter > 0
        expected, _ = answer(server, model="tuned", prompt=TEXT + " inn")
        reply = post(server, "/sessions/gone/save", asked | {"model": "gone"})
        assert (reply.status, reply.error["param"]) == (400, "model") and "adapter 'gone'" in reply.error["message"]
    with restarted() as server:
        assert post(server, "/sessions/tuned/restore", {}).json["num_tokens"] == count
        assert answer(server, model="base", prompt=TEXT + " inn")[1] == 0
        assert answer(server, model="tuned", prompt=TEXT + " inn") == (expected, count)


@pytest.fixture(scope="module")
def owned(tmp_path_factory):
    with served(tmp_path_factory.mktemp("sessions") / "inside") as server:
        yield server


def test_a_conversation_is_saved_where_clients_have_no_keys(owned):
    body = {"messages": [{"role": "user", "content": TEXT}]}
    reply = owned.ask("POST", "/v1/chat/completions", body | {"max_tokens": 4, "temperature": 0})
    assert reply.status == 200
    assert post(owned, "/sessions/chat/save", body).json["num_tokens"] > 8
    assert post(owned, "/sessions/chat/restore", {}).status == 200


@pytest.mark.parametrize("key", ["", "client"])
def test_only_the_owners_key_reaches_sessions(owned, key):
    for path in ("/sessions/x/save", "/sessions/x/restore", "/sessions/x"):
        assert post(owned, path, {}, key).status == 401
    assert owned.ask("GET", "/v1/models").status == 200


@pytest.mark.parametrize("name", ["..", ".hidden", "a%2fb", "..%2fx", "%00", "a b", "é", "x" * 129, "a%5cb"])
def test_names_do_not_leave_the_folder(owned, name):
    path = f"/sessions/{name}/restore".replace(" ", "%20").replace("é", "%C3%A9")
    assert post(owned, path, {}).status in (400, 404)


def test_what_cannot_be_saved_or_restored_is_one_line(owned):
    for path, body, said in [
        ("/sessions/none/restore", {}, "session.json cannot be read: No such file or directory"),
        ("/sessions/none/save", {"prompt": "tin"}, "nothing of request 'none' is cached"),
        ("/sessions/none/save", {}, "give prompt or messages"),
        ("/sessions/none/restore", {"path": "/tmp"}, "path is an unknown field"),
    ]:
        reply = post(owned, path, body)
        assert reply.status == 400 and said in reply.error["message"]


def test_a_folder_without_owners_keys_is_refused_and_without_a_folder_there_are_no_paths():
    with pytest.raises(ConfigError, match="session_dir is 'x' and needs admin_keys"):
        ServerSettings(session_dir="x")
    with serving(admin_keys=("owner",)) as server:
        assert post(server, "/sessions/x/restore", {}).status == 404

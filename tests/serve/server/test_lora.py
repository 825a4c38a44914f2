"""Adapters over HTTP: listed as models, and chosen by the model of a request."""

from pathlib import Path

import pytest

from ksana_jax import LoRARequest, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.serve.server.settings import ServerSettings, read_lora_modules
from tests.engine.small import make_llm
from tests.serve.server.serving import Letters, serving

GOLDEN = Path(__file__).parents[2] / "golden"
MODULES = read_lora_modules([f"{name}={GOLDEN / 'lora' / f'llama-gqa-tied-{name}'}" for name in ("plain", "all")])
ASKED = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def llm():
    return make_llm(Letters(), folder=GOLDEN / "llama-gqa-tied", enable_lora=True, max_loras=2)


@pytest.fixture(scope="module")
def usual(llm):
    asked = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    outputs = [llm.generate([5, 6, 7, 8], asked, lora_request=lora) for lora in (None, *MODULES)]
    return [output.outputs[0].token_ids for [output] in outputs]


@pytest.fixture(scope="module")
def served(llm, usual):
    with serving(AsyncLLM.around(llm), served_model_names=("base", "alias"), lora_modules=MODULES) as server:
        yield server


def test_adapters_are_listed_as_models_of_the_base(served):
    models = served.ask("GET", "/v1/models").json["data"]
    assert [(model["id"], model["parent"]) for model in models] == [
        ("base", None),
        ("alias", None),
        ("plain", "base"),
        ("all", "base"),
    ]
    assert served.ask("GET", "/v1/models/plain").json["root"] == "base"


def test_the_model_of_a_request_chooses_its_adapter(served, usual):
    for model, expected in zip(("base", "plain", "all"), usual, strict=True):
        reply = served.ask("POST", "/v1/completions", ASKED | {"model": model})
        assert (reply.status, reply.json["model"]) == (200, model)
        assert reply.json["choices"][0]["token_ids"] == expected
    assert served.ask("POST", "/v1/completions", ASKED).json["choices"][0]["token_ids"] == usual[0]
    assert served.ask("POST", "/v1/completions", ASKED | {"model": "alias"}).json["model"] == "base"


def test_chats_choose_an_adapter_too(served):
    asked = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "temperature": 0}
    replies = [served.ask("POST", "/v1/chat/completions", asked | {"model": name}).json for name in ("base", "all")]
    assert [reply["model"] for reply in replies] == ["base", "all"]
    assert replies[0]["choices"][0]["message"] != replies[1]["choices"][0]["message"]


def test_streams_name_the_adapter(served):
    reply = served.ask("POST", "/v1/completions", ASKED | {"model": "all", "stream": True})
    assert reply.status == 200 and b'"model":"all"' in reply.body.replace(b" ", b"")


def test_an_unknown_model_is_told_the_adapters(served):
    reply = served.ask("POST", "/v1/completions", ASKED | {"model": "none"})
    assert reply.status == 404
    assert reply.json["error"]["message"] == "model 'none' does not exist; served: base, alias, plain, all"


def test_an_adapter_that_cannot_be_read_ends_its_request_only(llm, usual, tmp_path):
    modules = (*MODULES, LoRARequest("gone", 3, str(tmp_path / "gone")))
    with serving(AsyncLLM.around(llm), lora_modules=modules) as server:
        reply = server.ask("POST", "/v1/completions", ASKED | {"model": "gone"})
        assert reply.status == 400 and "adapter 'gone'" in reply.json["error"]["message"]
        reply = server.ask("POST", "/v1/completions", ASKED | {"model": "plain"})
        assert reply.json["choices"][0]["token_ids"] == usual[1]


def post(server, path, body, key="owner"):
    return server.ask("POST", path, body, authorization=f"Bearer {key}")


def test_the_owner_loads_and_unloads_adapters_while_the_server_runs(llm, usual):
    [plain, every] = MODULES
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    with serving(AsyncLLM.around(llm), lora_modules=(plain,), api_keys=("a",), admin_keys=("owner",)) as server:
        asked = {"lora_name": "late", "lora_path": every.lora_path}
        assert post(server, "/v1/completions", ASKED | {"model": "late"}, "a").status == 404
        assert [post(server, path, asked, "a").status for path in (load, unload)] == [401, 401]
        assert post(server, load, asked).json == {"lora_name": "late", "loaded": True}
        reply = post(server, "/v1/completions", ASKED | {"model": "late"}, "a")
        assert reply.json["choices"][0]["token_ids"] == usual[2]
        for name, path, param, said in (
            ("late", every.lora_path, "lora_name", "lora_name 'late' is served already"),
            ("plain", every.lora_path, "lora_name", "lora_name 'plain' is served already"),
            ("new", "a\0b", "lora_path", "lora_path is 'a\\x00b', must be a path without NUL characters"),
            ("new", "/none", "lora_path", "adapter 'new': /none/adapter_config.json: No such file or directory"),
        ):
            reply = post(server, load, {"lora_name": name, "lora_path": path})
            assert (reply.status, reply.error["param"]) == (400, param) and said in reply.error["message"]
        assert post(server, unload, {"lora_name": "late"}).json == {"lora_name": "late", "loaded": False}
        assert post(server, "/v1/completions", ASKED | {"model": "late"}, "a").status == 404
        reply = post(server, unload, {"lora_name": "late"})
        assert (reply.status, reply.error["message"]) == (404, "adapter 'late' does not exist; served: plain")
        assert post(server, load, asked | {"lora_name": " \n"}).status == 400


def test_adapters_cannot_be_loaded_without_an_owner_or_enable_lora(llm):
    asked = {"lora_name": "late", "lora_path": MODULES[0].lora_path}
    with serving(AsyncLLM.around(llm), lora_modules=MODULES) as server:
        assert server.ask("POST", "/v1/load_lora_adapter", asked).status == 404
    plain = make_llm(Letters(), folder=GOLDEN / "llama-gqa-tied")
    with serving(AsyncLLM.around(plain), admin_keys=("owner",)) as server:
        reply = post(server, "/v1/load_lora_adapter", asked)
        assert reply.status == 400 and "needs enable_lora=True" in reply.error["message"]


@pytest.mark.parametrize(
    "given, problem",
    [
        (["a"], "--lora-modules is 'a', must be NAME=PATH"),
        (["=path"], "--lora-modules is '=path', must be NAME=PATH"),
        (["a=x", "a=y"], "served_model_name and lora_modules have 'a' twice"),
        (["base=x"], "served_model_name and lora_modules have 'base' twice"),
    ],
)
def test_bad_modules_get_one_sentence(given, problem):
    with pytest.raises(ConfigError, match=problem):
        ServerSettings(served_model_names=("base",), lora_modules=read_lora_modules(given))

"""Several models behind one door: the model of a request chooses, and under a budget idle ones sleep for it."""

import re
import threading
import time
from pathlib import Path

import pytest

from ksana_jax.cli.serving import models_and_settings
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.model_memory import footprint, resident_bytes
from ksana_jax.serve.server.settings import ServerSettings, read_lora_modules
from ksana_jax.serve.server.several import make_several_app, names_of
from tests.engine import small
from tests.serve.server.serving import Letters, behind_one_door, make_llm, serving

GOLDEN = Path(__file__).parents[2] / "golden"
ASKED = {"prompt": list(range(3, 37)), "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
SETTINGS = {"enable_prefix_caching": True, "host_cache_bytes": 2**20}


@pytest.fixture(scope="module")
def llms():
    """Two models whose vocabularies have 64 and other tokens, the second one with adapters."""
    lora = {"folder": GOLDEN / "llama-gqa-tied", "enable_lora": True, "max_loras": 2}
    return {
        "small": small.make_llm(small.Letters(), **SETTINGS),
        "golden": small.make_llm(Letters(), **lora, **SETTINGS),
    }


@pytest.fixture(scope="module")
def alone(llms):
    """Answers of each model behind a door of its own."""
    found = {}
    for name, llm in llms.items():
        with serving(AsyncLLM.around(llm), served_model_names=(name,)) as server:
            found[name] = server.post("/v1/completions", **ASKED).json["choices"]
    assert found["small"] != found["golden"]
    return found


def around(llms) -> dict[str, AsyncLLM]:
    return {name: AsyncLLM.around(llm) for name, llm in llms.items()}


@pytest.fixture(scope="module")
def served(llms, alone):
    with behind_one_door(around(llms), admin_keys=("owner",)) as server:
        yield server


def states(server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.ask("GET", "/v1/models").json["data"]}


def test_the_model_of_a_request_chooses(served, alone):
    for name, expected in alone.items():
        reply = served.post("/v1/completions", **ASKED, model=name)
        assert (reply.json["model"], reply.json["choices"]) == (name, expected)
    messages = [{"role": "user", "content": "abc"}]
    chats = [served.post("/v1/chat/completions", messages=messages, model=name, max_tokens=4) for name in alone]
    assert [reply.json["model"] for reply in chats] == [*alone]
    [golden] = [chunk for chunk in served.post("/v1/completions", **ASKED, model="golden", stream=True).events[-1:]]
    assert golden["model"] == "golden"
    assert states(served) == {"small": "awake", "golden": "awake"}
    assert served.ask("GET", "/v1/models/golden").json["root"] == "golden"


def test_paths_without_a_body_name_the_model_in_the_query(served):
    assert served.ask("GET", "/tokenizer_info?model=small").json["vocab_size"] == 64
    assert served.ask("GET", "/live?model=golden").json["status"] == "ready"
    assert served.post("/tokenize", prompt="abc", model="small").json["count"] == 4
    for path in ("/tokenizer_info", "/live", "/kv_events"):
        reply = served.ask("GET", path)
        assert (reply.status, reply.error["message"]) == (400, "model is missing, must be one of small, golden")


def test_what_no_model_serves_is_refused(served):
    reply = served.post("/v1/completions", **ASKED, model="none")
    message = "model 'none' does not exist; served: small, golden"
    assert (reply.status, reply.error["code"], reply.error["message"]) == (404, "model_not_found", message)
    assert served.ask("GET", "/v1/models/none").error["message"] == message
    assert served.post("/v1/completions", **ASKED).error["message"].startswith("model is missing, must be one of")
    assert served.post("/v1/completions", **ASKED, model=5).error["param"] == "model"
    assert served.ask("POST", "/v1/completions", b"[]").status == 400
    assert served.ask("POST", "/v1/completions", b"{}", content_type="text/plain").status == 415
    assert served.ask("GET", "/v1/completions").status == 405 and served.ask("GET", "/nowhere").status == 404
    assert served.post("/v1/completions", prompt="a", model="small", max_tokens=-1).error["param"] == "max_tokens"


def test_the_owner_gives_an_adapter_to_one_of_the_models(served):
    def post(path, **body):
        return served.ask("POST", path, body, authorization="Bearer owner")

    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    asked = {"lora_name": "late", "lora_path": str(GOLDEN / "lora" / "llama-gqa-tied-all")}
    assert post(load, **asked).error["message"].startswith("model is missing")
    assert "needs enable_lora" in post(f"{load}?model=small", **asked).error["message"]
    assert post(f"{load}?model=golden", **asked).status == 200
    assert post(f"{load}?model=small", **asked).error["message"].startswith("lora_name 'late' is served already")
    assert "served already" in post(f"{load}?model=golden", **asked | {"lora_name": "small"}).error["message"]
    replies = [served.post("/v1/completions", **ASKED, model=name).json for name in ("golden", "late")]
    assert [reply["model"] for reply in replies] == ["golden", "late"] and replies[0]["choices"] != replies[1][
        "choices"
    ]
    [late] = [model for model in served.ask("GET", "/v1/models").json["data"] if model["id"] == "late"]
    assert late["parent"] == "golden"
    assert post(unload, lora_name="late").status == 200 and post(unload, lora_name="late").status == 404


def test_metrics_have_each_model_and_each_metric_once(served, llms):
    lines = served.ask("GET", "/metrics").body.decode().splitlines()
    described = [line for line in lines if line.startswith(("# HELP", "# TYPE"))]
    assert len(described) == len(set(described))
    for name, llm in llms.items():
        for part, num_bytes in resident_bytes(llm).items():
            line = f'ksana:resident_bytes{{engine="",model_name="{name}",part="{part}"}} '
            assert [float(one.removeprefix(line)) for one in lines if one.startswith(line)] == [num_bytes]
    assert 'ksana:awake{engine="",model_name="golden"} 1.0' in lines
    assert sum(line.startswith("vllm:num_requests_running{") for line in lines) == 2


def test_keys_are_asked_for_before_the_model(llms):
    with behind_one_door(around(llms), api_keys=("k",)) as server:
        for path in ("/v1/completions", "/v1/models", "/nowhere"):
            reply = server.ask("POST", path, {"model": "none"})
            assert reply.status == 401 and b"small" not in reply.body
        assert server.ask("POST", "/v1/completions", ASKED | {"model": "small"}, authorization="Bearer k").status == 200


def one_pool(llms) -> int:
    """A budget for one of two pools beside all weights, which stay on a CPU."""
    weights = sum(footprint(llm, 1).asleep for llm in llms.values())
    return weights + max(llm.memory_plan.pool_bytes for llm in llms.values())


def test_under_a_budget_models_take_turns_with_their_tokens_and_prefixes(llms, alone):
    budget = one_pool(llms)
    with behind_one_door(around(llms), device_memory_bytes=budget) as server:
        assert states(server) == {"small": "awake", "golden": "asleep"}
        for _ in range(3):
            for name, expected in alone.items():
                reply = server.post("/v1/completions", **ASKED, model=name)
                assert reply.json["choices"] == expected
                assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
                assert states(server) == {other: "awake" if other == name else "asleep" for other in alone}
                assert server.ask("GET", "/ready").status == 200
        text = server.ask("GET", "/metrics").body.decode()
        sizes = re.findall(r"^ksana:resident_bytes\{.*\} (.*)$", text, re.MULTILINE)
        assert len(sizes) == 6 and sum(map(float, sizes)) <= budget
    for llm in llms.values():
        llm.wake_up()
        small.assert_idle(llm)


def test_a_busy_model_ends_its_requests_before_another_takes_its_place(llms, alone):
    with behind_one_door(around(llms), device_memory_bytes=one_pool(llms)) as server:
        found = []

        def ask(name, **more):
            found.append((name, server.post("/v1/completions", **ASKED | more, model=name).json["choices"]))

        threads = [threading.Thread(target=ask, args=(name,)) for name in [*alone] * 6]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join(30)
        assert len(found) == 12 and all(choices == alone[name] for name, choices in found)
    for llm in llms.values():
        llm.wake_up()


def test_a_server_stops_while_its_models_have_requests(llms):
    with behind_one_door(around(llms)) as server:
        replies = []
        asked = ASKED | {"max_tokens": 50, "prompt": [5]}
        threads = [
            threading.Thread(
                target=lambda name=name: replies.append(server.post("/v1/completions", **asked, model=name))
            )
            for name in llms
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert server.stop() == 0
        for thread in threads:
            thread.join(10)
        assert [reply.status for reply in replies] == [200, 200]


def test_an_engine_that_fails_ends_the_server_of_all_models():
    engines = {"a": make_llm(), "b": make_llm()}
    with behind_one_door(engines) as server:
        engines["b"].engine.executor.fails = "before moves"
        codes = [server.post("/v1/completions", prompt="x", model="b").status for _ in range(3)]
        assert codes == [500] * 3
        server.thread.join(30)
        assert server.exit_codes == [1]


def test_loading_tells_which_model_is_loaded(llms, capfd):
    loading, told = threading.Event(), []

    def load(name):
        if name == "golden":
            assert loading.wait(10)
        return AsyncLLM.around(llms[name])

    given = ServerSettings(port=0)
    several = make_several_app(["small", "golden"], given).state.serving
    thread = threading.Thread(target=lambda: told.append(several.load(load)))
    thread.start()
    while several.progress != "golden: loading":
        time.sleep(0.001)
    several.progress = "compiling 1 of 2"
    assert (several.status, several.progress) == ("loading", "golden: compiling 1 of 2")
    assert several.names == ["small", "golden"]
    loading.set()
    thread.join()
    for llm in told[0]:
        llm.close()


@pytest.mark.parametrize(
    ("models", "settings", "problem"),
    [
        (["/x/a", "/x/a"], {}, "model '/x/a' is given twice"),
        (["/x/a", "/y/a"], {}, "two models have the name 'a', by which requests choose"),
        (["a", "b"], {"served_model_names": ("c",)}, "--served-model-name is of one model, 2 are given"),
        (["a", "b"], {"lora_modules": read_lora_modules(["c=d"])}, "--lora-modules is of one model, 2 are given"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(models, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        make_several_app(names_of(models), ServerSettings(**settings))


def test_a_budget_smaller_than_one_model_is_refused(llms):
    budget = one_pool(llms) - 1
    several = make_several_app(list(llms), ServerSettings(device_memory_bytes=budget)).state.serving
    with pytest.raises(
        ConfigError, match=rf"device_memory_bytes is {budget:,} .* model 'around' takes .*: [\d,]+ bytes"
    ):
        several.load(around(llms).__getitem__)
    for llm in llms.values():
        llm.wake_up()


def test_words_without_an_equals_sign_are_further_models():
    assert models_and_settings(["b", "block_size=8", "x/c"]) == (["b", "x/c"], {"block_size": 8})
    with pytest.raises(ConfigError, match="max_model_len"):
        models_and_settings(["max_model_len"])

"""Engines that sleep: their memory is freed, their tokens are the same afterwards, and weights may change."""

import asyncio
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from ksana_jax import LLM, LoRARequest, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.async_llm import AsyncLLM, NotServing
from ksana_jax.kv.owner import check_memory
from ksana_jax.loading import LoadError, load_model
from ksana_jax.runner import sleeping
from tests.engine.small import assert_idle, make_llm
from tests.loading.models_on_disk import TINY, random_tensors, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
PROMPTS = [np.random.default_rng(at).integers(3, 32, 20).tolist() for at in range(3)]
SIZES = {"num_blocks": 24, "block_size": 4, "max_model_len": 48, "query_tile": 4}


def engine(folder: Path, **settings) -> LLM:
    """An engine that has read its weights from a folder."""
    llm = make_llm(folder=folder, **SIZES, **settings)
    llm.engine.source = str(folder), "auto"
    return llm


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one config."""
    made = tmp_path_factory.mktemp("models")
    return [write_model(made / str(seed), random_tensors(TINY, seed=seed)) for seed in (0, 1)]


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)
    assert_idle(llm)
    return [output.outputs[0].token_ids for output in outputs]


def cached(llm: LLM) -> int:
    [output] = llm.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=GREEDY)
    return output.num_cached_tokens


@pytest.fixture(scope="module")
def expected(folders):
    found = [tokens(engine(folder)) for folder in folders]
    assert found[0] != found[1]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": True},
        {"quantization": "int8"},
        {"embedding_device": "host"},
        {"operators": {"linear": "xla"}},
        {"enable_lora": True},
        {"kv_eviction": {"method": "h2o", "budget": 8}, "enable_prefix_caching": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same_after_a_sleep_in_which_the_device_holds_nothing(level, settings, folders):
    with engine(folders[0], **settings) as llm:
        before, compiled = tokens(llm), llm.num_compilations
        llm.sleep(level)
        assert llm.is_sleeping and llm.memory_usage()["weights"].measured == llm.memory_usage()["pool"].measured == 0
        with pytest.raises(RuntimeError, match="the engine sleeps: call wake_up"):
            tokens(llm)
        llm.wake_up()
        assert not llm.is_sleeping and llm.memory_usage()["weights"].measured == llm.memory_plan.weights_bytes
        assert tokens(llm) == before and llm.num_compilations == compiled


def test_deeper_sleep_drops_the_weights_and_waking_an_engine_that_is_awake_does_nothing(folders, expected):
    with engine(folders[0]) as llm:
        llm.wake_up()
        llm.sleep()
        assert llm.engine.asleep.kept is not None
        llm.sleep(2)
        assert llm.engine.asleep.kept is None
        llm.sleep(1)
        assert llm.engine.asleep.level == 2
        llm.wake_up()
        assert tokens(llm) == expected[0]


@pytest.mark.parametrize(("host_blocks", "hit"), [(64, 16), (0, 0)])
def test_prefixes_survive_in_the_host_tier(host_blocks, hit, folders):
    block_bytes = 2 * 2 * 2 * 4 * 8 * 4
    settings = {"enable_prefix_caching": True, "host_cache_bytes": host_blocks * block_bytes}
    with engine(folders[0], **settings) as llm:
        first = tokens(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert cached(llm) == hit
            check_memory(llm.engine.memory, [])
        assert tokens(llm) == first


@pytest.mark.parametrize("asleep", [False, True])
def test_other_weights_take_effect_without_compiling_and_drop_prefixes(asleep, folders, expected):
    with engine(folders[0], enable_prefix_caching=True, host_cache_bytes=2**20) as llm:
        assert tokens(llm) == expected[0] and cached(llm) == 16
        compiled = llm.num_compilations
        for weights, wanted in ((folders[1], 1), (load_model(folders[0])[1], 0), (str(folders[1]), 1)):
            if asleep:
                llm.sleep()
            llm.update_weights(weights)
            assert llm.memory_usage()["pool"].measured == llm.memory_plan.pool_bytes
            assert cached(llm) == 0 and tokens(llm) == expected[wanted] and cached(llm) == 16
        assert llm.num_compilations == compiled + asleep, "only a sleep moves blocks to the host"


@pytest.mark.parametrize("lora", [{}, {"enable_lora": True}], ids=["", "lora"])
def test_an_engine_wakes_up_with_the_weights_that_it_took_last(lora, folders, expected):
    with engine(folders[0], **lora) as llm:
        llm.update_weights(folders[1])
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == expected[1] and llm.engine.source == (str(folders[1]), "auto")
        llm.update_weights(load_model(folders[0])[1])
        llm.sleep(2)
        with pytest.raises(ConfigError, match=r"in memory, and sleep\(2\) has dropped them: call update"):
            llm.wake_up()
        llm.update_weights(folders[0])
        assert tokens(llm) == expected[0]


def test_weights_in_memory_stay_usable_and_are_given_again_after_deep_sleep(folders, expected):
    config, params = load_model(folders[0])
    with LLM.from_params(config, params, **SIZES) as llm:
        llm.sleep(1)
        llm.wake_up()
        assert tokens(llm) == expected[0]
        llm.sleep(2)
        with pytest.raises(ConfigError, match=r"in memory, and sleep\(2\) has dropped them: call update"):
            llm.wake_up()
        assert llm.is_sleeping
        llm.update_weights(params)
        assert tokens(llm) == expected[0]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "settings",
    [{}, {"operators": {"linear": "xla"}}, {"quantization": "int8"}],
)
def test_numpy_weights_are_copied_and_may_change_afterwards(settings, folders, expected):
    config, params = load_model(folders[0])
    read = jax.tree.map(np.array, params)
    with LLM.from_params(config, read, **SIZES | settings) as llm:
        wanted = tokens(llm)
        for leaf in jax.tree.leaves(read):
            leaf *= 0.5
        assert tokens(llm) == wanted
        llm.update_weights(read)
        changed = tokens(llm)
        for leaf in jax.tree.leaves(read):
            leaf *= 2
        assert tokens(llm) == changed != wanted
    assert wanted == expected[0] or settings == {"quantization": "int8"}


def test_weights_that_were_donated_are_named_until_others_are_given(folders, expected):
    config, params = load_model(folders[0])
    with LLM.from_params(config, params, **SIZES) as llm:
        assert tokens(llm) == expected[0]
        params = jax.jit(lambda given: jax.tree.map(lambda x: x * 1, given), donate_argnums=0)(params)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"weight params\S+ has been deleted, .* update_weights"):
                tokens(llm)
        llm.update_weights(params)
        assert tokens(llm) == expected[0]


def test_what_does_not_fit_is_refused_and_the_old_weights_stay(folders, expected, tmp_path):
    _, params = load_model(folders[1])
    larger = write_model(tmp_path / "larger", random_tensors(TINY), rms_norm_eps=0.5)
    refused = {
        "it differs in ": larger,
        "weights is of type int, must be a path, a name or Params": 5,
        r"layers\[1\].*is none, must be \[16\] float32": params.replace(layers=params.layers[:1]),
        r"final_norm is \[3\] float32, must be \[16\] float32": params.replace(final_norm=np.zeros(3, np.float32)),
    }
    with engine(folders[0]) as llm:
        for message, weights in refused.items():
            with pytest.raises(ConfigError, match=message):
                llm.update_weights(weights)
        with pytest.raises(LoadError, match="there is no model"):
            llm.update_weights(tmp_path / "none")
        with pytest.raises(ValueError, match="level is 3, must be one of 1, 2"):
            llm.sleep(3)
        assert not llm.is_sleeping and tokens(llm) == expected[0]


def test_an_engine_whose_weights_cannot_be_read_sleeps_on(folders, expected, tmp_path):
    folder = write_model(tmp_path / "model", random_tensors(TINY, seed=1))
    with engine(folder) as llm:
        llm.sleep(2)
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[:100])
        with pytest.raises(LoadError):
            llm.wake_up()
        assert llm.is_sleeping
        (folder / "model.safetensors").write_bytes(weights)
        llm.wake_up()
        assert tokens(llm) == expected[1]


def test_an_engine_with_requests_does_not_sleep(folders, expected):
    with engine(folders[0]) as llm:
        stream = llm.stream([{"prompt_token_ids": PROMPTS[0]}], GREEDY)
        next(stream)
        with pytest.raises(RuntimeError, match="1 requests are running: an engine sleeps only in between"):
            llm.sleep()
        with pytest.raises(RuntimeError, match="1 requests are running: weights change only in between"):
            llm.update_weights(folders[1])
        assert list(stream)[-1].outputs[0].token_ids == expected[0][0]
        llm.sleep()


def test_sleeps_and_requests_of_several_threads_do_not_meet(folders, expected):
    """A request is served whole or refused."""
    with engine(folders[0]) as llm:
        tokens(llm)
        served, refused, ended = [], [], threading.Event()

        def ask():
            while not ended.is_set():
                try:
                    [output] = llm.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=GREEDY)
                    served.append(output.outputs[0].token_ids)
                except RuntimeError as error:
                    refused.append(str(error))
                time.sleep(0.01)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        num_slept = 0
        while num_slept < 5:
            try:
                llm.sleep()
            except RuntimeError as error:
                assert "requests are running" in str(error)
            else:
                num_slept += 1
                llm.wake_up()
        while not served:
            time.sleep(0.01)
        ended.set()
        for thread in threads:
            thread.join()
        assert all(ids == expected[0][0] for ids in served)
        assert all("the engine sleeps" in message for message in refused)
        assert tokens(llm) == expected[0]


def test_nobody_wakes_an_engine_between_its_old_weights_and_the_new_ones(folders, expected, monkeypatch):
    with engine(folders[0]) as llm:
        release, woken = sleeping.release, []
        waker = threading.Thread(target=lambda: woken.append(llm.wake_up()))

        def release_and_wait(runner, **options):
            waker.start()
            time.sleep(0.2)  # for the lock
            return release(runner, **options)

        monkeypatch.setattr(sleeping, "release", release_and_wait)
        loads, read = [], llm.engine.read_weights
        monkeypatch.setattr(llm.engine, "read_weights", lambda weights: loads.append(weights) or read(weights))
        llm.update_weights(folders[1])
        waker.join()
        assert len(loads) == len(woken) == 1 and tokens(llm) == expected[1]


def test_adapters_are_read_again_for_other_weights(tmp_path):
    from tests.engine import test_lora as lora

    asked = [lora.adapter("lengths"), None]
    _, params = load_model(lora.GOLDEN / lora.BASE)
    other = jax.tree.map(lambda x: x[::-1] if x.ndim == 2 and x.shape[0] == x.shape[1] else x, params)
    with lora.engine(max_loras=1) as llm:
        before = lora.texts(llm, asked)
        llm.sleep(1)
        with pytest.raises(RuntimeError, match="the engine sleeps: call wake_up"):
            lora.texts(llm, [LoRARequest("unread", 7, str(lora.copy_adapter("lengths", tmp_path) and tmp_path))])
        llm.wake_up()
        assert lora.texts(llm, asked) == before
        llm.update_weights(other)
        changed = lora.texts(llm, asked)
        assert changed[0] != before[0] and changed[1] != before[1]
        llm.update_weights(lora.GOLDEN / lora.BASE)
        assert lora.texts(llm, asked) == before


def test_an_engine_with_a_draft_model_does_not_sleep(folders, expected):
    draft = {"method": "draft_model", "model": str(folders[1]), "num_speculative_tokens": 2}
    with engine(folders[0], speculative_config=draft) as llm:
        for call in (llm.sleep, lambda: llm.update_weights(folders[1])):
            with pytest.raises(ConfigError, match="this engine cannot sleep: it has a draft model"):
                call()
        assert tokens(llm) == expected[0]


def test_an_engine_with_a_disk_tier_sleeps_and_keeps_its_weights(folders, expected, tmp_path):
    tiers = {"enable_prefix_caching": True, "host_cache_bytes": 2**20, "disk_cache_dir": str(tmp_path)}
    with engine(folders[0], **tiers) as llm:
        assert tokens(llm) == expected[0]
        with pytest.raises(ConfigError, match="disk_cache_dir is set, and its folder holds prefixes of one model"):
            llm.update_weights(folders[1])
        llm.sleep(2)
        llm.wake_up()
        assert cached(llm) == 16 and tokens(llm) == expected[0]


def test_an_event_loop_is_told_that_the_engine_sleeps(folders, expected):
    async def ask(served: AsyncLLM) -> list[int]:
        async for output in served.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY):
            last = output
        return last.outputs[0].token_ids

    async def run(llm: LLM) -> list[int]:
        async with AsyncLLM.around(llm) as served:
            llm.sleep()
            with pytest.raises(NotServing, match="the engine sleeps"):
                await ask(served)
            llm.wake_up()
            return await ask(served)

    with engine(folders[0]) as llm:
        assert asyncio.run(run(llm)) == expected[0][0]


def test_another_eviction_method_serves_what_a_new_engine_with_it_serves(folders, caplog):
    caplog.set_level("INFO", "ksana_jax")
    settings = {**SIZES, "max_num_seqs": 4, "max_num_batched_tokens": 16, "enable_prefix_caching": True}
    changing, now = LLM(folders[0], pattern={"window": 16}, **settings), None
    changing.set_pattern("full")
    for method in (
        {"method": "tova", "budget": 12},
        {"method": "h2o", "budget": 16},
        {"method": "tova", "budget": 8},
        None,
    ):
        caplog.clear()
        changing.set_kv_eviction(method)
        assert "reading the weights again; steps are compiled" in caplog.text
        new = LLM(folders[0], kv_eviction=method, **settings)
        before, now = now, tokens(new)
        assert tokens(changing) == now != before and cached(changing) == cached(new)
    for method in ({"method": "tova", "budget": 1}, {"method": "tova", "budgt": 12}):
        with pytest.raises(ConfigError):
            changing.set_kv_eviction(method)
        assert tokens(changing) == now
    stream = changing.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="1 requests are running: the eviction method changes only in between"):
        changing.set_kv_eviction({"method": "tova", "budget": 12})
    assert [*stream][-1].outputs[0].token_ids == now[0]

"""Models that share one budget: who sleeps for whom, who waits, and that no token changes by it."""

import asyncio
import random
import threading

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.async_llm import AsyncLLM, NotServing
from ksana_jax.engine.model_memory import (
    Footprint,
    ModelMemoryFull,
    ModelMemoryManager,
    check_room,
    footprint,
    resident_bytes,
    wake_first,
)
from ksana_jax.kv.owner import check_memory
from tests.engine import small
from tests.engine.test_sleeping import engine as read_engine
from tests.loading.models_on_disk import TINY, random_tensors, write_model


class Fake:
    """A resident of some bytes that takes no time."""

    def __init__(self, name: str, num_bytes: int):
        self.name, self.size = name, Footprint(num_bytes, 0)
        self.is_idle, self.is_asleep, self.has_ended, self.moves_s = True, True, False, 0.0

    async def rest(self) -> bool:
        self.is_asleep = self.is_asleep or self.is_idle
        return self.is_asleep


async def ask(model_memory: ModelMemoryManager, one: Fake) -> None:
    """What `IdleSleep` does for a request that ends at once."""
    await model_memory.turn(one)
    if one.is_asleep:
        async with model_memory.room(one):
            one.is_asleep = False
    model_memory.used(one)


def in_budget(num_bytes: int, *models: Fake, **settings) -> ModelMemoryManager:
    model_memory = ModelMemoryManager(num_bytes, **settings)
    for one in models:
        model_memory.used(one)
    return model_memory


def awake(*models: Fake) -> str:
    return "".join(one.name.upper() for one in models if not one.is_asleep)


async def test_models_sleep_by_their_last_use_and_as_few_as_make_room():
    a, b, c, big = models = (*(Fake(name, 10) for name in "abc"), Fake("x", 20))
    model_memory = in_budget(30, *models)
    for one in (a, b, c, a, big):
        await ask(model_memory, one)
    assert awake(*models) == "AX"
    await ask(model_memory, b)
    assert awake(*models) == "BX"


async def test_a_busy_model_stays_and_its_new_requests_wait_after_its_turn():
    a, b = Fake("a", 10), Fake("b", 10)
    model_memory = in_budget(10, a, b, turn_s=0.1)
    await ask(model_memory, a)
    a.is_idle = False
    waiting = asyncio.create_task(ask(model_memory, b))
    await asyncio.sleep(0.03)
    await ask(model_memory, a)  # still its turn
    await asyncio.sleep(0.15)
    later = asyncio.create_task(ask(model_memory, a))
    await asyncio.sleep(0.05)
    assert not waiting.done() and not later.done() and awake(a, b) == "A"
    a.is_idle = True
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(later, 1)
    assert awake(a, b) == "A"


async def test_a_request_does_not_wait_for_ever():
    a, b, c = models = Fake("a", 2**20), Fake("b", 2**20), Fake("c", 2**20)
    model_memory = in_budget(2**20, *models, turn_s=0.05, timeout_s=0.2)
    await ask(model_memory, a)
    a.is_idle = False
    found = await asyncio.gather(ask(model_memory, b), ask(model_memory, c), return_exceptions=True)
    message = "it needs 1.0 MiB more, 1.0 MiB of 1.0 MiB are in use, and a had requests for 0.2 seconds"
    assert [(type(error), str(error)) for error in found] == [(ModelMemoryFull, message)] * 2
    await ask(model_memory, a)  # nobody waits for its place any more
    b.has_ended = True
    with pytest.raises(ModelMemoryFull, match="the server is shutting down"):
        await ask(model_memory, b)


# ---------------------------------------------------------------------- engines

SETTINGS = {"enable_prefix_caching": True, "host_cache_bytes": 2**20}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


def prompt(vocab: int, seed: int, length: int) -> dict:
    """Prompts of one seed begin alike."""
    return {"prompt_token_ids": np.random.default_rng(seed).integers(3, vocab, 40)[:length].tolist()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two models with 64 and 32 tokens in their vocabularies."""
    folder = write_model(tmp_path_factory.mktemp("model"), random_tensors(TINY, seed=1))
    return [small.make_llm(**SETTINGS), read_engine(folder, **SETTINGS)]


def one_pool(llms) -> int:
    """A budget for the larger one of two models while the other one sleeps; on a CPU, weights stay."""
    return sum(footprint(llm, 1).asleep for llm in llms) + max(llm.memory_plan.pool_bytes for llm in llms)


async def tokens(served: AsyncLLM, asked: dict, params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    async for output in served.generate(asked, params):
        last = output
    return last.outputs[0].token_ids, last.num_cached_tokens


def test_one_of_two_models_is_awake_and_finds_its_prefixes_again(two):
    for llm in two:
        llm.wake_up()
    asked = [prompt(llm.model_config.vocab_size, 1, 33) for llm in two]
    alone = [llm.generate(one, GREEDY)[0].outputs[0].token_ids for llm, one in zip(two, asked, strict=True)]

    async def run():
        model_memory = ModelMemoryManager(one_pool(two))
        async with AsyncLLM.around(two[0]) as a, AsyncLLM.around(two[1]) as b:
            for served in (a, b):
                served.sleep_when_idle(None, 1, model_memory)
            for _ in range(3):
                for served, one, expected in zip((a, b), asked, alone, strict=True):
                    assert await tokens(served, one) == (expected, 32)
                    assert [llm.is_sleeping for llm in two] == [served is b, served is a]
                    assert model_memory.used_bytes <= model_memory.num_bytes
            assert all(llm.wake_s > 0 for llm in two)

    two[0].sleep()
    asyncio.run(run())


def test_a_request_that_gets_no_room_is_refused_with_the_reason(two):
    async def run():
        model_memory = ModelMemoryManager(one_pool(two), turn_s=0.05, timeout_s=0.2)
        async with AsyncLLM.around(two[0]) as a, AsyncLLM.around(two[1]) as b:
            for served in (a, b):
                served.sleep_when_idle(None, 1, model_memory)
            async with a.awake():
                with pytest.raises(NotServing, match=r"the model cannot wake up: it needs .* in use, and around had"):
                    await tokens(b, prompt(32, 1, 9))
            await tokens(b, prompt(32, 1, 9))

    two[1].sleep()
    two[0].wake_up()
    asyncio.run(run())


def test_a_client_that_leaves_while_a_model_wakes_does_not_free_its_room(two, monkeypatch):
    async def run():
        model_memory = ModelMemoryManager(one_pool(two))
        async with AsyncLLM.around(two[0]) as a, AsyncLLM.around(two[1]) as b:
            for served in (a, b):
                served.sleep_when_idle(None, 1, model_memory)
            wake_up, begun, may_end = two[1].wake_up, threading.Event(), threading.Event()
            monkeypatch.setattr(two[1], "wake_up", lambda: (begun.set(), may_end.wait(10), wake_up()))
            leaving = asyncio.create_task(tokens(b, prompt(32, 1, 9)))
            await asyncio.to_thread(begun.wait, 10)
            leaving.cancel()
            staying = asyncio.create_task(tokens(a, prompt(64, 1, 9)))
            await asyncio.sleep(0.1)
            assert two[0].is_sleeping and not staying.done() and not leaving.done()
            may_end.set()
            await staying
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert model_memory.used_bytes <= model_memory.num_bytes

    two[1].sleep()
    two[0].wake_up()
    asyncio.run(run())


def test_a_budget_must_hold_each_model_while_the_others_sleep(two):
    sizes = [footprint(llm, 1) for llm in two]
    least = max(sizes[0].awake + sizes[1].asleep, sizes[1].awake + sizes[0].asleep)
    check_room(two, least, 1)
    with pytest.raises(
        ConfigError, match=r"device_memory_bytes is [\d,]+ .*, model 'around' takes .*, and the others, "
    ):
        check_room(two, least - 1, 1)
    for llm in two:
        llm.sleep()
    wake_first(two, least, 1)
    assert [llm.is_sleeping for llm in two] == [False, True]
    two[0].sleep()
    wake_first(two, sum(size.awake for size in sizes), 1)
    assert not any(llm.is_sleeping for llm in two)
    assert resident_bytes(two[0]) == {name: two[0].memory_usage()[name].measured for name in ("weights", "pool")} | {
        "weights_on_host": 0
    }


async def live(llms, num_requests: int, seed: int) -> int:
    """Requests for two models that share the room of one, some of them left unread; returns the number of changes."""
    rng, model_memory = random.Random(seed), ModelMemoryManager(one_pool(llms), turn_s=0.05)
    changes, num_left = [0], num_requests
    prompts = [(model, seed, length) for model in (0, 1) for seed in range(4) for length in (7, 18, 33)]
    expected = {}
    for model, name, length in prompts:
        llms[model].wake_up()
        asked = prompt(llms[model].model_config.vocab_size, name, length)
        expected[model, name, length] = llms[model].generate(asked, GREEDY)[0].outputs[0].token_ids
    llms[1].sleep()
    async with AsyncLLM.around(llms[0]) as a, AsyncLLM.around(llms[1]) as b:
        for served in (a, b):
            served.sleep_when_idle(0.3 if rng.random() < 0.5 else None, 1, model_memory)
            served.observers.append(lambda news: check())
        for llm in llms:
            count(llm, changes)

        def check() -> None:
            assert model_memory.used_bytes <= model_memory.num_bytes

        async def client() -> None:
            nonlocal num_left
            while num_left > 0:
                num_left -= 1
                model, name, length = rng.choice(prompts)
                asked = prompt(llms[model].model_config.vocab_size, name, length)
                stream = await (a, b)[model].submit(asked, GREEDY)
                if rng.random() < 0.1:
                    stream.close()
                else:
                    assert (await stream.result()).outputs[0].token_ids == expected[model, name, length]
                await asyncio.sleep(rng.random() ** 4 * rng.choice((0.0, 0.02, 0.5)))

        await asyncio.gather(*(client() for _ in range(5)))
    for llm in llms:
        small.assert_idle(llm)
        check_memory(llm.engine.memory, [])
    return changes[0]


def count(llm, changes: list[int]) -> None:
    """Counts how often a model wakes up."""

    def counted(change):
        def call(*asked):
            changes[0] += 1
            change(llm, *asked)

        return call

    llm.wake_up = counted(type(llm).wake_up)


@pytest.mark.parametrize("num_simulations", [1, pytest.param(60, marks=pytest.mark.soak)])
def test_random_simulations_of_two_models_give_the_tokens_of_each_alone(two, num_simulations):
    for seed in range(num_simulations):
        assert asyncio.run(live(two, 60, seed)) >= 4, "they took turns"

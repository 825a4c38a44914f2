"""What a router expects of a server with recurrent layers, from its events, is what the server then reuses."""

import json
import types

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.serve.router import RoutedRequest, Router, RouterSettings, hashes_of
from ksana_jax.serve.router.proxy.following import read_event
from ksana_jax.serve.server.kv_events import KVEventLog, Listener
from tests.golden.cases import golden_case
from tests.serve.router.invariants import check_router

pytestmark = pytest.mark.usefixtures("few_shapes")
SMALL = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 24, "max_model_len": 112, "num_blocks": 30}
GREEDY = SamplingParams(temperature=0, max_tokens=6, detokenize=False)


class Readers:
    """Two routers that read the events of one engine: ours, and one that knows keys and values alone."""

    def __init__(self, llm):
        self.memory, self.log = llm.engine.memory, KVEventLog(llm.engine)
        self.ours, self.plain = (Router(["s"], settings=RouterSettings(4)) for _ in range(2))
        loop = types.SimpleNamespace(call_soon_threadsafe=lambda call, *given: call(*given))
        Listener(self.log, loop).attach(llm.engine)  # pyright: ignore[reportArgumentType]

    async def connect(self):
        self.stream = self.log.stream(lambda: False, 15.0)
        assert (await anext(self.stream)).startswith("event: cache")
        self.take(await anext(self.stream))

    def take(self, text):
        events = json.loads(text.removeprefix("data: "))["events"]
        self.ours.events("s", map(read_event, events))
        self.plain.events("s", map(read_event, (event for event in events if event.get("group_idx") != 1)))

    async def expect(self, prompt, salt):
        """Cached tokens that each expects of a prompt, after all events so far."""
        while self.log._readers[-1].qsize():
            self.take(await anext(self.stream))
        hashes = hashes_of(np.array(prompt), 4, salt, self.memory.index.scope.model)
        before = [router.counts.expected_tokens for router in (self.ours, self.plain)]
        for router in (self.ours, self.plain):
            router.choose(RoutedRequest("", len(prompt), hashes), 0.0)
            router.finished("", 0.0)
            check_router(router)
        return self.ours.counts.expected_tokens - before[0], self.plain.counts.expected_tokens - before[1]


def prompts(count, seed):
    """Prompts that continue, repeat and leave earlier ones at any length; a quarter are of whole blocks."""
    rng, texts = np.random.default_rng(seed), [[]]
    for _ in range(count):
        old = texts[rng.integers(max(len(texts) - 8, 0), len(texts))]
        new = rng.integers(2, 128, rng.integers(1, 40)).tolist() if not old or rng.random() < 0.7 else []
        text = (old[: rng.integers(1, len(old) + 1) if old else 0] + new)[:90]
        texts.append(text[: len(text) // 4 * 4] if len(text) > 4 and rng.random() < 0.25 else text)
    return texts[1:]


@pytest.mark.parametrize("host_bytes", [0, 24_000])
@pytest.mark.parametrize("method", ["every", "forks", "marconi"])
async def test_a_router_expects_what_each_request_reuses(method, host_bytes):
    caching = {"enable_prefix_caching": True, "state_snapshots": {"method": method, "num_slots": 7}}
    llm = LLM(str(golden_case("lfm2-gqa-conv-tied").model_dir), **SMALL | caching, host_cache_bytes=host_bytes)
    readers, found = Readers(llm), []
    for number, prompt in enumerate(prompts(120, seed=5)):
        if number % 40 == 0:  # a reader that comes late is told of all that is cached
            await readers.connect()
        if number == 70:
            llm.engine._reset(RuntimeError("a step failed"))
        salt = "other" * (number % 5 == 0)
        found.append(await readers.expect(prompt, salt))
        request = llm.engine.add_request(np.array(prompt), GREEDY, cache_salt=salt)
        while llm.engine.has_work:
            llm.engine.step()
        output = request.output()
        assert found[-1] == (output.num_cached_tokens, output.metrics.num_cached_keys), number
    # The other reader expects too much again and again.
    assert sum(0 < reused < keys for reused, keys in found) > 3
    counters, states = llm.engine.memory.counters, llm.engine.memory.states
    assert counters.replaced > 100 and counters.replaced_states > 10
    if host_bytes:
        assert counters.hits_host > 10 and states.own_counters.loaded > 0

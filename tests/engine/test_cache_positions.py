"""Text positions and cache positions are two numbers: a toy that evicts tokens, against the dense float64 model whose
later queries do not see them. The text goes on where it was; slots and blocks are used again."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import AttentionPattern, SamplingParams
from ksana_jax.core.patterns import FULL
from ksana_jax.scheduler.row_eviction import compact
from tests.engine.small import VOCAB, assert_idle, make_llm, model
from tests.reference import reference_logprobs

SIZE = 4
SLIDING = AttentionPattern(window=7)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(2, VOCAB, length).tolist() for length in (30, 13, 9)]


class Evicting:
    """Drops random tokens of a row's layers that see everything whenever the row has computed another `every` tokens.

    Attributes:
      cached: {request id: for each group of layers the text positions that its cache holds, in the order of its slots}.
      in_cache: {request id: [L, T, T], see `reference_logprobs`}.
    """

    def __init__(self, llm, every: int, longest: int):
        self.llm, self.every, self.longest = llm, every, longest
        self.layout, self.rng, self.num_evictions = llm.runner.layout, np.random.default_rng(3), 0
        self.cached, self.in_cache, self.due, self.computed = {}, {}, {}, {}

    def after_step(self) -> None:
        rows = self.llm.engine.scheduler.rows
        for row in self.llm.engine.scheduler.order.tolist():
            request, computed = rows.seqs[row].request_id, int(rows.num_computed[row])
            cached = self.cached.setdefault(request, [[] for _ in self.layout.groups])
            for positions in cached:
                positions += range(self.computed.get(request, 0), computed)
            self.computed[request] = computed
            if computed >= self.due.setdefault(request, self.every):
                self.due[request] += self.every
                self.evict(request, row, computed)

    def evict(self, request: str, row: int, computed: int) -> None:
        """Evicts as a method does: moves the kept keys and values on the device, and records it."""
        scheduler, cache = self.llm.engine.scheduler, self.llm.runner.cache
        before = np.asarray(cache.kv)
        after, cached = before.copy(), self.cached[request]
        for group, kv_group in enumerate(self.layout.groups):
            if kv_group.live.window is not None:
                continue
            count = len(cached[group])
            # Blocks are freed, and rows are shortened by other numbers of tokens than whole blocks, where they may be.
            fewer = SIZE * (count // (2 * SIZE)) if len(self.layout.groups) > 1 else count // 2
            kept = np.sort(self.rng.choice(count, count - fewer, replace=False))
            slots = scheduler.rows.block_tables[group, row][:, None] * SIZE + np.arange(SIZE)
            source, target = (slots.ravel()[at] for at in (kept, np.arange(len(kept))))
            after[target // SIZE, ..., target % SIZE, :] = before[source // SIZE, ..., source % SIZE, :]
            seen = self.in_cache.setdefault(request, np.ones((2, self.longest, self.longest), bool))
            gone = sorted({*cached[group]} - {cached[group][at] for at in kept})
            seen[np.ix_(kv_group.layers, range(computed, self.longest), gone)] = False
            cached[group] = [cached[group][at] for at in kept]
        self.llm.runner.cache = cache.with_kv(jnp.asarray(after))
        compact(scheduler.row_blocks, np.array([row]), np.array([[len(positions)] for positions in cached]))
        scheduler.check()
        self.num_evictions += 1


@pytest.mark.parametrize("pattern", [FULL, (SLIDING, FULL)], ids=["one group", "two groups"])
@pytest.mark.parametrize("swaps", [False, True])
def test_texts_go_on_over_evicted_tokens_as_in_the_dense_model_without_them(pattern, swaps):
    settings = {"host_cache_bytes": 2**16, "preempt": "swap"} if swaps else {}
    settings |= {"async_scheduling": False}  # the toy moves tokens between steps, when none may be under way
    llm = make_llm(pattern=pattern, block_size=SIZE, num_blocks=64, max_num_batched_tokens=16, query_tile=8, **settings)
    (config, params), count = model(), 20
    toy = Evicting(llm, every=9, longest=max(map(len, PROMPTS)) + count)
    asked = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    requests = [llm.engine.add_request(np.array(prompt), asked) for prompt in PROMPTS]
    scheduler, most = llm.engine.scheduler, 0
    for number in itertools.count():
        if not llm.engine.has_work:
            break
        llm.engine.step()
        toy.after_step()
        most = max(most, int(scheduler.rows.num_evicted.max()))
        if swaps and number % 5 == 4 and len(scheduler.order):
            scheduler._preempt(int(scheduler.order[0]))
    assert most > 20 and toy.num_evictions > 8
    counters = llm.engine.memory.counters
    assert counters.swapped_out == counters.swapped_in and bool(counters.swapped_in) == swaps
    for prompt, request in zip(PROMPTS, requests, strict=True):
        output = request.output()
        text = np.array(prompt + output.outputs[0].token_ids)
        in_cache = toy.in_cache[request.request_id][:, : len(text), : len(text)]
        assert not in_cache.all()
        expected = reference_logprobs(params, config, text, pattern, in_cache)
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        got = [entry[int(token)].logprob for entry, token in zip(entries, text[1:], strict=True)]
        # float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
        np.testing.assert_allclose(got, expected[np.arange(len(text) - 1), text[1:]], atol=1e-4)
        assert output.outputs[0].token_ids == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert_idle(llm)


def test_sinks_and_a_window_as_a_pattern_are_an_eviction_at_cache_positions():
    """The pattern's keys stay rotated at text positions, and only queries are rotated twice."""
    evicting = {"method": "streaming_llm", "sinks": 2, "budget": 10, "interval": 1, "prompts": "streamed"}
    asked = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, logprobs=0, detokenize=False)
    # A query sees itself and the 10 tokens that were kept before it.
    window, found = AttentionPattern(window=9, num_sinks=2, sink_position="cache"), []
    for settings in ({"kv_eviction": evicting}, {"pattern": window}):
        llm = make_llm(block_size=SIZE, num_blocks=20, **settings)
        [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, asked)
        entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        found.append([next(iter(entry.values())).logprob for entry in entries])
    # Angles of other positions, and sums in another order.
    np.testing.assert_allclose(*found, atol=1e-4)

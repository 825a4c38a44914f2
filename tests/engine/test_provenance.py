"""The origins of a request's blocks: computed, found on a tier, shared, copied, swapped."""

from collections import Counter
from concurrent.futures import Executor, Future

import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.inspect.snapshot import take_snapshot
from ksana_jax.kv.disk.tier import BlockFormat, DiskTier
from ksana_jax.kv.layout import Leaf
from tests.engine.small import Letters, make_llm
from tests.fakes import asking, make_engine, prompt_of, run, step


def origins(engine, request_id):
    """{completion: its blocks' origins by text position}."""
    found = {}
    for block in take_snapshot(engine).of_request(request_id):
        for owner in block.owners:
            if owner.request_id == request_id:
                found.setdefault(owner.index, []).append(owner.origin)
    return found


def served(engine, prompt, **settings):
    """A request that has run to its end."""
    request = engine.add_request(prompt, asking(**{"max_tokens": 4, **settings}))
    run(engine)
    return request.metrics.num_blocks_by_origin


def test_a_prompt_is_computed_and_found_again_on_the_device():
    engine = make_engine(caching=True)
    # 11 prompt tokens and 3 of 4 outputs are computed: four blocks.
    assert served(engine, prompt_of(11)) == {"computed": 4}
    engine.add_request(prompt_of(11), asking(4), request_id="again")
    step(engine)
    assert origins(engine, "again") == {0: ["hit device", "hit device", "computed"]}
    request = engine.requests["again"]
    run(engine)
    assert request.metrics.num_blocks_by_origin == {"hit device": 2, "computed": 2}
    assert engine.memory.num_blocks_by_origin == {"computed": 6, "hit device": 2}


def test_blocks_that_were_evicted_are_found_on_the_host():
    engine = make_engine(num_blocks=4, host_slots=8, caching=True, max_model_len=16)
    served(engine, prompt_of(11))
    served(engine, prompt_of(11, seed=1))  # needs the whole pool
    engine.add_request(prompt_of(11), asking(4), request_id="again")
    step(engine)
    assert origins(engine, "again") == {0: ["hit host", "hit host", "computed"]}


class AtOnce(Executor):
    """Runs its tasks before it returns."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def test_blocks_of_an_earlier_process_are_found_on_disk(tmp_path):
    def engine_on_disk():
        disk = DiskTier(tmp_path, BlockFormat("model", (Leaf("kv", (2, 4), "uint64"),)), 10**6, executor=AtOnce())
        return make_engine(num_blocks=8, host_slots=8, caching=True, max_model_len=16, disk=disk), disk

    engine, disk = engine_on_disk()
    served(engine, prompt_of(11))
    engine.flush()
    disk.close()
    engine, disk = engine_on_disk()
    snapshot = take_snapshot(engine)
    assert sorted(b.start for b in snapshot.of("disk")) == [0, 4, 8]
    assert snapshot.summary()["disk"] == {"blocks": 3, "free": 0, "held": 0, "cached": 3, "moving": 0, "utilisation": 0}
    assert served(engine, prompt_of(11)) == {"hit disk": 2, "computed": 2}
    assert engine.memory.counters.hits_disk == 2
    moved = take_snapshot(engine).summary()["moved_bytes"]
    assert moved["disk to host"] == 2 * engine.scheduler.layout.block_bytes > 0
    disk.close()


def test_completions_share_the_prompt_and_copy_the_block_they_write_to():
    engine = make_engine(caching=False)
    engine.add_request(prompt_of(10), asking(6, n=3, temperature=1.0, seed=0), request_id="three")
    while len(engine.scheduler.order) < 3:
        step(engine)
    request = engine.requests["three"]
    # Ten tokens in blocks of four: the third block is half full. Whoever writes to it first leaves it to the others.
    assert origins(engine, "three")[0][:2] == ["computed", "computed"]
    assert origins(engine, "three")[1][:2] == origins(engine, "three")[2][:2] == ["shared", "shared"]
    thirds = Counter(found[2] for found in origins(engine, "three").values())
    assert thirds["copied"] == engine.memory.counters.copied == 2
    run(engine)
    # 15 tokens computed of each: four blocks. Two completions bring three shared ones, and one more each is computed.
    assert request.metrics.num_blocks_by_origin == {"computed": 6, "shared": 6, "copied": 2}


def test_beams_share_blocks_and_those_that_are_dropped_count_too():
    engine = make_engine(max_num_seqs=4)
    request = engine.add_request(prompt_of(10), asking(8, beam_width=3))
    labels = set()
    while engine.has_work:
        step(engine)
        labels |= {label for found in origins(engine, request.request_id).values() for label in found}
    assert {"computed", "shared", "copied"} <= labels
    assert request.metrics.num_blocks_by_origin == engine.memory.num_blocks_by_origin
    assert request.metrics.num_blocks_by_origin["copied"] == engine.memory.counters.copied > 0


def test_a_swapped_row_gets_its_blocks_back_from_the_host():
    engine = make_engine(num_blocks=6, host_slots=6, preempt="swap", max_model_len=24)
    requests = [engine.add_request(prompt_of(8, seed), asking(16)) for seed in range(2)]
    swapped_in = set()
    while engine.has_work:
        step(engine)
        swapped_in |= {o for found in origins(engine, "request-1").values() for o in found}
    assert "swapped" in swapped_in
    first, second = (r.metrics.num_blocks_by_origin for r in requests)
    assert first == {"computed": 6}
    assert second["swapped"] == engine.memory.counters.swapped_in > 0
    # Only what the host kept is not computed a second time.
    assert second["computed"] == 6


def test_a_row_that_is_computed_again_counts_its_blocks_again():
    engine = make_engine(num_blocks=6, preempt="recompute", max_model_len=24)
    requests = [engine.add_request(prompt_of(8, seed), asking(16)) for seed in range(2)]
    run(engine)
    assert requests[1].metrics.num_preemptions == 1
    first, second = (r.metrics.num_blocks_by_origin for r in requests)
    assert first == {"computed": 6} and set(second) == {"computed"} and second["computed"] > 6


def test_blocks_that_a_window_has_returned_count():
    engine = make_engine((AttentionPattern(window=4),) * 2, num_blocks=8, max_num_batched_tokens=4)
    request = engine.add_request(prompt_of(20), asking(8))
    held = []
    while engine.has_work:
        step(engine)
        held.append(len(take_snapshot(engine).of_request(request.request_id)))
    # 27 tokens computed: seven blocks in all, of which at most two are seen at once.
    assert request.metrics.num_blocks_by_origin == {"computed": 7} and max(held) == 2


def test_origins_move_up_with_their_blocks_when_a_window_returns_the_first_ones():
    pattern = (AttentionPattern(window=8),) * 2
    engine = make_engine(pattern, caching=True, max_num_batched_tokens=4)
    served(engine, prompt_of(20))
    engine.add_request(prompt_of(20), asking(16), request_id="again")
    seen = []
    while engine.has_work:
        step(engine)
        if found := origins(engine, "again"):
            seen.append(found[0])
    assert seen[0][0] == "hit device" and seen[-1] == ["computed"] * len(seen[-1])
    # A found block is never behind a computed one.
    assert all(found == sorted(found, reverse=True) for found in seen)


def test_reported_counts_are_the_readers_own():
    engine = make_engine(caching=True)
    request = engine.add_request(prompt_of(11), asking(4))
    run(engine)
    request.output().metrics.num_blocks_by_origin["computed"] = 99
    assert request.output().metrics.num_blocks_by_origin == {"computed": 4}


@pytest.fixture(scope="module")
def llm():
    return make_llm(Letters(), enable_prefix_caching=True)


def test_with_the_real_model(llm):
    prompt = "the other thing in the river and a little more of it"
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (first,) = llm.generate(prompt, params)
    tokens = len(first.prompt_token_ids)
    assert first.metrics.num_blocks_by_origin == {"computed": -(-(tokens + 5) // 16)}
    (again,) = llm.generate(prompt, SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=6, ignore_eos=True))
    found = again.metrics.num_blocks_by_origin
    hits = (tokens - 1) // 16
    assert found["hit device"] == hits > 0 and again.num_cached_tokens == hits * 16
    # The second completion shares the blocks of the prompt but for its last token.
    assert found["shared"] == -(-(tokens - 1) // 16)
    assert take_snapshot(llm.engine).summary()["moved_bytes"]["within device"] == found["copied"] * llm.block_bytes > 0

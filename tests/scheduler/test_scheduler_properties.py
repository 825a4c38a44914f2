"""Whatever is asked, aborted and squeezed, in any order: the books balance after every step, and every text is the one
that its prompt gives alone, without blocks."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana_jax.kv.patterns import FULL, AttentionPattern, LiveRange
from ksana_jax.kv.prefix_index import sha256
from ksana_jax.kv.replacement import POLICIES as EVICTIONS
from ksana_jax.request import FinishReason
from ksana_jax.scheduler.policies import NAMES
from tests.fakes import (
    VOCAB,
    FakeExecutor,
    asking,
    make_engine,
    prompt_of,
    reference_hidden,
    reference_tokens,
    score,
    step,
    until_stop,
)
from tests.reference import literal

PATTERNS = {
    "full": (FULL, FULL),
    "sliding": (AttentionPattern(window=5),) * 2,
    "sliding, only itself": (AttentionPattern(window=1),) * 2,
    "sink": (AttentionPattern(window=4, num_sinks=3),) * 2,
    "dilated": (AttentionPattern(window=8, stride=3),) * 2,
    "global": (AttentionPattern(window=3, global_every=7),) * 2,
    "layers that differ": (AttentionPattern(window=6, num_sinks=1), AttentionPattern(window=3, global_every=9)),
    "one layer sees everything": (AttentionPattern(window=2), FULL),
}
LONGEST = 40


def text_from_tree(length: int, branch: int) -> np.ndarray:
    """One of four texts: the others leave the first one at positions 0, 9 and 22."""
    text = prompt_of(LONGEST)
    leaves = (LONGEST, 0, 9, 22)[branch]
    text[leaves:] = prompt_of(LONGEST, branch)[leaves:]
    return text[:length]


class Serving(RuleBasedStateMachine):
    """Requests that come, go and are aborted on an engine of random shape."""

    @initialize(
        pattern=st.sampled_from(sorted(PATTERNS)),
        block_size=st.sampled_from([1, 2, 4, 8]),
        policy=st.sampled_from(NAMES),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        query_tile=st.sampled_from([1, 2, 4, 8]),
        spare=st.sampled_from([-2, 0, 0, 1, 2, 4, 200]),
        caching=st.booleans(),
        shared_rows=st.sampled_from([0, 2, 3]),
        eviction=st.sampled_from(sorted(EVICTIONS)),
        host_slots=st.sampled_from([0, 0, 1, 3, 8, 200]),
        preempt=st.sampled_from(["swap", "recompute", "auto"]),
        write=st.sampled_from(["back", "through", "drop"]),
        digest_bytes=st.sampled_from([1, 32, 32]),
    )
    def start(self, pattern, block_size, policy, max_num_seqs, budget, query_tile, spare, digest_bytes, **memory):
        self.patterns, self.block_size, self.policy = PATTERNS[pattern], block_size, policy
        live = LiveRange.of(self.patterns)
        # 0 spare blocks: the longest request just fits, and only alone.
        num_blocks = max(live.max_live_blocks(block_size, LONGEST - 1) + spare, 1)
        self.engine = make_engine(
            self.patterns, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget, query_tile=query_tile, max_model_len=LONGEST, policy=policy, eos_ids=(3, 4),
            digest=lambda data: sha256(data)[:digest_bytes], **memory,
        )  # fmt: skip
        self.scheduler = self.engine.scheduler
        self.requests, self.expected, self.aborted = [], {}, set()
        self.seen_steps = 0

    @rule(
        length=st.integers(1, 10) | st.integers(1, LONGEST),
        text=st.integers(0, 3),
        max_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        greedy=st.booleans(),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 5]),
        scores=st.sampled_from([None, None, 0, 2]),
        streams=st.booleans(),
        salt=st.sampled_from(["", "", "other"]),
    )
    def add(self, length, text, max_tokens, n, greedy, ignore_eos, min_tokens, scores, streams, salt):
        prompt = text_from_tree(length, text)
        params = asking(
            max_tokens, n=n, temperature=0 if greedy else 1, ignore_eos=ignore_eos,
            min_tokens=min(min_tokens, max_tokens), logprobs=scores, prompt_logprobs=scores,
        )  # fmt: skip
        waiting, free = list(self.scheduler.waiting), self.scheduler.blocks.num_free
        max_len = min(length + max_tokens, LONGEST)
        needed = self.scheduler.live.max_live_blocks(self.block_size, max(max_len - 1, 1))
        if length >= LONGEST or needed > self.scheduler.blocks.num_blocks:
            words = "max_model_len" if length >= LONGEST else "KV blocks"
            with pytest.raises(ValueError, match=words):
                self.engine.add_request(prompt, params, streams=streams)
            assert self.scheduler.waiting == waiting and self.scheduler.blocks.num_free == free
            return
        request = self.engine.add_request(prompt, params, streams=streams, cache_salt=salt)
        self.requests.append(request)
        for completion in request.completions:
            seq = completion.seq
            tokens = reference_tokens(prompt, max_len - length, self.patterns, seed=None if greedy else seq.seed)
            self.expected[seq] = until_stop(tokens, seq.stop_ids, params.min_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        if not request.finished:
            self.aborted.add(request)
        self.engine.abort(request.request_id)
        assert request.finished

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.step()

    def step(self):
        before = {r: [len(c.token_ids) for c in r.completions] for r in self.requests if not r.finished}
        reported = step(self.engine)
        for request, counts in before.items():
            grown = [len(c.token_ids) for c in request.completions] != counts
            if request.finished or (request.completions[0].streams and grown):
                assert request in reported
        self.check_step()
        self.check_live_blocks()
        self.check_order()

    def check_step(self):
        """The last step kept to its budgets."""
        executor, scheduler = self.engine.executor, self.scheduler
        assert isinstance(executor, FakeExecutor)
        if len(executor.steps) == self.seen_steps:
            return
        self.seen_steps += 1
        assert len(executor.steps) == self.seen_steps
        last, record = executor.steps[-1], self.engine.records[-1]
        assert 1 <= record.num_tokens == (last.arrays.positions >= 0).sum() <= scheduler.max_num_batched_tokens
        assert record.num_singles <= scheduler.max_num_seqs and len(scheduler.order) <= scheduler.max_num_seqs
        used = last.arrays.positions[last.shape.num_singles :].reshape(-1, last.shape.query_tile)
        assert (used >= 0).any(axis=1).sum() <= scheduler.max_num_tiles

    def check_order(self):
        """Running and waiting sequences are in the policy's order; with first come, first served nobody overtakes."""
        running = [self.scheduler.rows.seqs[row] for row in self.scheduler.order]
        waiting = [seq for _, _, seq in self.scheduler.waiting]
        for seqs in (running, waiting):
            keys = [(seq.rank, seq.seq_id) for seq in seqs]
            assert keys == sorted(keys)
        # Further completions of a request come when its prompt is computed, and others may have passed them; so may
        # who waits for a prefix that is just being computed.
        waiting = [seq for seq in waiting if seq.rank == seq.seq_id]
        if self.policy == "fcfs" and running and waiting and not self.engine.memory.prefixes.enabled:
            assert running[-1].rank < waiting[0].seq_id

    def check_live_blocks(self):
        """A row holds exactly the blocks that some layer's later queries can see."""
        rows, size = self.scheduler.rows, self.block_size
        for row in self.scheduler.order:
            done, covered = int(rows.num_computed[row]), int(rows.covered[row])
            later = np.arange(done, done + LONGEST + 10)[:, None]
            positions = np.arange(covered)[None]
            seen = np.any([literal(p, later, positions)[0] for p in self.patterns], axis=(0, 1))
            # What will be written is seen by the query that writes it.
            expected = np.flatnonzero((seen | (positions[0] >= done)).reshape(-1, size).any(axis=1)) * size
            assert rows.block_starts[row, : rows.num_blocks[row]].tolist() == expected.tolist()
            if not any(p.window is None or p.global_every for p in self.patterns):
                sinks, window = self.scheduler.live.num_sinks, self.scheduler.live.window or 0
                assert len(expected) <= math.ceil(sinks / size) + math.ceil(window / size) + 1

    @invariant()
    def every_text_so_far_begins_as_expected(self):
        for request in getattr(self, "requests", ()):
            for completion in request.completions:
                seq, tokens = completion.seq, self.expected[completion.seq]
                if seq.row is None:
                    got = seq.token_ids
                else:
                    got = self.scheduler.rows.token_ids[seq.row, : self.scheduler.rows.num_tokens[seq.row]]
                got = got[seq.num_prompt :].tolist()
                assert got == tokens[: len(got)]
                assert completion.token_ids == got[: len(completion.token_ids)]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        # Each step computes a token; a restart can cost a sequence all it had, once for each that overtakes it.
        work = sum(s.max_len for s in self.expected)
        for _ in range(work * (len(self.expected) + 1) + 1):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "work is left that makes no progress"
        self.engine.step()  # what is still to be moved
        assert self.scheduler.blocks.num_used == 0
        assert self.engine.memory.host is None or self.engine.memory.host.pool.num_used == 0
        assert not self.engine.requests and not len(self.scheduler.order) and not self.scheduler.waiting
        for request in self.requests:
            self.check_finished(request)

    def check_finished(self, request):
        output = request.output()
        assert output.finished
        for completion, given in zip(request.completions, output.outputs, strict=True):
            expected = self.expected[completion.seq]
            if request in self.aborted:
                if given.finish_reason is FinishReason.ABORT:
                    assert given.token_ids == expected[: len(given.token_ids)]
                    continue
            assert given.token_ids == expected
            stopped = expected[-1] in completion.seq.stop_ids and len(expected) > request.params.min_tokens
            assert given.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert given.stop_reason == (expected[-1] if stopped else None)
            if request.params.logprobs is not None:
                self.check_scores(request, given)

    def check_scores(self, request, given):
        """Each token of prompt and output is scored once, where the one before it was computed."""
        text = np.concatenate([request.prompt_token_ids, given.token_ids])
        scores = score(reference_hidden(text, self.patterns)[:-1], text[1:], 0, VOCAB)
        entries = [*request.prompt_logprobs[1:], *given.logprobs]
        assert request.prompt_logprobs[0] is None
        assert [e[t].logprob for e, t in zip(entries, text[1:].tolist(), strict=True)] == scores.logprob.tolist()


TestServing = Serving.TestCase
TestServing.settings = settings(stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])

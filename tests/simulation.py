"""A serving engine of random shape on a fake device and a fake disk, and all that can befall it. What must hold after
every step is checked after every step; the numbers I1 to I11 are those that the comments name.

The real scheduler, memory and tiers run; device and disk are doubles (`tests.fakes`) in which every number says where
it comes from, so that a stale, stolen, misaligned, half-copied or corrupted block changes a text at once.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import numpy as np

from ksana_jax.core.request import FinishReason, SamplingParams
from ksana_jax.engine.engine import Engine, Request
from ksana_jax.kv.groups import group_layers
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.prefix_index import Scope, sha256
from ksana_jax.kv.replacement import REPLACEMENT_POLICIES
from ksana_jax.scheduler.policies import SCHEDULING_POLICIES
from ksana_jax.scheduler.step.ladders import all_shapes
from tests.expected import LONGEST, PATTERNS, STOP_IDS, expected_beams, expected_tokens, visible_later
from tests.fake_network import FULLY
from tests.fakes import VOCAB, FakeExecutor, asking, make_engine, prompt_of, reference_hidden, score, step
from tests.kv.disk.double import TroubledDisk
from tests.simulated_requests import TEXTS, Expected, drawn_beams, drawn_params, refusal_of


class Simulation:
    """An engine of random shape, its requests and what they must give.

    Args:
      rng: decides everything; hypothesis has one that it can shrink.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.pattern = rng.choice(sorted(PATTERNS))
        self.block_size = rng.choice([1, 2, 4, 8])
        layout = KVLayout(group_layers(PATTERNS[self.pattern]), self.block_size)
        # 0 spare blocks: the longest request just fits, and only alone. Fewer: it is refused.
        spare = rng.choice([-2, 0, 0, 1, 2, 4, 200])
        self.disk = TroubledDisk() if rng.random() < 0.4 else None
        self.settings: dict[str, Any] = {
            "num_blocks": max(layout.blocks_of(LONGEST - 1) + spare, 1),
            "block_size": self.block_size,
            "max_num_seqs": rng.randint(1, 6),
            "max_num_batched_tokens": rng.randint(1, 24),
            "query_tile": rng.choice([1, 2, 4, 8, 16]),
            "policy": rng.choice(list(SCHEDULING_POLICIES)),
            "caching": self.disk is not None or rng.random() < 0.6,
            "shared_rows": rng.choice([0, 2, 3]),
            "replacement": rng.choice(sorted(REPLACEMENT_POLICIES)),
            "host_slots": rng.choice([1, 3, 8, 200] if self.disk else [0, 0, 1, 3, 8, 200]),
            "preempt": rng.choice(["swap", "recompute", "auto"]),
            "write": rng.choice(["back", "through", "drop"]),
            "read_timeout_s": rng.choice([0, 20, 1000]),
        }
        # Not drawn: seeds of earlier simulations keep their meaning.
        self.settings["async_scheduling"] = self.settings["max_num_batched_tokens"] % 2 == 0
        self.settings["num_scheduler_steps"] = (1, 1, 2, 3, 8)[self.settings["max_num_batched_tokens"] % 5]
        self.digest_bytes = rng.choice([1, 32, 32])
        if self.disk is not None:  # a file says what it follows by a digest alone: two texts with equal ones are one
            self.digest_bytes = 32
        self.draw_storage()
        self.requests: dict[Request, Expected] = {}
        self.aborted: set[Request] = set()
        self.ended: set[Request] = set()
        self.num_steps = 0
        self.seen: collections.Counter[str] = collections.Counter()
        self.start()

    def draw_storage(self) -> None:
        """What the pool holds: nothing but keys here. See `tests.storing_simulation`."""

    def drawn(self) -> set[str]:
        """Names of the settings in use, by the names of `tests.simulation_settings`."""
        found = {"pattern"} if PATTERNS[self.pattern] != FULLY else set()
        found |= {"prefix cache"} if self.settings["caching"] else set()
        found |= {"disk tier"} if self.disk is not None else set()
        if self.settings["host_slots"]:
            found |= {"host memory", f"preempt {self.settings['preempt']}"}
        found |= {"shared prefix attention"} if self.settings["shared_rows"] else set()
        found |= {"a step ahead"} if self.settings["async_scheduling"] else set()
        found |= {"several steps"} if self.settings["num_scheduler_steps"] > 1 else set()
        events = {"beam searches", "several completions", "log-probabilities", "forced tokens"}
        return found | {event for event in events if self.seen[event]}

    def start(self) -> None:
        """A new process: nothing is left but the disk."""
        self.engine: Engine = make_engine(
            PATTERNS[self.pattern],
            max_model_len=LONGEST,
            eos_ids=STOP_IDS,
            disk=self.disk,
            scope=self.scope(),
            digest=lambda data: sha256(data)[: self.digest_bytes],
            **self.settings,
        )
        self.let_disk_go_on()
        self.seen_steps = 0
        self.requests.clear()

    def let_disk_go_on(self) -> None:
        """Waiting for the disk is what lets its double go on."""
        if self.engine.memory.disk_reads is not None:
            self.engine.memory.disk_reads.wait = self.disk.tick  # type: ignore[method-assign]

    def scope(self) -> Scope:
        patterns = PATTERNS[self.pattern]
        return Scope("model", repr(patterns), min(p.full_until for p in patterns))

    def restart(self) -> None:
        """The process is killed, or ends in good order."""
        if not self.engine.has_work and self.rng.random() < 0.5:
            self.engine.flush()
        self.count("restarts")
        self.start()

    def count(self, event: str) -> None:
        """Adds an event, and what the engine has counted, to what was seen."""
        self.seen[event] += 1
        self.seen.update(dataclasses.asdict(self.engine.memory.counters))
        self.seen["preemptions"] += self.engine.scheduler.num_preemptions

    def change_pattern(self) -> None:
        """Another attention pattern, as far as the pool holds it; cached blocks of both live side by side."""
        if self.engine.has_work:
            return
        self.seen["changes of pattern"] += 1
        self.pattern, executor = self.rng.choice(sorted(PATTERNS)), self.engine.executor
        assert isinstance(executor, FakeExecutor)
        executor.shapes = set(all_shapes(self.engine.builder.buckets))
        self.engine.set_patterns(PATTERNS[self.pattern])
        self.requests.clear()

    # ------------------------------------------------------------------ requests

    def text(self, length: int) -> np.ndarray:
        """The beginning of one of four texts: the others leave the first one at positions 0, 9 and 22."""
        return self.rng.choice(TEXTS)[:length]

    def add(self) -> None:
        rng = self.rng
        length = rng.randint(1, 10) if rng.random() < 0.5 else rng.randint(1, LONGEST)
        params = drawn_params(rng)
        self.request(self.text(length), params, rng.choice(["", "", "other"]))

    def add_beams(self) -> None:
        params = drawn_beams(self.rng)
        self.request(self.text(self.rng.randint(1, 12)), params, "")

    def next_turn(self) -> None:
        """A chat goes on: text so far, the model's answer, and something new."""
        ended = [r for r in self.requests if r in self.ended and r not in self.aborted]
        if not ended:
            return
        request = self.rng.choice(ended)
        answer = self.requests[request].tokens[0]
        text = np.concatenate([request.prompt_token_ids, answer, prompt_of(self.rng.randint(1, 4), 9)])
        params = asking(self.rng.randint(1, 8), ignore_eos=True)
        self.seen["turns"] += 1
        self.request(text.astype(np.int32), params, self.requests[request].salt)

    def request(self, prompt: np.ndarray, params: SamplingParams, salt: str) -> None:
        num_outputs = min(params.max_tokens, len(params.forced_token_ids or range(LONGEST)))
        engine, scheduler, max_len = self.engine, self.engine.scheduler, min(len(prompt) + num_outputs, LONGEST)
        waiting, free = list(scheduler.waiting), scheduler.blocks.num_free
        if words := self.refusal(len(prompt), max_len, params):
            assert words in refusal_of(engine, prompt, params)
            assert scheduler.waiting == waiting and scheduler.blocks.num_free == free
            return
        self.seen["requests" if not params.beam_width else "beam searches"] += 1
        self.seen["several completions"] += params.n > 1 and not params.beam_width
        self.seen["log-probabilities"] += params.logprobs is not None
        self.seen["forced tokens"] += params.forced_token_ids is not None
        request = engine.add_request(prompt, params, streams=self.rng.random() < 0.3, cache_salt=salt)
        self.requests[request] = self.expect(request, max_len, salt)

    def refusal(self, num_prompt: int, max_len: int, params: SamplingParams) -> str:
        """A word of the error with which a request is refused; "" where it is served."""
        scheduler = self.engine.scheduler
        if num_prompt >= LONGEST:
            return "max_model_len"
        if params.beam_width > scheduler.max_num_seqs:
            return "beam_width"
        needed = self.most_blocks(max(max_len - 1, 1), num_prompt) * max(params.beam_width, 1)
        return "KV blocks" if needed > scheduler.blocks.num_blocks else ""

    def most_blocks(self, max_tokens: int, num_prompt: int) -> int:
        return self.engine.scheduler.layout.blocks_of(max_tokens)

    def expect(self, request: Request, max_len: int, salt: str) -> Expected:
        prompt, params = request.prompt_token_ids, request.params
        stop_ids, count = request.completions[0].seq.stop_ids, max_len - len(prompt)
        if params.beam_width:
            width, penalty = params.beam_width, params.length_penalty
            found = self.beams_after(prompt, width, penalty, stop_ids, count)[: params.n]
            return Expected([list(tokens) for _, tokens in found], [logprob for logprob, _ in found], salt)
        if params.forced_token_ids is not None:
            return Expected([list(params.forced_token_ids[:count])] * params.n, None, salt)
        seeds = [c.seq.seed if params.temperature else None for c in request.completions]
        found = [self.tokens_after(prompt, count, seed, params.min_tokens, stop_ids) for seed in seeds]
        return Expected(found, None, salt)

    def tokens_after(self, prompt: np.ndarray, count: int, seed: int | None, least: int, stop_ids) -> list[int]:
        """What a prompt gives alone."""
        return expected_tokens(prompt.tobytes(), count, self.pattern, seed, least, stop_ids)

    def beams_after(self, prompt: np.ndarray, width: int, penalty: float, stop_ids, count: int):
        return expected_beams(prompt.tobytes(), width, penalty, PATTERNS[self.pattern], stop_ids, count)

    def hidden_of(self, text: np.ndarray, num_prompt: int) -> np.ndarray:
        """What the last layer computes of a text that began with a prompt."""
        return reference_hidden(text, PATTERNS[self.pattern])

    def starts_of(self, group: int, row: int) -> list[int]:
        """Where the blocks begin that a row must hold for the layers of a group."""
        rows, layers = self.engine.scheduler.rows, self.engine.scheduler.layout.groups[group].layers
        done, covered = int(rows.num_computed[row]), int(rows.allocated_until[row])
        return visible_later(self.pattern, layers, done, covered, self.block_size)

    def abort(self) -> None:
        if self.requests:
            request = self.rng.choice(list(self.requests))
            if not request.finished:
                self.seen["aborts"] += 1
                self.aborted.add(request)
                self.ended.add(request)
            self.engine.abort(request.request_id)
            assert request.finished

    def meanwhile(self) -> None:
        """What else befalls it, between all that is drawn; see `tests.saving_sessions`."""

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        before = {r: [len(c.token_ids) for c in r.completions] for r in self.requests if r not in self.ended}
        running = set(self.engine.scheduler.rows.seqs)
        reported = step(self.engine)  # I1, I2, I4: the books are checked there
        self.num_steps += 1
        if self.disk is not None:
            self.disk.tick()
        for request, counts in before.items():
            grown = [len(c.token_ids) for c in request.completions] != counts
            if request.finished or (grown and getattr(request.completions[0], "streams", False)):
                assert request in reported
        for request in reported:
            assert request not in self.ended, "something came after the end"  # I10
            if request.finished:
                self.ended.add(request)
                self.check_finished(request)
        self.check_step()
        self.check_rows(running)
        self.check_order()

    def failing_step(self) -> None:
        """The device fails: all that runs or waits is lost, and nothing else."""
        executor = self.engine.executor
        assert isinstance(executor, FakeExecutor)
        executor.fails = self.rng.choice(["before moves", "after moves"])
        try:
            self.step()
        except FakeExecutor.Failed:
            self.seen_steps = len(executor.steps)
            self.engine.scheduler.check()
            self.let_disk_go_on()
            self.seen["failed steps"] += 1
            assert not self.engine.has_work and all(r.finished for r in self.requests)
            self.aborted |= self.requests.keys() - self.ended
            self.ended |= self.requests.keys()
        finally:
            executor.fails = None

    def disk_trouble(self) -> None:
        if self.disk is None:
            return
        match self.rng.randint(0, 3):
            case 0:
                self.disk.delay = self.rng.choice([0, 1, 5, 10**6])
            case 1:
                self.disk.corrupt(self.rng)
            case 2:
                self.disk.enabled = False  # and all its reads fail
                self.disk.delay = 0
            case _:
                self.disk.delay = 0

    # ------------------------------------------------------------------ what must hold

    def check_step(self) -> None:
        """The last step kept to its budgets and to the shapes that were compiled (the executor sees to those)."""
        executor, scheduler = self.engine.executor, self.engine.scheduler
        assert isinstance(executor, FakeExecutor)
        under_way = self.engine.num_steps_under_way
        num_collected = len(executor.steps) - under_way
        self.seen["steps ahead"] += bool(under_way)
        self.seen["several steps ahead"] += under_way > 1
        if num_collected == self.seen_steps:
            return
        self.seen_steps += 1
        assert num_collected == self.seen_steps
        last, record = executor.steps[num_collected - 1], self.engine.records[-1]
        num_tokens = np.count_nonzero(last.arrays.positions >= 0)
        assert 1 <= record.num_tokens == num_tokens <= scheduler.max_num_batched_tokens
        assert record.num_decodes <= scheduler.max_num_seqs and len(scheduler.order) <= scheduler.max_num_seqs
        assert max(record.blocks_in_use, record.peak_blocks) <= scheduler.blocks.num_blocks  # usage of at most 100 %

    def check_rows(self, running: set) -> None:
        """I3: a row holds exactly the blocks that later queries see. I5 to I7: its text is the one that its prompt
        gives alone, so far."""
        rows, scheduler = self.engine.scheduler.rows, self.engine.scheduler
        for row in scheduler.order.tolist():
            # The step ahead has placed it, and not advanced: what its prefix no longer attends to is still there.
            if self.engine.num_steps_under_way and rows.seqs[row] not in running:
                continue
            for group in range(len(scheduler.layout.groups)):
                starts = rows.block_starts[group, row, : rows.num_blocks[group, row]].tolist()
                assert starts == self.starts_of(group, row)
        for request, expected in self.requests.items():
            if request in self.ended or request.beams is not None:
                continue
            for completion, tokens in zip(request.completions, expected.tokens, strict=True):
                seq = completion.seq
                text = seq.token_ids if seq.row is None else rows.token_ids[seq.row, : rows.num_known[seq.row]]
                got = text[seq.num_prompt :].tolist()
                assert got == tokens[: len(got)]
                assert completion.token_ids == got[: len(completion.token_ids)]

    def check_order(self) -> None:
        """I9: running and waiting sequences are in the policy's order; with fcfs nobody overtakes."""
        scheduler = self.engine.scheduler
        running = [scheduler.rows.seqs[row] for row in scheduler.order.tolist()]
        waiting = [seq for _, _, seq in scheduler.waiting]
        for seqs in (running, waiting):
            keys = [(seq.rank, seq.seq_id) for seq in seqs]
            assert keys == sorted(keys)
        # Further completions of a request come when its prompt is computed, and others may have passed them; so may
        # who waits for a prefix that is just being computed, or for the choice of the next beam.
        if self.settings["policy"] != "fcfs" or self.engine.memory.prefixes.enabled:
            return
        waiting = [seq for seq in waiting if seq.rank == seq.seq_id and not seq.is_beam]
        if running and waiting:
            assert running[-1].rank < waiting[0].seq_id or running[-1].is_beam

    def check_finished(self, request: Request) -> None:
        """I6, I10, I11: the end is the one expected, given once, and the numbers add up."""
        output, expected = request.output(), self.requests[request]
        assert output.finished and request.request_id not in self.engine.requests
        assert 0 <= (output.num_cached_tokens or 0) < len(request.prompt_token_ids)
        logprobs = expected.logprobs or [None] * len(expected.tokens)
        for completion, given, tokens, logprob in zip(
            request.completions, output.outputs, expected.tokens, logprobs, strict=True
        ):
            assert given.token_ids == tokens
            seq = completion.seq
            stopped = tokens[-1] in seq.stop_ids and len(tokens) > request.params.min_tokens
            assert given.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert given.stop_reason == (tokens[-1] if stopped else None)
            if logprob is not None:
                assert given.cumulative_logprob == logprob
            if request.params.logprobs is not None and request.params.prompt_logprobs is not None:
                self.check_scores(request, given)

    def check_scores(self, request: Request, given) -> None:
        """Each token of prompt and output is scored once, where the one before it was computed."""
        text = np.concatenate([request.prompt_token_ids, given.token_ids])
        scores = score(self.hidden_of(text, len(request.prompt_token_ids))[:-1], text[1:], 0, VOCAB)
        prompt_logprobs = request.prompt_logprobs
        assert prompt_logprobs is not None and prompt_logprobs[0] is None
        entries = [*prompt_logprobs[1:], *given.logprobs]
        assert [e[t].logprob for e, t in zip(entries, text[1:].tolist(), strict=True)] == scores.logprob.tolist()

    def finish(self) -> None:
        """I8: whatever is left makes progress; then everything is as in the beginning."""
        if self.disk is not None and self.disk.delay > 100 and self.rng.random() < 0.5:
            self.disk.delay = 0  # otherwise the requests give the disk up
        # Each step computes a token; a restart can cost a sequence all it had, once for each that overtakes it.
        most = LONGEST * sum(r.params.num_sequences for r in self.requests)
        for _ in range(most * (len(self.requests) + 1) + 2 * self.settings["read_timeout_s"] + 2):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "work is left that makes no progress"
        if self.disk is not None:
            self.disk.end_all()
        self.engine.step()  # what is still to be moved
        if (reads := self.engine.memory.disk_reads) is not None:
            reads.poll()
        self.engine.scheduler.check()
        memory = self.engine.memory
        assert memory.blocks.num_used == 0 and (memory.host is None or memory.host.pool.num_used == 0)
        assert not self.engine.requests and not self.engine._watched and not len(self.engine.scheduler.order)
        assert all(request in self.ended for request in self.requests)
        self.count("simulations")

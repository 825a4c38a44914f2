"""An executor with the real interface and hashes for numbers: whatever reaches a query through its block table decides
the next token, so a stale, stolen, misaligned, half-written or early freed block shows in the text at once.

The fake network has layers like a real one. What a token leaves in the cache of layer l, h_l, is a hash of its id, its
position and all that it saw below:

    h_0     = hash(id, position)
    h_(l+1) = hash(h_l, sum over visible slots j of h_l(j) * (2 * position of j + 1))

and the next token is hash(h_last) mod vocab. `reference_hidden` computes the same from a text alone: no blocks, no
chunks, and the pattern from its literal definition.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.config import EngineConfig, ModelConfig
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.layout import KVLayout, group_layers
from ksana_jax.kv.moves import Moves
from ksana_jax.kv.prefix_index import PrefixIndex, Scope, sha256
from ksana_jax.patterns import FAR, FULL, AttentionPattern
from ksana_jax.request import SamplingParams
from ksana_jax.step.buckets import Buckets
from ksana_jax.step.contract import StepArrays, StepInput, StepOutput, StepShape, TokenScores
from tests.reference import literal

VOCAB = 97
Patterns = Sequence[AttentionPattern]


def two_layers(pattern: AttentionPattern) -> Patterns:
    """The fewest layers with which a cached token depends on what it saw."""
    return (pattern, pattern)


FULLY = two_layers(FULL)
SINKS = two_layers(AttentionPattern(window=6, num_sinks=2))


def _u64(x) -> np.ndarray:
    return np.atleast_1d(np.asarray(x)).astype(np.uint64, copy=False)


def _mix(x: np.ndarray) -> np.ndarray:
    """A hash of 64 bits, element by element (the finaliser of splitmix64, doi:10.1145/2660193.2660195)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _embed(token_ids, positions) -> np.ndarray:
    return _mix((_u64(token_ids) << np.uint64(32)) + _u64(positions))


def _weights(positions: np.ndarray) -> np.ndarray:
    """What the keys at some positions are multiplied with: it tells them apart in a sum."""
    return _u64(positions) * np.uint64(2) + np.uint64(1)


def _attend(hidden: np.ndarray, weighed: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """hidden [T], weighed and visible [T, C]: the next layer's hidden [T]."""
    return _mix(hidden ^ _mix(np.where(visible, weighed, np.uint64(0)).sum(axis=1, dtype=np.uint64)))


def choose(hidden: np.ndarray, vocab: int, seeds=None, num_outputs=None) -> np.ndarray:
    """Tokens [T] after hidden [T]; with seeds [T], sampled at place num_outputs [T] of each seed's random stream."""
    if seeds is not None:
        hidden = hidden ^ _mix(_mix(_u64(seeds)) + _u64(num_outputs))
    return (_mix(hidden) % np.uint64(vocab)).astype(np.int32)


def score(hidden: np.ndarray, token_ids, num_top: int, vocab: int) -> TokenScores:
    """Log-probabilities that say of which hidden [T] and token [T] they are."""
    tops = hidden[:, None] + np.arange(num_top, dtype=np.uint64)
    return TokenScores(
        logprob=-((_mix(hidden ^ _u64(token_ids)) >> np.uint64(44)).astype(np.float64)),
        rank=np.full(len(hidden), 1 + num_top),
        top_ids=(_mix(tops) % np.uint64(vocab)).astype(np.int32),
        top_logprobs=-((_mix(~tops) >> np.uint64(20)).astype(np.float64)),
    )


# ------------------------------------------------------------------ no cache, no blocks


def reference_hidden(token_ids, patterns: Patterns) -> np.ndarray:
    """Last layer's hidden [T] of a text [T], all at once."""
    positions = np.arange(len(token_ids))
    hidden = _embed(token_ids, positions)
    for pattern in patterns:
        visible, _ = literal(pattern, positions[:, None], positions[None])
        hidden = _attend(hidden, (hidden * _weights(positions))[None], visible)
    return hidden


def reference_tokens(prompt, count: int, patterns: Patterns, vocab: int = VOCAB, seed: int | None = None) -> list[int]:
    """The `count` tokens that follow a prompt; greedy, or sampled with a seed. Quadratic in what it keeps: nothing."""
    positions = np.arange(len(prompt) + count)
    text = np.concatenate([np.asarray(prompt, np.int64), np.zeros(count, np.int64)])
    # masks[l]: which positions each position sees; layers[l]: what the text so far holds in layer l.
    masks = [literal(p, positions[:, None], positions[None])[0] for p in patterns]
    layers = np.zeros((len(patterns) + 1, len(text)), np.uint64)
    weighed, weights = np.zeros((len(patterns), len(text)), np.uint64), _weights(positions)
    start = 0
    for end in range(len(prompt), len(text)):
        new = slice(start, end)
        layers[0, new] = _embed(text[new], positions[new])
        for at, mask in enumerate(masks):
            weighed[at, new] = layers[at, new] * weights[new]
            layers[at + 1, new] = _attend(layers[at, new], weighed[at][None], mask[new])
        sampled = () if seed is None else ([seed], [end - len(prompt)])
        text[end] = choose(layers[-1, end - 1 : end], vocab, *sampled)[0]
        start = end
    return text[len(prompt) :].tolist()


def until_stop(token_ids: list[int], stop_ids, min_tokens: int = 0) -> list[int]:
    """What is left of an output that ends with the first stop id after min_tokens tokens."""
    ends = (n + 1 for n, token in enumerate(token_ids) if token in stop_ids and n >= min_tokens)
    return token_ids[: next(ends, len(token_ids))]


# ------------------------------------------------------------------ the executor


class FakeExecutor:
    """The fake network on a paged pool: a `step.Executor` that knows of a step only its arrays.

    Args:
      patterns: one for each layer.
      shapes: those that were "compiled"; None takes any.
      host_slots: blocks of host memory.

    Attributes:
      steps: what was executed, the last one last.
      fails: "before moves" or "after moves": whereupon a step fails and leaves noise on the device.
      layout: which layers share a block.
      host_blocks: [host_slots, layers of a group, B] what lies on the host.
    """

    def __init__(
        self,
        patterns: Patterns,
        *,
        num_blocks: int,
        block_size: int,
        vocab: int = VOCAB,
        shapes: Sequence[StepShape] | None = None,
        host_slots: int = 0,
    ):
        self.num_blocks, self.block_size, self.vocab = num_blocks, block_size, vocab
        self.shapes = None if shapes is None else set(shapes)
        self.steps: list[StepInput] = []
        self.fails: str | None = None
        self.set_patterns(patterns)
        self._num_noises = 0
        self.layout = KVLayout(group_layers(patterns), block_size)
        layers = len(self.layout.groups[0].layers)
        # One slot more: padding writes there.
        self.keys = np.zeros((layers, num_blocks * block_size + 1), np.uint64)
        self._blocks = self.keys[:, :-1].reshape(layers, num_blocks, block_size)
        assert np.shares_memory(self._blocks, self.keys), "a view, not a copy"
        self.host_blocks = np.zeros((host_slots, layers, block_size), np.uint64)
        self.reset()

    class Failed(RuntimeError):
        """A step that was meant to fail did."""

    def set_patterns(self, patterns: Patterns) -> None:
        self.patterns = patterns
        arrays = {pattern: pattern.arrays() for pattern in patterns}
        self._patterns = [arrays[pattern] for pattern in patterns]

    def reset(self) -> None:
        """Noise everywhere, and the host's blocks in another place."""
        self.scramble(np.ones(self.num_blocks, bool))
        self.host_blocks = np.empty_like(self.host_blocks)
        self.scramble_host(np.ones(len(self.host_blocks), bool))

    def scramble(self, blocks: np.ndarray) -> None:
        """Fills some blocks [M] (boolean) with noise, as whoever takes them next might."""
        self._blocks[:, blocks] = self._noise()

    def scramble_host(self, slots: np.ndarray) -> None:
        """The same for slots [host_slots] of the host."""
        self.host_blocks[slots] = self._noise()

    def _noise(self) -> np.uint64:
        """A number that was not there before: no hash comes out right with it."""
        self._num_noises += 1
        return np.uint64(self._num_noises * 0x9E3779B97F4A7C15 % 2**64)

    def submit(self, step: StepInput) -> StepOutput:
        self.check(step)
        self.steps.append(step)
        if step.moves is not None and self.fails != "before moves":
            self.move(step.moves)
        if self.fails:
            self.scramble(np.ones(self.num_blocks, bool))
            raise self.Failed("as told")
        a, shape = step.arrays, step.shape
        tile_of = np.arange(shape.num_tiles).repeat(np.concatenate([[part.width] * part.count for part in shape.parts]))
        groups = [self._read(a.of_group(group), shape) for group in range(len(self.layout.groups))]
        queries = a.cache_positions[:, :, None]
        hidden, seen, visible = _embed(a.tokens, np.maximum(a.positions, 0)), None, None
        for (group, at), pattern in zip(self.layout.places, self._patterns, strict=True):
            kv_slots, kv_positions, weights = groups[group]
            self.keys[at, a.slots[group]] = hidden
            if (group, pattern) != seen:
                seen, visible = (group, pattern), pattern.visible(queries[group], kv_positions[tile_of])
            hidden = _attend(hidden, (self.keys[at, kv_slots] * weights)[tile_of], visible)
        last = hidden[a.sampled[: step.num_sampled]]
        tokens = choose(last, self.vocab)
        if (s := step.sampling) is not None:
            seeds = (_u64(s.seeds[:, 0]) << np.uint64(32)) + _u64(s.seeds[:, 1])
            tokens = np.where(s.temperature > 0, choose(last, self.vocab, seeds, s.num_outputs), tokens)
        return StepOutput(
            tokens,
            None if step.num_logprobs is None else score(last, tokens, step.num_logprobs, self.vocab),
            None
            if step.targets is None
            else score(hidden, np.maximum(step.targets, 0), step.num_prompt_logprobs, self.vocab),
        )

    def _read(self, a: StepArrays, shape: StepShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, positions and weights [S, P * B] of what each tile can see in the layers of one group."""
        offsets, size = np.arange(self.block_size), shape.num_tiles
        tables, starts = a.block_tables, a.block_starts
        if a.shared_tables is not None and a.shared_starts is not None:
            shared = np.zeros((2, size, tables.shape[1]), np.int32) + np.array([0, FAR], np.int32)[:, None, None]
            rows = np.arange(shape.parts[0].count) // shape.shared_rows
            shared[:, : len(rows)] = a.shared_tables[rows], a.shared_starts[rows]
            tables, starts = np.hstack([shared[0], tables]), np.hstack([shared[1], starts])
        kv_slots = (tables[:, :, None] * self.block_size + offsets).reshape(size, -1)
        kv_positions = (starts[:, :, None] + offsets).reshape(size, -1)
        return kv_slots, kv_positions, _weights(kv_positions)

    def move(self, moves: Moves) -> None:
        """Copies whole blocks; see `step.Moves`."""
        blocks = self._blocks
        for pairs, sources, targets in (
            (moves.saves, self.num_blocks, len(self.host_blocks)),
            (moves.copies, self.num_blocks, self.num_blocks),
            (moves.loads, len(self.host_blocks), self.num_blocks),
        ):
            assert pairs.shape == (len(pairs), 2) and pairs.dtype == np.int32
            assert (pairs >= 0).all() and (pairs < [sources, targets]).all()
            assert len(np.unique(pairs[:, 1])) == len(pairs), "two blocks are copied to one place"
        assert not set(moves.copies[:, 1]) & set(moves.loads[:, 1]), "two blocks are copied to one place"
        self.host_blocks[moves.saves[:, 1]] = blocks[:, moves.saves[:, 0]].swapaxes(0, 1)
        blocks[:, moves.copies[:, 1]] = blocks[:, moves.copies[:, 0]]
        blocks[:, moves.loads[:, 1]] = self.host_blocks[moves.loads[:, 0]].swapaxes(0, 1)

    def check(self, step: StepInput) -> None:
        """Holds a step against the contract of `step.StepArrays`.

        Raises:
          AssertionError: a compiled step would not take it, or would go wrong silently.
        """
        a, shape = step.arrays, step.shape
        assert self.shapes is None or shape in self.shapes, f"{shape} was not compiled"
        tokens, groups = shape.num_tokens, len(self.layout.groups)
        wide = (groups, shape.num_tiles, shape.table_width)
        expected_shapes = [(tokens,), (tokens,), (groups, tokens), (groups, tokens), wide, wide, (shape.max_sampled,)]
        if shape.shared_rows:
            assert shape.parts[0].width == 1
            expected_shapes += [(groups, shape.num_groups, shape.table_width)] * 2
        else:
            assert a.shared_tables is None and a.shared_starts is None
        for name, array, expected in zip(StepArrays._fields, a, expected_shapes, strict=False):
            assert array.shape == expected and array.dtype == np.int32, f"{name}: {array.dtype}{array.shape}"
        real = a.positions >= 0
        slots = a.slots[:, real].ravel()
        assert (a.positions[~real] == -1).all() and (a.cache_positions[:, ~real] == -1).all()
        assert (a.cache_positions[:, real] <= a.positions[real]).all()
        assert (a.cache_positions[:, real] % self.block_size == a.slots[:, real] % self.block_size).all()
        assert (a.slots[:, ~real] == self.num_blocks * self.block_size).all()
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        assert len(slots) and slots.min() >= 0 and slots.max() < self.num_blocks * self.block_size
        assert ((a.block_tables >= 0) & (a.block_tables < self.num_blocks)).all()
        absent = a.block_starts == FAR
        assert (a.block_starts[~absent] % self.block_size == 0).all()
        gaps = np.diff(a.block_starts, axis=2)
        assert ((gaps > 0) | absent[:, :, 1:]).all() and (gaps >= 0).all(), "blocks are not in the order of the text"
        assert ((a.sampled >= 0) & (a.sampled < tokens)).all() and 0 <= step.num_sampled <= shape.max_sampled
        if step.sampling is not None:
            given = [x for x in step.sampling if x is not None]
            assert all(len(x) == step.num_sampled for x in given)


def make_engine(
    patterns: Patterns = FULLY,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    query_tile: int = 4,
    max_model_len: int = 64,
    policy: Any = "fcfs",
    caching: bool = False,
    replacement: Any = "lru",
    preempt: Any = "auto",
    write: Any = "back",
    eos_ids: tuple[int, ...] = (),
    host_slots: int = 0,
    shared_rows: int = 0,
    scope: Scope | None = None,
    digest: Callable[[bytes], bytes] = sha256,
    **memory: Any,
) -> Engine:
    """The real engine, scheduler and batch builder around a fake executor; a clock that ticks once a look.

    Args:
      caching, replacement, write: `EngineConfig`'s enable_prefix_caching, prefix_replacement, cache_write.
      host_slots: blocks of host memory.
      shared_rows: see `Buckets`.
      scope, digest: of the prefix index.
      memory: arguments of KVMemory, such as disk.
    """
    executor = FakeExecutor(patterns, num_blocks=num_blocks, block_size=block_size, host_slots=host_slots)
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        policy=policy,
        preempt=preempt,
        max_num_batched_tokens=max_num_batched_tokens,
        query_tile=query_tile,
        max_model_len=max_model_len,
        enable_prefix_caching=caching,
        prefix_replacement=replacement,
        cache_write=write,
    )
    model = ModelConfig(vocab_size=VOCAB, num_layers=len(patterns), eos_ids=eos_ids)
    buckets = dataclasses.replace(Buckets.of(config, "cpu"), shared_rows=shared_rows)
    engine = build_engine(
        model,
        None,
        config,
        patterns=patterns,
        executor=executor,
        clock=itertools.count().__next__,
        buckets=buckets,
        **{"index": PrefixIndex(block_size, scope, digest), **memory},
    )
    engine.builder = dataclasses.replace(engine.builder, min_saved_tokens=1)
    # What `LLM.warm_up` compiles.
    widest = executor.layout.table_width(max_model_len, max_num_batched_tokens)
    executor.shapes = set(buckets.all_shapes(widest))
    return engine


def asking(max_tokens: int = 8, **settings) -> SamplingParams:
    """Greedy and without text, unless told otherwise."""
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "detokenize": False, **settings})


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    """A prompt of random ids."""
    return np.random.default_rng((seed, length)).integers(0, VOCAB, length).astype(np.int32)


def run(engine: Engine, max_steps: int = 2000) -> int:
    """Steps until nothing is left, the books checked after each; returns how many.

    Raises:
      AssertionError: a check failed, or max_steps steps were not enough.
    """
    for steps in range(max_steps):
        if not engine.has_work:
            return steps
        step(engine)
    raise AssertionError(f"{len(engine.requests)} requests are unfinished after {max_steps} steps")


def step(engine: Engine) -> list:
    """One step; the books are checked, and what is free is filled with noise, so that no one can live on it."""
    reported = engine.step()
    engine.scheduler.check()
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    blocks = engine.scheduler.blocks
    executor.scramble((blocks.ref_count == 0) & ~blocks.kept)
    if engine.memory.host is not None:
        slots = engine.memory.host.pool
        executor.scramble_host((slots.ref_count == 0) & ~slots.kept)
    return reported

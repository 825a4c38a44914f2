"""An executor with the real interface around `tests.fake_network`, on a paged pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.groups import group_layers
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.moves import Moves
from ksana_jax.scheduler.step.executor import share_a_call
from ksana_jax.scheduler.step.types import StepArrays, StepInput, StepOutput, StepShape, fed
from tests.fake_network import VOCAB, Patterns, attend, choose, embed, score, u64, weights_of


class FakeExecutor:
    """The fake network on a paged pool: a `step.executor.Executor` that knows of a step only its arrays.

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
        layout: KVLayout | None = None,
    ):
        self.num_blocks, self.block_size, self.vocab = num_blocks, block_size, vocab
        self.shapes = None if shapes is None else set(shapes)
        self.steps: list[StepInput] = []
        self.num_calls_together = 0
        self.fails: str | None = None
        self.set_patterns(patterns)
        self._num_noises = 0
        self._sampled = np.zeros(1, np.int32)
        self.layout = layout or KVLayout(group_layers(patterns), block_size)
        self._allocate(host_slots)
        self.reset()

    def _allocate(self, host_slots: int) -> None:
        """Makes `keys`, `_blocks` [layers of a group, M, B], a view of them, and `host_blocks`."""
        layers = len(self.layout.groups[0].layers)
        # One slot more: padding writes there.
        self.keys = np.zeros((layers, self.num_blocks * self.block_size + 1), np.uint64)
        self._blocks = self.keys[:, :-1].reshape(layers, self.num_blocks, self.block_size)
        assert np.shares_memory(self._blocks, self.keys), "a view, not a copy"
        self.host_blocks = np.zeros((host_slots, layers, self.block_size), np.uint64)

    host_states: np.ndarray | None = None

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
        a = a._replace(tokens=fed(a.tokens, self._sampled, np))
        tile_of = np.arange(shape.num_tiles).repeat(np.concatenate([[part.width] * part.count for part in shape.parts]))
        groups = [self._read(a, group, shape) for group in range(len(self.layout.groups))]
        hidden = embed(a.tokens, np.maximum(a.positions, 0))
        for layer in range(len(self.layout.places)):
            hidden = self._attend(layer, a, groups, tile_of, hidden)
        last = hidden[a.sampled[: step.num_sampled]]
        tokens = choose(last, self.vocab)
        if (s := step.sampling) is not None:
            seeds = (u64(s.seeds[:, 0]) << np.uint64(32)) + u64(s.seeds[:, 1])
            tokens = np.where(s.temperature > 0, choose(last, self.vocab, seeds, s.num_outputs), tokens)
            tokens = np.where(s.forced >= 0, s.forced, tokens)
        self._sampled = np.append(tokens, -1)  # never empty
        num_accepted, sampled = None, tokens if shape.tree else None
        if shape.tree:
            tokens, last, num_accepted = self._accept_trees(step, tokens, last)
        elif step.drafts is not None:
            [(tiles, width)] = shape.parts
            assert step.num_sampled == shape.max_sampled >= tiles * width
            assert step.drafts.ids.shape == (tiles, width - 1)
            assert np.array_equal((a.positions.reshape(tiles, width) >= 0)[:, 1:].sum(axis=1), step.drafts.counts)
            tokens, last = tokens[: tiles * width], last[: tiles * width]
            runs = tokens.reshape(tiles, width)[:, :-1]
            num_accepted = np.array(
                [
                    sum(itertools.takewhile(bool, run[:count] == ids[:count]))
                    for run, ids, count in zip(runs, step.drafts.ids, step.drafts.counts, strict=True)
                ]
            )
        return StepOutput(
            tokens,
            None if step.num_logprobs is None else score(last, tokens, step.num_logprobs, self.vocab),
            None
            if step.targets is None
            else score(hidden, np.maximum(step.targets, 0), step.num_prompt_logprobs, self.vocab),
            # Half a tick of the clock: settings that weigh moves have something to weigh.
            move_s=0.0 if step.moves is None else 0.5,
            num_accepted=num_accepted,
            sampled=sampled,
            hidden=hidden[:, None].astype(np.float32) if step.pools else None,
        )

    def _accept_trees(self, step: StepInput, tokens: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, ...]:
        """Walks down each tree with the tokens [T] sampled after its nodes, and moves what is there to dense slots.

        Returns:
          Tokens and hidden [T] in the order of the ways, and how many drafts of each tree are accepted.
        """
        drafts, [(tiles, width)], slots = step.drafts, step.shape.parts, step.arrays.slots
        assert drafts is not None and drafts.parents is not None
        order, accepted = np.arange(tiles * width), np.zeros(tiles, np.int32)
        for tile in range(tiles):
            count, node = int(drafts.counts[tile]), 0
            ids, parents = drafts.ids[tile, :count].tolist(), drafts.parents[tile, :count].tolist()
            while True:
                sampled = tokens[tile * width + node]
                after = [i + 1 for i in range(count) if (parents[i], ids[i]) == (node - 1, sampled)]
                if not after:
                    break
                node, accepted[tile] = after[0], accepted[tile] + 1
                order[tile * width + accepted[tile]] = tile * width + node
        moved = order != np.arange(len(order))
        self._move_slots(slots[:, order[moved]].ravel(), slots[:, moved].ravel())
        return tokens[order], hidden[order], accepted

    def _move_slots(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies all that lies in some slots to others; all are read before one is written."""
        self.keys[:, targets] = self.keys[:, sources]

    def submit_together(self, steps: Sequence[StepInput]) -> list[StepOutput]:
        assert len(steps) > 1 and share_a_call(steps)
        self.num_calls_together += 1
        return [FakeExecutor.submit(self, step) for step in steps]  # not what a test has put in its place

    def _attend(self, layer: int, a: StepArrays, groups: list, tile_of: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """Computes the hidden [T] after a layer. groups: of each what `_read` returns. tile_of: [T]"""
        (group, at), pattern = self.layout.places[layer], self._patterns[layer]
        kv_slots, kv_positions, weights = groups[group]
        keys = self._write_and_read(at, a, group, hidden, kv_slots)
        visible = pattern.visible(a.cache_positions[group][:, None], kv_positions[tile_of])
        if a.ancestors is not None:
            visible &= self._on_the_way(a, group, kv_slots)[0]
        visible &= self._selected(layer, a, group, hidden, tile_of)
        visible &= ~self._hidden(at, group, kv_slots)[tile_of]
        self._observe(at, a, group, hidden, (keys[tile_of], kv_slots[tile_of], visible))
        return attend(hidden, (keys * weights)[tile_of], visible)

    def _on_the_way(self, a: StepArrays, group: int, kv_slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For slots [S, C] that tiles can see: whether they are before the tree or on the way to each token [T, C]; and
        at what cache position [S, C] the keys of nodes are, -1 for others."""
        ancestors, positions = a.ancestors, a.cache_positions[group]
        assert ancestors is not None
        width = len(ancestors) // len(kv_slots)
        seen, node_positions = np.ones((len(ancestors), kv_slots.shape[1]), bool), np.full(kv_slots.shape, -1)
        for tile, row in enumerate(kv_slots):
            tokens = range(tile * width, (tile + 1) * width)
            for j, token in enumerate(tokens):
                if positions[token] >= 0:
                    here = row == a.slots[group][token]
                    node_positions[tile, here] = positions[token]
                    for query in tokens:
                        seen[query, here] = ancestors[query] >> j & 1
        return seen, node_positions

    def _write_and_read(self, at: int, a: StepArrays, group: int, hidden, kv_slots: np.ndarray) -> np.ndarray:
        """Stores hidden [T] in a layer of a group; returns what lies there at some slots."""
        self.keys[at, a.slots[group]] = hidden
        return self.keys[at, kv_slots]

    def _selected(self, layer: int, a: StepArrays, group: int, hidden, tile_of: np.ndarray) -> np.ndarray | bool:
        """Whether a token reads what is in each slot that its tile can see [T, C]."""
        return True

    def _hidden(self, at: int, group: int, kv_slots: np.ndarray) -> np.ndarray:
        """Whether what is at some slots is hidden from queries."""
        return np.zeros(kv_slots.shape, bool)

    def _observe(self, at: int, a: StepArrays, group: int, hidden, seen: tuple) -> None:
        """Notes what queries pay to keys; seen: keys, slots and whether they are visible, [T, C] each."""

    def _read(self, arrays: StepArrays, group: int, shape: StepShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, positions and weights [S, P * B] of what each tile can see in the layers of one group."""
        offsets, size, a = np.arange(self.block_size), shape.num_tiles, arrays.of_group(group)
        tables, starts = a.block_tables, a.block_starts
        if a.shared_tables is not None and a.shared_starts is not None:
            shared = np.zeros((2, size, tables.shape[1]), np.int32) + np.array([0, FAR], np.int32)[:, None, None]
            rows = np.arange(shape.parts[0].count) // shape.shared_rows
            shared[:, : len(rows)] = a.shared_tables[rows], a.shared_starts[rows]
            tables, starts = np.hstack([shared[0], tables]), np.hstack([shared[1], starts])
        kv_slots = (tables[:, :, None] * self.block_size + offsets).reshape(size, -1)
        kv_positions = (starts[:, :, None] + offsets).reshape(size, -1)
        if a.ancestors is not None:
            _, of_nodes = self._on_the_way(arrays, group, kv_slots)
            roots = a.cache_positions.reshape(size, -1)[:, :1]
            of_nodes = np.where(of_nodes >= 0, of_nodes, FAR)
            kv_positions = np.where((kv_positions < roots) | (kv_positions >= FAR), kv_positions, of_nodes)
        return kv_slots, kv_positions, weights_of(kv_positions)

    def move(self, moves: Moves) -> None:
        """Copies whole blocks; see `kv.moves.Moves`."""
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
        self._save(moves.saves[max(moves.num_early, default=0) :])
        blocks[:, moves.copies[:, 1]] = blocks[:, moves.copies[:, 0]]
        blocks[:, moves.loads[:, 1]] = self.host_blocks[moves.loads[:, 0]].swapaxes(0, 1)

    def _save(self, saves: np.ndarray) -> None:
        self.host_blocks[saves[:, 1]] = self._blocks[:, saves[:, 0]].swapaxes(0, 1)

    def check(self, step: StepInput) -> None:
        """Holds a step against the contract of `step.types.StepArrays`.

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
        stored_at = a.cache_positions
        if shape.tree:
            [(tiles, width)] = shape.parts
            stored_at = (stored_at.reshape(groups, tiles, width)[:, :, :1] + np.arange(width)).reshape(groups, -1)
            assert step.drafts is not None and step.drafts.branches
            assert a.ancestors is not None and a.ancestors.shape == (tokens,) and a.ancestors.dtype == np.int32
            assert ((a.ancestors != 0) == real).all()
        else:
            assert a.ancestors is None and (step.drafts is None or not step.drafts.branches)
        assert (stored_at[:, real] % self.block_size == a.slots[:, real] % self.block_size).all()
        assert (a.slots[:, ~real] == self.num_blocks * self.block_size).all()
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        assert len(slots) and slots.min() >= 0 and slots.max() < self.num_blocks * self.block_size
        assert ((a.block_tables >= 0) & (a.block_tables < self.num_blocks)).all()
        absent = a.block_starts == FAR
        assert (a.block_starts[~absent] % self.block_size == 0).all()
        gaps = np.diff(a.block_starts, axis=2)
        assert ((gaps > 0) | absent[:, :, 1:]).all() and (gaps >= 0).all(), "blocks are not in the order of the text"
        assert a.tokens.min() >= 1 - len(self._sampled), "a token that the step before did not sample"
        assert ((a.sampled >= 0) & (a.sampled < tokens)).all() and 0 <= step.num_sampled <= shape.max_sampled
        if step.sampling is not None:
            given = [x for x in step.sampling if x is not None]
            assert all(len(x) == step.num_sampled for x in given)

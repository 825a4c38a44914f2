"""Explains why the prefix cache reused no more of a prompt. Knows tokens and blocks, no requests; no jax.

The reporter hears which blocks tiers store and drop. It remembers the blocks that follow each block, sorted by their
tokens, so that the nearest cached prompt is a neighbour of the first missing block; and the blocks that were dropped
last, with the time and the request that needed their place.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.lora import unsalted
from ksana_jax.core.prefix_report import PrefixReport
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_cache import Hit
from ksana_jax.kv.snapshots import SNAPSHOT_KEY
from ksana_jax.kv.state import KVState, Origin
from ksana_jax.kv.tier import Node

# Tokens shown before a difference, and from it on.
NUM_SHOWN = 8
# Maximum number of salts in which a prompt is looked for.
_MOST_SALTS = 8
# Stands for the parent of all first blocks, whatever their salt; and for a key after all others.
_ANY_ROOT, _LAST_KEY = b"", b"\xff" * 33


class _Dropped(NamedTuple):
    """A block that no tier has any more. parents: keys of `_children` under which it is remembered."""

    parents: tuple[bytes, ...]
    tokens: bytes
    at_s: float
    needed_by: str


class PrefixReporter:
    """A `kv.tier.CacheListener` that explains what `PrefixCache` finds.

    Args:
      memory: whose blocks it follows; `DeviceTier.needed_by` tells who needs the place of a dropped one.
      num_dropped: maximum number of dropped blocks that it remembers. With blocks of 16 tokens, each takes about 500
        bytes of host memory, and each cached block 250.

    Attributes:
      num_requests, num_tokens: explained requests and their computed prompt tokens, by cause.
    """

    def __init__(self, memory: KVMemory, num_dropped: int):
        self._memory, self._index, self._most = memory, memory.index, num_dropped
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}  # sorted (tokens, key) by the parent's key
        self._dropped: dict[bytes, _Dropped] = {}  # by key, the oldest first
        self.num_requests: collections.Counter[str] = collections.Counter()
        self.num_tokens: collections.Counter[str] = collections.Counter()
        memory.listeners.append(self)
        memory.explain = memory.prefixes.explain = self.explain

    # ------------------------------------------------------------------ what tiers do

    def stored(self, node: Node, level: int) -> None:
        """See `CacheListener`."""
        if node.at[1 - level] >= 0 or node.key.startswith(SNAPSHOT_KEY):
            return
        if (before := self._dropped.pop(node.key, None)) is not None:
            self._forget(node.key, before)
        for parent in _parents(node):
            bisect.insort(self._children.setdefault(parent, []), (node.tokens, node.key))

    def dropped(self, node: Node, level: int) -> None:
        """See `CacheListener`."""
        if not node.is_stored and not node.key.startswith(SNAPSHOT_KEY):
            self._drop(node.key, _parents(node), node.tokens, self._memory.device.needed_by)

    def used(self, node: Node) -> None:
        """See `CacheListener`."""

    def cleared(self) -> None:
        """See `CacheListener`."""
        first = {key for _, key in self._children.get(_ANY_ROOT, ())}
        for parent, blocks in list(self._children.items()):
            for tokens, key in list(blocks) if parent != _ANY_ROOT else ():
                if key not in self._dropped:
                    self._drop(key, (parent, _ANY_ROOT) if key in first else (parent,), tokens, None)

    def _drop(self, key: bytes, parents: tuple[bytes, ...], tokens: bytes, needed_by: KVState | None) -> None:
        name = "" if needed_by is None else needed_by.request_id
        self._dropped[key] = _Dropped(parents, tokens, self._memory.clock(), name)
        if len(self._dropped) > self._most:
            oldest = next(iter(self._dropped))
            self._forget(oldest, self._dropped.pop(oldest))

    def _forget(self, key: bytes, block: _Dropped) -> None:
        for parent in block.parents:
            blocks = self._children[parent]
            del blocks[bisect.bisect_left(blocks, (block.tokens, key))]
            if not blocks:
                del self._children[parent]

    # ------------------------------------------------------------------ what a prompt finds

    def explain(self, state: KVState, token_ids: np.ndarray, hit: Hit, origins: Sequence[Origin]) -> PrefixReport:
        """Explains what a sequence found, before its hit is claimed. origins: of the hit's nodes."""
        size = self._index.block_size
        tiers = collections.Counter(o.tier for o, node in zip(origins, hit.nodes, strict=True) if not node.group)
        fields: dict[str, Any] = {
            "num_tokens": len(token_ids),
            "num_cached": hit.num_tokens,
            "num_known": hit.num_tokens,
            "num_by_tier": {tier: count * size for tier, count in tiers.items()},
        }
        fields |= self._explain(state, token_ids, hit.num_tokens // size, hit.max_tokens // size)
        report = PrefixReport(**fields)
        self.num_requests[report.cause] += 1
        self.num_tokens[report.cause] += report.num_tokens - report.num_cached
        return report

    def _explain(self, state: KVState, token_ids: np.ndarray, count: int, limit: int) -> dict[str, Any]:
        """Returns the fields of the report that say why only `count` of at most `limit` blocks were reused."""
        prefixes = self._memory.prefixes
        if count >= limit:
            return {"cause": "partial_block" if limit == self._num_blocks(len(token_ids) - 1) else "disabled"}
        known, groups = count, range(len(prefixes.visible))
        while known < limit and all(self._is_known(prefixes.link(state, token_ids, g, known).key) for g in groups):
            known += 1
        if known > count:
            return {"num_known": self._index.block_size * known} | self._missing(state, token_ids, known)
        parent = prefixes.link(state, token_ids, 0, count - 1).key if count else self._index.root(state.salt).key
        for first, depth in ((parent, count), (_ANY_ROOT, 0)):
            for key in itertools.islice(self._with(first, self._block(token_ids, depth)), _MOST_SALTS):
                if (reach := self._reach(key, token_ids, depth, limit)) > count:
                    return {"num_known": self._index.block_size * reach, "cause": self._other(state, key)}
        return self._nearest(token_ids, parent, count)

    def _num_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._index.block_size

    def _block(self, token_ids: np.ndarray, depth: int) -> bytes:
        size = self._index.block_size
        return np.asarray(token_ids[depth * size : (depth + 1) * size], np.int32).tobytes()

    def _is_stored(self, key: bytes) -> bool:
        return (node := self._index.nodes.get(key)) is not None and node.is_stored

    def _is_on_disk(self, key: bytes) -> bool:
        return self._memory.disk is not None and key in self._memory.disk

    def _is_known(self, key: bytes) -> bool:
        return key in self._index.nodes or key in self._dropped or self._is_on_disk(key)

    def _missing(self, state: KVState, token_ids: np.ndarray, known: int) -> dict[str, Any]:
        """Explains why `known` blocks whose keys are known were not usable, by the first one that is not stored."""
        prefixes, cause = self._memory.prefixes, "window"
        for group, live in enumerate(prefixes.visible):
            for depth in prefixes.needed(live, known):
                if self._is_stored(key := prefixes.link(state, token_ids, group, depth).key):
                    continue
                if self._is_on_disk(key):
                    return {"cause": "not_read"}
                if (block := self._dropped.get(key)) is not None:
                    passed_s = self._memory.clock() - block.at_s
                    return {"cause": "evicted", "evicted_s": passed_s, "evicted_for": block.needed_by}
                if live.window is None:
                    cause = "evicted"
        return {"cause": cause}

    def _with(self, parent: bytes, tokens: bytes) -> Iterator[bytes]:
        """Yields the keys of the blocks that follow a block and have these tokens."""
        blocks = self._children.get(parent, ())
        for at in range(bisect.bisect_left(blocks, (tokens,)), len(blocks)):
            if blocks[at][0] != tokens:
                break
            yield blocks[at][1]

    def _reach(self, key: bytes, token_ids: np.ndarray, depth: int, limit: int) -> int:
        """Returns the number of a prompt's blocks that are cached, if `key` is the key of block `depth`."""
        keys = [key]
        while depth < limit and (keys := list(filter(self._is_stored, keys))):
            depth += 1
            keys = [after for key in keys for after in self._with(key, self._block(token_ids, depth))]
        return depth

    def _other(self, state: KVState, key: bytes) -> str:
        """Returns the cause if a cached block differs from a sequence's in its key but not in its tokens."""
        parent = self._index.nodes[key].parent
        assert parent is not None
        if parent.parent is not None:
            return "settings"
        (adapter, salt), other = unsalted(state.salt), unsalted(parent.tokens.decode())
        return "salt" if other[1] != salt else "adapter" if other[0] != adapter else "settings"

    def _nearest(self, token_ids: np.ndarray, parent: bytes, count: int) -> dict[str, Any]:
        """Compares a prompt's block number `count`, which is not cached, with the most similar one."""
        blocks, tokens = self._children.get(parent, []), self._block(token_ids, count)
        after = bisect.bisect_right(blocks, (tokens, _LAST_KEY))
        before = bisect.bisect_left(blocks, (tokens,))
        mine, best = np.frombuffer(tokens, np.int32), (-1, b"", b"")
        for other, key in (*blocks[max(before - 1, 0) : before], *blocks[after : after + 1]):
            same = int((np.frombuffer(other, np.int32) != mine).argmax())
            best = max(best, (same, other, key))
        same, other, key = best
        if same < 0 or not (same or count):
            return {"cause": "never_seen"}
        position = count * self._index.block_size + same
        there = np.frombuffer(b"".join((other, *(tokens for tokens, _ in self._children.get(key, ())[:1]))), np.int32)
        shared = token_ids[max(position - NUM_SHOWN, 0) : position].tolist()
        return {
            "cause": "diverged",
            "position": position,
            "here_ids": shared + token_ids[position : position + NUM_SHOWN].tolist(),
            "there_ids": shared + there[same : same + NUM_SHOWN].tolist(),
            "is_cached": self._is_stored(key),
        }


def _parents(node: Node) -> tuple[bytes, ...]:
    assert node.parent is not None
    return (node.parent.key,) if node.depth or node.group else (node.parent.key, _ANY_ROOT)

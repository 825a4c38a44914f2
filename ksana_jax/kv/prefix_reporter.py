"""Explains why the prefix cache reused no more of a prompt. Knows tokens and blocks, no requests; no jax.

The reporter hears which blocks tiers store and drop. It remembers the blocks that follow each block, sorted by their
tokens, so that the nearest cached prompt is a neighbour of the first missing block; and the blocks that were dropped
last, with the time and the request that needed their place.
"""

from __future__ import annotations

import bisect
import collections
import logging
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from ksana_jax.core.lora import unsalted
from ksana_jax.core.prefix_report import PrefixReport
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_cache import Hit
from ksana_jax.kv.snapshots import SNAPSHOT_KEY
from ksana_jax.kv.state import KVState, Origin
from ksana_jax.kv.tier import Node

logger = logging.getLogger("ksana_jax")
# Tokens shown before a difference, and from it on; salts in which a prompt is looked for.
NUM_SHOWN, NUM_SALTS = 10, 8


class PrefixReporter:
    """A `kv.tier.CacheListener` that explains what `PrefixCache` finds.

    Args:
      memory: whose blocks it follows; `DeviceTier.needed_by` tells who needs the place of a dropped one.
      num_dropped: maximum number of dropped blocks that it remembers. With blocks of 16 tokens, each takes about 500
        bytes of host memory, and each cached block 250.
      decode: turns ids into text.

    Attributes:
      num_requests, num_tokens: explained requests and their computed prompt tokens, by cause.
    """

    def __init__(self, memory: KVMemory, num_dropped: int, decode: Callable[[list[int]], str] = str):
        self._memory, self._index, self._most, self._decode = memory, memory.index, num_dropped, decode
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}  # sorted (tokens, key) by the parent's key
        self._dropped: dict[bytes, tuple[bytes, bytes, float, str]] = {}  # parent, tokens, when, for whom; oldest first
        self._disk: Container[bytes] = () if memory.disk is None else memory.disk
        self.num_requests: collections.Counter[str] = collections.Counter()
        self.num_tokens: collections.Counter[str] = collections.Counter()
        memory.listeners.append(self)
        memory.prefixes.reporter = self

    def stored(self, node: Node, level: int) -> None:
        """See `CacheListener`."""
        if node.at[1 - level] >= 0 or node.key.startswith(SNAPSHOT_KEY):
            return
        if (before := self._dropped.pop(node.key, None)) is not None:
            self._forget(node.key, *before)
        assert node.parent is not None
        bisect.insort(self._children.setdefault(node.parent.key, []), (node.tokens, node.key))

    def dropped(self, node: Node, level: int) -> None:
        """See `CacheListener`."""
        if not node.is_stored and not node.key.startswith(SNAPSHOT_KEY):
            assert node.parent is not None
            self._drop(node.parent.key, node.tokens, node.key, self._needed_by())

    def used(self, node: Node) -> None:
        """See `CacheListener`."""

    def cleared(self) -> None:
        """See `CacheListener`. The prefix cache is another one now."""
        self._memory.prefixes.reporter = self
        known = [(parent, *block) for parent, blocks in self._children.items() for block in blocks]
        for parent, tokens, key in known:
            if key not in self._dropped:
                self._drop(parent, tokens, key, "")

    def _drop(self, parent: bytes, tokens: bytes, key: bytes, needed_by: str) -> None:
        self._dropped[key] = parent, tokens, self._memory.clock(), needed_by
        if len(self._dropped) > self._most:
            oldest = next(iter(self._dropped))
            self._forget(oldest, *self._dropped.pop(oldest))

    def _needed_by(self) -> str:
        seq: Any = self._memory.device.needed_by
        return "" if seq is None else seq.request_id

    def _forget(self, key: bytes, parent: bytes, tokens: bytes, *_: Any) -> None:
        blocks = self._children[parent]
        del blocks[bisect.bisect_left(blocks, (tokens, key))]
        if not blocks:
            del self._children[parent]

    def explain(self, state: KVState, token_ids: np.ndarray, hit: Hit, origins: Sequence[Origin]) -> PrefixReport:
        """Explains what a sequence found, before its hit is claimed. origins: of the hit's nodes."""
        size, limit = self._index.block_size, hit.max_tokens // self._index.block_size
        cause = "partial_block" if limit == (len(token_ids) - 1) // size else "disabled"
        found: dict[str, Any] = {"cause": cause, "num_known": hit.num_tokens}
        if hit.num_keys > hit.num_tokens:
            found = {"cause": "state", "num_known": hit.num_keys, "num_states": hit.num_states}
        elif hit.num_tokens // size < limit:
            found |= self._missing(state, token_ids, hit.num_tokens // size, limit)
        tiers = [o.label.removeprefix("hit ") for o, node in zip(origins, hit.nodes, strict=True) if not node.group]
        by_tier = {tier: tiers.count(tier) * size for tier in dict.fromkeys(tiers)}
        report = PrefixReport(num_tokens=len(token_ids), num_cached=hit.num_tokens, num_by_tier=by_tier, **found)
        self.num_requests[report.cause] += 1
        self.num_tokens[report.cause] += report.num_tokens - report.num_cached
        if (name := self._needed_by()) != "":
            logger.info("%s: prefix cache: %s", name, report)
        return report

    def _missing(self, state: KVState, token_ids: np.ndarray, count: int, limit: int) -> dict[str, Any]:
        """Returns the fields of the report that say why only `count` blocks of at most `limit` were reused."""
        prefixes, root, size = self._memory.prefixes, self._index.root(state.salt), self._index.block_size
        known, groups = count, range(len(prefixes.visible))
        while known < limit and all(self._is_known(prefixes.link(state, token_ids, g, known).key) for g in groups):
            known += 1
        if known > count:
            return {"num_known": known * size} | self._lost(state, token_ids, known)
        parent = prefixes.link(state, token_ids, 0, count - 1).key if count else root.key
        others = [(root, key, count) for key in self._with(parent, token_ids, count)]
        for other in self._index.roots.values():
            others += [(other, key, 0) for key in self._with(other.key, token_ids, 0) if not other.group]
        for other, key, depth in others[:NUM_SALTS]:
            if (reach := self._reach(key, token_ids, depth, limit)) > count:
                mine, theirs = unsalted(state.salt), unsalted(other.tokens.decode())
                cause = next((name for name in mine if mine[name] != theirs[name]), "settings")
                return {"num_known": reach * size, "cause": cause}
        return self._nearest(token_ids, parent, count)

    def _lost(self, state: KVState, token_ids: np.ndarray, known: int) -> dict[str, Any]:
        """Explains why known blocks were not usable, by the first one that is not stored."""
        prefixes, cause = self._memory.prefixes, "window"
        for group, live in enumerate(prefixes.visible):
            for depth in prefixes.needed(live, known):
                key = prefixes.link(state, token_ids, group, depth).key
                if self._is_stored(key):
                    continue
                if key in self._disk:
                    return {"cause": "not_read"}
                if key in self._dropped:
                    *_, at_s, name = self._dropped[key]
                    return {"cause": "evicted", "evicted_s": self._memory.clock() - at_s, "evicted_for": name}
                cause = "evicted" if live.window is None else cause
        return {"cause": cause}

    def _nearest(self, token_ids: np.ndarray, parent: bytes, count: int) -> dict[str, Any]:
        """Compares a prompt's block number `count`, which is not cached, with the most similar one."""
        blocks, tokens = self._children.get(parent, []), self._block(token_ids, count)
        before, after = bisect.bisect_left(blocks, (tokens,)), _end(blocks, tokens)
        mine, best = np.frombuffer(tokens, np.int32), (-1, b"", b"")
        for other, key in (*blocks[max(before - 1, 0) : before], *blocks[after : after + 1]):
            best = max(best, (int((np.frombuffer(other, np.int32) != mine).argmax()), other, key))
        same, other, key = best
        position = count * self._index.block_size + same
        if same < 0 or position < 2:  # one token may be the BOS of all prompts
            return {"cause": "never_seen"}
        theirs = np.frombuffer(b"".join([other, *(tokens for tokens, _ in self._children.get(key, [])[:1])]), np.int32)
        cut, shared = "..." * (position > NUM_SHOWN), token_ids[max(position - NUM_SHOWN, 0) : position].tolist()
        rests = (ids[:NUM_SHOWN].tolist() for ids in (token_ids[position:], theirs[same:]))
        here, there = (f"{cut}{self._decode(shared + rest)}..." for rest in rests)
        return {"cause": "diverged", "position": position, "here": here, "there": there}

    def _reach(self, key: bytes, token_ids: np.ndarray, depth: int, limit: int) -> int:
        """Returns the number of a prompt's blocks that are cached, if `key` is the key of block `depth`."""
        keys = [key]
        while depth < limit and (keys := list(filter(self._is_stored, keys))):
            depth += 1
            keys = [after for key in keys for after in self._with(key, token_ids, depth)]
        return depth

    def _with(self, parent: bytes, token_ids: np.ndarray, depth: int) -> list[bytes]:
        """Returns the keys of the blocks that follow a block and have the tokens of a prompt's block number `depth`."""
        blocks, tokens = self._children.get(parent, []), self._block(token_ids, depth)
        return [key for _, key in blocks[bisect.bisect_left(blocks, (tokens,)) : _end(blocks, tokens)]]

    def _block(self, token_ids: np.ndarray, depth: int) -> bytes:
        size = self._index.block_size
        return np.asarray(token_ids[depth * size : (depth + 1) * size], np.int32).tobytes()

    def _is_stored(self, key: bytes) -> bool:
        return (node := self._index.nodes.get(key)) is not None and node.is_stored

    def _is_known(self, key: bytes) -> bool:
        return key in self._index.nodes or key in self._dropped or key in self._disk


def _end(blocks: list[tuple[bytes, bytes]], tokens: bytes) -> int:
    """Returns the place after the blocks that have these tokens; no key is as long."""
    return bisect.bisect_right(blocks, (tokens, b"\xff" * 33))

"""Looks up cached blocks by content, through a hash chain over full blocks of tokens. Knows no pools, no device.

The key of a block is SHA-256 over the key of the block before it and its own tokens; the chain begins at a root of
model fingerprint and salt. Equal keys are not enough: tokens and parent are compared too, and a collision is a miss.

When cached content is valid: the keys and values of a token depend on the tokens up to it, on the model and, from the
second layer on, on the attention pattern. The pattern is therefore part of the key, from the first block where it
hides something from some query. Before that block, all patterns attend to everything, so blocks are shared between
them. A salt separates the requests that use it from all others.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ksana_jax.core.patterns import FAR, AttentionPattern
from ksana_jax.kv.tier import Node

# Number of salts remembered before those without blocks are forgotten.
MAX_ROOTS = 1024


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclasses.dataclass(frozen=True)
class Scope:
    """Everything besides the tokens that determines keys and values.

    Args:
      model: fingerprint of the weights, their shapes and dtypes.
      pattern: the attention patterns of all layers, as text.
      full_until: sequence position up to which these patterns attend to everything.
    """

    model: str = ""
    pattern: str = ""
    full_until: int = FAR

    def seen_through(self, patterns: Sequence[AttentionPattern]) -> Scope:
        """Returns the scope of this model under other attention patterns, one per layer."""
        return Scope(self.model, repr(tuple(patterns)), min(p.full_until for p in patterns))


class Link(NamedTuple):
    """One block in the hash chain of a sequence."""

    key: bytes
    tokens: bytes


class PrefixIndex:
    """Maps keys to nodes.

    Args:
      block_size: B, tokens in a block.
      scope: everything besides tokens that keys depend on.
      digest: hash function of the chain; tests pass a weak one to provoke collisions.
      cost: of recomputing the block at a sequence position, relative to the first block.

    Attributes:
      group_keys: `KVGroup.key` of each group; empty for one. A block holds the layers of one group, so each has its
        own chains.
      nodes, roots: by key. cost: see above.
    """

    def __init__(
        self,
        block_size: int,
        scope: Scope | None = None,
        digest: Callable[[bytes], bytes] = sha256,
        cost: Callable[[int], float] = lambda position: 1.0,
    ):
        self.block_size = block_size
        self.set_scope(scope or Scope())
        self.group_keys: Sequence[str] = ("",)
        self.nodes: dict[bytes, Node] = {}
        self._digest, self.cost = digest, cost
        self.roots: dict[bytes, Node] = {}
        self._root_keys: dict[tuple[str, ...], bytes] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self.nodes)

    def set_scope(self, scope: Scope) -> None:
        """Changes what keys depend on besides tokens."""
        self.scope = scope
        self._num_shared, self._pattern = scope.full_until // self.block_size, scope.pattern.encode()

    def clear(self) -> None:
        """Forgets all nodes."""
        self.nodes.clear()
        self.roots.clear()

    def root(self, salt: str, group: int = 0) -> Node:
        """Returns the node at which the chains of one salt and group begin; it is not a block and is never replaced."""
        parts = (self.scope.model, salt, *filter(None, self.group_keys[group : group + 1]))
        key = self._root_keys.get(parts)
        if key is None:
            if len(self._root_keys) >= MAX_ROOTS:
                self._root_keys.clear()
            # Lengths distinguish ("a", "bc") from ("ab", "c").
            key = self._digest(b"root" + b"".join(b"%d:" % len(part) + part for part in map(str.encode, parts)))
            self._root_keys[parts] = key
        return self.roots.get(key) or self._root(Node(key, None, salt.encode(), -1, group=group))

    def _root(self, node: Node) -> Node:
        """Returns the root with the key of `node`, adding `node` if none exists."""
        if node.key not in self.roots and len(self.roots) >= MAX_ROOTS:
            self.roots = {key: root for key, root in self.roots.items() if root.num_children}
        return self.roots.setdefault(node.key, node)

    def chain(self, token_ids: np.ndarray, salt: str, links: list[Link], num_blocks: int, group: int = 0) -> list[Link]:
        """Extends the chain of a sequence to num_blocks links, in place, and returns it."""
        size = self.block_size
        first = len(links)
        if first >= num_blocks:
            return links
        parent = links[-1].key if links else self.root(salt, group).key
        tokens = np.asarray(token_ids[first * size : num_blocks * size], np.int32).tobytes()
        links += self._follow(parent, tokens, first)
        return links

    def link(self, parent: bytes, tokens: bytes, depth: int) -> Link:
        """Returns the link of a block that follows the block of key `parent`, `depth` blocks into the sequence."""
        before = parent if depth < self._num_shared else parent + self._pattern
        return Link(self._digest(before + tokens), tokens)

    def _follow(self, parent: bytes, data: bytes, first: int) -> list[Link]:
        """Returns the links of blocks that follow the block of key `parent`, `first` blocks into the sequence."""
        length, links = 4 * self.block_size, []
        for depth, at in enumerate(range(0, len(data), length), first):
            link = self.link(parent, data[at : at + length], depth)
            parent = link.key
            links.append(link)
        return links

    def find(self, key: bytes, parent: Node, tokens: bytes) -> Node | None:
        """Returns the node with this content, or None."""
        node = self.nodes.get(key)
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    def child(self, parent: Node, tokens: bytes, key: bytes | None = None) -> Node | None:
        """Returns the node that continues `parent` with a block of tokens, creating it if necessary; None if other
        content has its key."""
        depth = parent.depth + 1
        key = key or self.link(parent.key, tokens, depth).key
        node = self.nodes.get(key)
        if node is not None:
            return node if node.parent is parent and node.tokens == tokens else None
        return self.add(parent, key, depth, tokens)

    def add(self, parent: Node, key: bytes, depth: int, tokens: bytes | None = None) -> Node:
        """Adds and returns a node; no other has its key. Without tokens, it is not found by them: zeros stand there."""
        tokens = bytes(4 * self.block_size) if tokens is None else tokens
        now, cost = self.tick(), self.cost(depth * self.block_size)
        self.nodes[key] = node = Node(key, parent, tokens, depth, cost, now, now, group=parent.group, known=True)
        parent.num_children += 1
        return node

    def current(self, node: Node) -> Node | None:
        """Returns the node itself or, if it was dropped, the current node of its content; None if other content has its
        key."""
        if node.parent is None:
            return self._root(node)
        if node.known:
            return node
        parent = self.current(node.parent)
        if parent is None:
            return None
        found = self.child(parent, node.tokens)
        self.drop_if_empty(parent)
        return found

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def drop_if_empty(self, node: Node | None) -> None:
        """Drops a node that is stored on no tier and has no children, then its parents under the same conditions."""
        while node is not None and node.known and not node.is_stored and not node.num_children and not node.num_pins:
            del self.nodes[node.key]
            node.known = False
            node = node.parent
            if node is not None:
                node.num_children -= 1

    def check(self) -> None:
        """Checks the tree's consistency.

        Raises:
          AssertionError: a node without children is stored on no tier, or a count is wrong.
        """
        children = dict.fromkeys(self.nodes.values(), 0)
        for key, node in self.nodes.items():
            assert node.key == key and node.known and node.parent is not None
            assert node.parent.known or node.parent.parent is None, "a node's parent is not in the index"
            assert len(node.tokens) == 4 * self.block_size, "only full blocks are indexed"
            if node.parent in children:
                children[node.parent] += 1
        for node, count in children.items():
            assert node.num_children == count
            assert node.is_stored or count or node.num_pins, "a node is stored nowhere and leads nowhere"

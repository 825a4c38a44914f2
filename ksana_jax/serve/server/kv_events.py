"""`GET /kv_events`: which blocks an engine's prefix cache holds, as a stream of server-sent events, for routers.

The engine's thread records what its tiers cache and drop (`kv.tier.CacheListener`) and hands it over once per step, as
a batch. A reader's first batch begins with AllBlocksCleared and has all blocks that are cached now; one that is 10,000
batches late gets such a batch again. Names and fields follow vLLM's KV events, without token ids; block hashes are the
keys of `kv.prefix_index`, in hexadecimal.

    event: cache    data: {"model": "9f...", "block_size": 16, "num_blocks": 512, "num_host_blocks": 0}
    data: {"events": [{"type": "BlockStored", "block_hashes": ["a1...", "b2..."], "parent_block_hash": null,
          "block_size": 16, "medium": "GPU"}]}

With recurrent layers there are two groups, with fields and equal hashes as in vLLM 0.32: events have a group_idx, and
those of stored blocks a kv_cache_spec_kind. A block of group 1, "mamba", is the state after the tokens of its hash. A
request reuses a prefix up to the last block that is in group 1 and, with all blocks before it, in group 0. A first
batch has an event of group 1 even if no state is cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ksana_jax.engine.engine import Engine
from ksana_jax.kv.tier import DEVICE, HOST, Node
from ksana_jax.serve.server.errors import APIError
from ksana_jax.serve.server.sse import DONE, HEADERS, PING
from ksana_jax.serve.server.state import serving_of

# Batches kept for a reader; as many as vLLM keeps.
KEPT = 10_000
# Seconds between checks for the server's end.
LOOK_S = 0.5
# vLLM's names of the media.
MEDIA = {DEVICE: "GPU", HOST: "CPU"}


class BlockEvent(NamedTuple):
    """A block that a tier stored, with the hash of the block before it, or dropped. group: 1 for states."""

    level: int
    key: bytes
    parent: bytes | None
    stored: bool
    group: int = 0


class KVEventLog:
    """Passes the changes of one engine's prefix cache on to its readers. Belongs to the event loop.

    Args:
      engine: whose cache it describes.
    """

    def __init__(self, engine: Engine):
        memory = engine.memory
        self._block_size = memory.block_size
        self._cache = {
            "model": memory.index.scope.model,
            "block_size": memory.block_size,
            "num_blocks": memory.blocks.num_blocks,
            "num_host_blocks": memory.host.pool.num_blocks if memory.host is not None else 0,
        }
        self._readers: list[asyncio.Queue[str]] = []
        attention = "full_attention" if engine.model.latent is None else "mla_attention"
        self._kinds = () if memory.states is None else (attention, "mamba")
        # For each tier and group, the hash of the block before each block that it has.
        self._blocks: dict[tuple[int, int], dict[bytes, bytes | None]]
        self._blocks = {(level, group): {} for level in MEDIA for group in range(len(self._kinds) or 1)}

    def add(self, changes: Iterable[BlockEvent | None]) -> None:
        """Adds a batch."""
        events: list[dict[str, Any]] = []
        for change in changes:
            if change is None:
                for blocks in self._blocks.values():
                    blocks.clear()
                events += self._everything()
                continue
            place = change.level, change.group
            if change.stored:
                self._blocks[place][change.key] = change.parent
                self._add_stored(events, place, change.key, change.parent)
            else:
                del self._blocks[place][change.key]
                event = {"type": "BlockRemoved", **self._names(place)}
                if not (events and events[-1].items() >= event.items()):
                    events.append({**event, "block_hashes": []})
                events[-1]["block_hashes"].append(change.key.hex())
        for reader in self._readers:
            if not reader.full():
                reader.put_nowait(_encoded(events))
                continue
            while not reader.empty():
                reader.get_nowait()
            reader.put_nowait(_encoded(self._everything()))

    def _names(self, place: tuple[int, int]) -> dict[str, Any]:
        """Returns the fields that tell a tier and a group."""
        level, group = place
        return {"medium": MEDIA[level], **({"group_idx": group} if self._kinds else {})}

    def _add_stored(
        self, events: list[dict[str, Any]], place: tuple[int, int], key: bytes, parent: bytes | None
    ) -> None:
        """Adds a stored block to the last event, if it continues its chain, or as an event of its own."""
        before, event = None if parent is None else parent.hex(), self._stored(place)
        if not (events and events[-1].items() >= event.items() and events[-1]["block_hashes"][-1:] == [before]):
            events.append({**event, "block_hashes": [], "parent_block_hash": before})
        events[-1]["block_hashes"].append(key.hex())

    def _stored(self, place: tuple[int, int]) -> dict[str, Any]:
        """Returns a BlockStored without blocks."""
        kind = {"kv_cache_spec_kind": self._kinds[place[1]]} if self._kinds else {}
        return {"type": "BlockStored", "block_size": self._block_size, **self._names(place), **kind}

    async def stream(self, has_ended: Callable[[], bool], ping_s: float) -> AsyncIterator[str]:
        """Yields server-sent events.

        Args:
          has_ended: whether the server ends, and its streams with it.
          ping_s: seconds without an event after which a comment is sent.
        """
        yield f"event: cache\ndata: {json.dumps(self._cache)}\n\n"
        yielded_s, reader = time.monotonic(), asyncio.Queue(KEPT)
        reader.put_nowait(_encoded(self._everything()))
        self._readers.append(reader)
        try:
            while not has_ended():
                try:
                    text = await asyncio.wait_for(reader.get(), min(LOOK_S, ping_s))
                except TimeoutError:
                    text = PING if time.monotonic() >= yielded_s + ping_s else ""
                if text:
                    yield text
                    yielded_s = time.monotonic()
        finally:
            self._readers.remove(reader)
        yield DONE

    def _everything(self) -> list[dict[str, Any]]:
        """Returns the events of all blocks, as a batch begins with them."""
        events: list[dict[str, Any]] = [{"type": "AllBlocksCleared"}]
        if self._kinds:
            events.append({**self._stored((DEVICE, 1)), "block_hashes": [], "parent_block_hash": None})
        for place, blocks in self._blocks.items():
            for key, parent in blocks.items():
                self._add_stored(events, place, key, parent)
        return events


def _encoded(events: list[dict[str, Any]]) -> str:
    return f"data: {json.dumps({'events': events}, separators=(',', ':'))}\n\n"


class Listener:
    """Collects the changes of one engine's tiers on its thread, and hands them to the log once per step.

    Args:
      loop: the event loop to which the log belongs.
    """

    def __init__(self, log: KVEventLog, loop: asyncio.AbstractEventLoop):
        self._log, self._loop = log, loop
        self._changes: list[BlockEvent | None] = []  # None: all blocks were dropped
        self._hashes: dict[bytes, bytes] = {}  # of cached states, by their keys
        self._state_group = -1

    def attach(self, engine: Engine) -> None:
        """Reports all blocks that the engine caches now, and every later change; call it on the engine's thread."""
        memory, self._index = engine.memory, engine.memory.index
        tiers = [memory.device, memory.host]
        if memory.states is not None:
            self._state_group = memory.states.group
            tiers += [memory.states, memory.states.host]
        for tier in tiers:
            if tier is not None:
                for node in tier.node_of.values():
                    self.stored(node, tier.level)
        self.hand_over()
        memory.listeners.append(self)
        memory.state_listeners.append(self)
        engine.observers.append(self.hand_over)

    def stored(self, node: Node, level: int) -> None:
        """See `kv.tier.CacheListener`."""
        assert node.parent is not None
        parent, key, group = node.parent.key, node.key, 0
        if node.group == self._state_group:
            parent, group = self._hash_of(node.parent), 1
            key = self._hashes[node.key] = self._index.link(parent, node.tokens, node.depth).key
        self._changes.append(BlockEvent(level, key, parent if node.depth else None, True, group))

    def _hash_of(self, node: Node) -> bytes:
        """Returns the key that a node of states has in group 0: that of its tokens and those before them."""
        blocks, at = [], node
        while at.parent is not None and at.key not in self._hashes:
            blocks.append(at)
            at = at.parent
        key = self._hashes[at.key] if at.parent is not None else self._index.root(at.tokens.decode()).key
        for block in reversed(blocks):
            key = self._index.link(key, block.tokens, block.depth).key
        return key

    def dropped(self, node: Node, level: int) -> None:
        """See `kv.tier.CacheListener`."""
        key, group = node.key, 0
        if node.group == self._state_group:
            key, group = self._hashes[node.key], 1
            if not node.is_stored:
                del self._hashes[node.key]
        self._changes.append(BlockEvent(level, key, None, False, group))

    def used(self, node: Node) -> None:
        """See `kv.tier.CacheListener`. Routers do not ask."""

    def cleared(self) -> None:
        """See `kv.tier.CacheListener`. A step has failed, and no observer will hear of it."""
        self._changes = [None]
        self._hashes.clear()
        self.hand_over()

    def hand_over(self, engine: Engine | None = None) -> None:
        """Hands over the collected changes; the engine calls it after each step."""
        if self._changes:
            changes, self._changes = self._changes, []
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so no client listens
                self._loop.call_soon_threadsafe(self._log.add, changes)


def refusal(engine: Engine) -> str:
    """Returns why this engine's block hashes differ from a router's by token ids; empty if they are equal."""
    memory = engine.memory
    if not engine.config.enable_prefix_caching:
        return "the prefix cache is off (enable_prefix_caching)"
    if len(memory.layout.groups) > 1:
        return f"the layers form {len(memory.layout.groups)} groups, each with blocks of its own"
    if memory.index.scope.full_until < engine.max_model_len:
        return "the attention pattern hides parts of a text"
    return ""


async def kv_events(request: Request) -> Response:
    """Answers with the stream of events. The first reader starts the log; before that, nothing is collected."""
    serving = serving_of(request)
    llm = serving.any_llm
    log: KVEventLog | None = getattr(request.app.state, "kv_events", None)
    if log is None:
        engines = llm.replicas.engines
        why = f"there are {len(engines)} replicas" if len(engines) > 1 else refusal(llm.engine)
        if why:
            raise APIError(501, f"block hashes would not be those of the token ids: {why}", code="no_kv_events")
        log = request.app.state.kv_events = KVEventLog(llm.engine)
        llm.between_steps(Listener(log, asyncio.get_running_loop()).attach)

    def ended() -> bool:
        return serving.draining or not llm.is_alive

    response = StreamingResponse(log.stream(ended, serving.settings.ping_s))
    response.raw_headers = list(HEADERS)
    return response

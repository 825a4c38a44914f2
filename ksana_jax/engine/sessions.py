"""Sessions: copies the cached state of a request out of an engine, and into another one.

A session is a part of the prefix cache: the full blocks of a text that later queries see and, where rows evict, the
snapshots of its beginnings (`kv.snapshots`), from the end of a prompt's context to the end of the text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.files import path_problem
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import SamplingParams
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.session_files import Session, SessionError, SessionPart, read_session, write_session
from ksana_jax.kv.prefix_cache import Hit
from ksana_jax.kv.state import HeldBlocks, KVState
from ksana_jax.kv.tier import DEVICE, HOST, Node
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.sequence import Sequence
from ksana_jax.scheduler.speculative import read_speculative


class Sessions:
    """The part of `LLM` that saves and restores sessions."""

    engine: Engine

    def save_session(self, request: RequestOutput | str, path: str | os.PathLike[str]) -> int:
        """Saves what the prefix cache has of a request, so that another process can continue its text.

        Args:
          request: the output of a request that has ended, or the id of one that runs or waits; of several completions
            the first is saved.
          path: a folder for the session; it replaces one that is there.

        Returns:
          Number of tokens whose state was saved. It ends with a full block, unless the request has evicted tokens.

        Raises:
          ValueError: nothing of the request is cached, this engine cannot save sessions, or a file cannot be written.
        """
        return save_session(self.engine, request, _folder(path))

    def restore_session(self, path: str | os.PathLike[str]) -> int:
        """Puts a saved session into the prefix cache, where prompts that begin with its text find it.

        Returns:
          Number of tokens whose state was restored.

        Raises:
          ValueError: files are damaged, the session was saved with another model, dtype, block size, attention
            pattern or eviction, or too few blocks of the pool are available; the cache stays as it is.
        """
        return restore_session(self.engine, _folder(path))


def save_session(engine: Engine, request: RequestOutput | str, folder: Path) -> int:
    """Saves the cached state of a request; see `LLM.save_session`."""
    _check(engine)
    session = engine.lock.run(_copied, engine, request)
    if session is None:
        raise SessionError("another request is computing the same prefix: save the session when it has ended")
    if not session.parts:
        name = request if isinstance(request, str) else request.request_id
        raise SessionError(f"nothing of request {name!r} is cached: it has computed no block, or others replaced them")
    write_session(folder, session, engine.scheduler.layout, _made_with(engine))
    return len(session.token_ids)


def restore_session(engine: Engine, folder: Path) -> int:
    """Restores a session; see `LLM.restore_session`."""
    _check(engine)
    session = read_session(folder, engine.scheduler.layout, _made_with(engine))
    engine.lock.run(_restore, engine, session, folder)
    return len(session.token_ids)


def _folder(path: str | os.PathLike[str]) -> Path:
    checks.require(path_problem("path", path), error=SessionError)
    return Path(path)


def _check(engine: Engine) -> None:
    config = engine.config
    problem = None
    if engine.asleep is not None:
        problem = "it sleeps"
    elif not config.enable_prefix_caching:
        problem = "enable_prefix_caching is off, and a session is a part of the prefix cache"
    elif config.data_parallel_size > 1:
        problem = f"data_parallel_size is {config.data_parallel_size}, and each replica has a cache of its own"
    elif config.distributed is not None:
        problem = "distributed is set, and each process has the keys and values of its own heads only"
    elif (method := read_speculative(config.speculative_config)) is not None and method.has_model:
        problem = "speculative_config has a draft model, whose keys and values a session does not have"
    if problem is not None:
        raise SessionError(f"this engine saves and restores no sessions: {problem}")


def _made_with(engine: Engine) -> dict[str, str]:
    """Returns all that a session's blocks depend on besides its text, by names of settings; digests come last, so that
    an error names a setting that differs."""
    layout, scope = engine.scheduler.layout, engine.memory.index.scope
    patterns = dict.fromkeys(map(str, engine.executor.patterns))
    return {
        "dtype": engine.config.dtype,
        "kv_cache_dtype": layout.codec,
        "block_size": str(layout.block_size),
        "pattern": " | ".join(patterns),
        "kv_eviction": str(layout.eviction and layout.eviction.method),
        "kv_selection": str(layout.selection),
        "layers": f"{[group.key for group in layout.groups]} with patterns {scope.pattern}",
        "model digest": scope.model,
    }


def _copied(engine: Engine, request: RequestOutput | str) -> Session | None:
    """Returns the cached states of a request; None if another one is computing more of its text."""
    seq = _waiting(engine, request)
    prefixes, text = engine.memory.prefixes, seq.token_ids
    engine.lock.begin_write()
    engine.make_moves()
    seq.kv.has_read, had_read = True, seq.kv.has_read  # blocks on disk are left there
    hits = [engine.scheduler.admission.pin(seq)]
    while hits[-1].snapshot:  # and the next shorter one
        seq.token_ids = text[: hits[-1].num_tokens]
        hits.append(engine.scheduler.admission.pin(seq))
    seq.kv.has_read = had_read
    nodes = list(dict.fromkeys(node for hit in hits for node in hit.nodes))
    blocks = _read(engine, nodes)
    states = [] if hits[0].state is None else [hits[0].state]
    of_states = _read(engine, states, of_states=True) if states else np.empty((0, 0), np.uint8)
    for hit in hits:
        prefixes.unpin(hit)
    if hits[0].awaits:
        return None
    places = {node: place for place, node in enumerate(nodes)}
    found = [_part(hit, places) for hit in hits if hit.nodes]
    return Session(text[: hits[0].num_tokens], seq.num_context, seq.kv.salt, found, blocks, of_states)


def _read(engine: Engine, nodes: list[Node], of_states: bool = False) -> np.ndarray:
    """Returns the bytes of cached blocks, or states, wherever they are stored: [n, block_bytes]."""
    memory, runner = engine.memory, cast(Runner, engine.executor)
    host, read_device = memory.host, runner.mover.read
    if of_states and memory.states is not None:
        host, read_device = memory.states.host, runner.mover.read_states
    on_device, on_host = (np.array([node.at[tier] for node in nodes], np.int32) for tier in (DEVICE, HOST))
    here = on_device >= 0
    read = read_device(runner.cache, on_device[here])
    blocks = np.empty((len(nodes), read.shape[1]), np.uint8)
    blocks[here] = read
    if host is not None:
        blocks[~here] = host.data[on_host[~here]].reshape(-1, blocks.shape[1])
    return blocks


def _part(hit: Hit, places: Mapping[Node, int]) -> SessionPart:
    found, groups = [places[node] for node in hit.nodes], [node.group for node in hit.nodes]
    evicted = hit.num_evicted if hit.snapshot else ()
    return SessionPart(hit.num_tokens, *(np.array(values, np.int32) for values in (found, hit.starts, groups, evicted)))


def _waiting(engine: Engine, request: RequestOutput | str) -> Sequence:
    """Returns a request as a sequence that waits to continue its text.

    Raises:
      SessionError: no request has this id.
    """
    if isinstance(request, RequestOutput):
        prompt, kv, num_question = request.prompt_token_ids, KVState(request.cache_salt), request.num_question
        text = [*prompt, *request.outputs[0].token_ids]
    else:
        if (running := engine.requests.get(request)) is None:
            raise SessionError(f"no request {request!r:.80} runs or waits: give the output of one that has finished")
        prompt, seq, rows = running.prompt_token_ids, running.completions[0].seq, engine.scheduler.rows
        kv, num_question, text = KVState(seq.kv.salt), seq.num_question, seq.token_ids
        if seq.row is not None:  # with its own state it does not wait for itself
            kv, text = seq.kv, rows.token_ids[seq.row, : rows.num_known[seq.row]]
    found = Sequence(-1, np.array(prompt, np.int32), SamplingParams(), (), 0, num_question=num_question, kv=kv)
    found.token_ids = np.array([*text, 0], np.int32)  # the last one of a sequence is never taken from the cache
    return found


def _restore(engine: Engine, session: Session, folder: Path) -> None:
    memory, runner = engine.memory, cast(Runner, engine.executor)
    device, count, state = memory.device, len(session.blocks), KVState(session.salt)
    if count > device.pool.num_available:
        total = device.pool.num_blocks
        raise SessionError(f"{folder} has {count:,} blocks, {device.pool.num_available:,} of {total:,} are available")
    if (states := memory.states) is not None and not states.pool.num_available:
        raise SessionError(f"{folder} has a state, and all {states.pool.num_blocks:,} slots for states are in use")
    engine.lock.begin_write()
    ids, slot = device.allocate(count), None if states is None else states.take()
    engine.make_moves()  # the host receives what these blocks held
    runner.cache = runner.mover.write(runner.cache, ids, session.blocks)
    if states is not None and slot is not None:
        runner.cache = runner.mover.write_states(runner.cache, np.array([slot]), session.states)
        states.cache(state, session.token_ids, len(session.token_ids), slot)
        states.give_back(slot)
    # Whole prefixes first: a snapshot has blocks of theirs where a group of layers has evicted nothing.
    for part in reversed(session.parts):
        _keep(engine, state, session, part, ids[part.places])
    device.release(ids)


def _keep(engine: Engine, state: KVState, session: Session, part: SessionPart, ids: np.ndarray) -> None:
    """Caches the blocks of a part; content that is cached already stays where it is."""
    prefixes, token_ids = engine.memory.prefixes, session.token_ids[: part.num_tokens]
    if len(part.num_evicted):
        assert prefixes.snapshots is not None
        held = HeldBlocks(ids, part.starts, part.groups, part.num_tokens, num_evicted=part.num_evicted)
        prefixes.snapshots.keep(state, token_ids, session.num_context, held)
        return
    size, num_groups = engine.memory.block_size, len(engine.scheduler.layout.groups)
    tables = np.full((num_groups, part.num_tokens // size), -1)
    tables[part.groups, part.starts // size] = ids
    kept = np.array(prefixes.insert(state, token_ids, tables.tolist()))
    engine.memory.device.release(kept[kept != tables])

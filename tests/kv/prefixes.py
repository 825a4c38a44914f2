"""Single sequences, and a prefix cache asked on their behalf, as the scheduler does."""

import numpy as np

from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_cache import Hit, PrefixCache
from ksana_jax.kv.state import HeldBlocks, KVState
from ksana_jax.scheduler.sequence import Sequence
from tests.fakes import asking


def sequence(text, salt: str = "", *, seq_id: int = 0, max_tokens: int = 4, **settings) -> Sequence:
    text = np.asarray(text, np.int32)
    params = asking(max_tokens, **settings)
    return Sequence(seq_id, text, params, (), max_len=len(text) + max_tokens, kv=KVState(salt))


def cache(memory: KVMemory, text, salt: str = "") -> list[int]:
    """Has the full blocks of a text computed and let go; returns the ids of those that are cached."""
    seq = sequence(text, salt)
    ids = memory.device.allocate(len(text) // memory.index.block_size)
    [kept] = memory.prefixes.insert(seq.kv, seq.token_ids, [ids.tolist()])
    memory.device.release(ids[ids != kept])
    memory.device.release(np.array(kept, np.int32))
    return kept


def pin(prefixes: PrefixCache, seq: Sequence) -> Hit:
    return prefixes.pin(seq.kv, seq.token_ids, seq.max_cached_tokens)


def claim(prefixes: PrefixCache, seq: Sequence, hit: Hit | None = None) -> HeldBlocks:
    return prefixes.claim(seq.kv, hit or pin(prefixes, seq), seq.token_ids)

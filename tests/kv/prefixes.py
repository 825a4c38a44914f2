"""Asks a prefix cache on behalf of a sequence, as the scheduler does."""

from ksana_jax.kv.prefix_cache import Hit, PrefixCache
from ksana_jax.kv.state import HeldBlocks
from ksana_jax.sequence import Sequence


def pin(prefixes: PrefixCache, seq: Sequence) -> Hit:
    return prefixes.pin(seq.kv, seq.token_ids, seq.max_cached_tokens)


def claim(prefixes: PrefixCache, seq: Sequence, hit: Hit | None = None) -> HeldBlocks:
    return prefixes.claim(seq.kv, hit or pin(prefixes, seq), len(seq.token_ids))

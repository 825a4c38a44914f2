"""Counters of KV memory."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Counters:
    """Counts events since the engine started, in blocks unless stated otherwise.

    queried_tokens, hit_tokens: prompt tokens looked up in the prefix cache, and found there.
    hits_device, hits_host, hits_disk: blocks found, by tier.
    replaced, replaced_host: cached blocks replaced on the device, on the host.
    saved, loaded, copied: blocks moved from the device to the host, back, and within the device.
    swapped_out, swapped_in: blocks of preempted rows among those saved and loaded.
    evicted: tokens evicted from running rows, of each group of layers.
    snapshots, replaced_states: states of recurrent layers that were cached, and replaced.
    key_tokens, state_tokens: prompt tokens whose keys and values were cached, and those up to the last cached state of
      recurrent layers; hit_tokens are those where both are.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    hits_device: int = 0
    hits_host: int = 0
    hits_disk: int = 0
    replaced: int = 0
    replaced_host: int = 0
    saved: int = 0
    loaded: int = 0
    copied: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    evicted: int = 0
    snapshots: int = 0
    replaced_states: int = 0
    key_tokens: int = 0
    state_tokens: int = 0

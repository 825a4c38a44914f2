"""What the memory counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Counters:
    """What has happened since the engine started, in blocks unless it says otherwise.

    asked_tokens, hit_tokens: of prompts looked up, and found. hits_device, hits_host, hits_disk: where.
    replaced, replaced_host: cached blocks that made room on the device, on the host. saved, loaded, copied: blocks
    moved from the device, to it, within it. swapped_out, swapped_in: of those, for preempted rows.
    """

    asked_tokens: int = 0
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

"""Which settings random simulations must meet together: every three that an engine takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ksana_jax.core import refusals
from ksana_jax.core.refusals import REFUSALS

ADDS_UP = "eviction that adds up attention"
# Names of settings as `Simulation.drawn` gives them, and what the list of refusals calls them.
SETTINGS = {
    "pattern": (),
    "prefix cache": ("enable_prefix_caching",),
    "host memory": (),
    "disk tier": ("enable_prefix_caching", "disk_cache_dir"),
    "preempt swap": (),
    "preempt recompute": (),
    "preempt auto": (),
    "shared prefix attention": ("shared_prefix_attention",),
    "a step ahead": (),
    "several steps": (),
    "beam searches": ("beam_width",),
    "several completions": (),
    "log-probabilities": (),
    "forced tokens": ("forced_token_ids",),
    "codec": (),
    "full-precision layers": ("kv_full_precision_layers",),
    "block codec": (refusals.WHOLE_BLOCKS,),
    "eviction": ("kv_eviction",),
    ADDS_UP: ("kv_eviction", refusals.ADDS_UP_ATTENTION),
    "selection": ("kv_selection",),
    "drafts": ("speculative_config",),
    "branches": ("speculative_config", refusals.BRANCHES),
    "draft model": ("speculative_config", refusals.DRAFT_MODEL),
    "recurrent layers": (refusals.RECURRENT,),
}
# Settings of which an engine has one.
KINDS = (
    {"preempt swap", "preempt recompute", "preempt auto"},
    {"codec", "block codec"},
    {"eviction", ADDS_UP},
    {"drafts", "branches", "draft model"},
    # Served together (tests/combinations), but drawn apart.
    *(
        {"recurrent layers", other}
        for other in ("codec", "block codec", "full-precision layers", "selection", "eviction", ADDS_UP)
    ),
)


def _exclude(a: str, b: str) -> bool:
    refused = any({r.setting, r.other} <= {*SETTINGS[a], *SETTINGS[b]} for r in REFUSALS)
    return refused or any({a, b} <= kind for kind in KINDS)


def triples(names: Iterable[str]) -> set[tuple[str, ...]]:
    """Returns every three of some settings, in a fixed order."""
    return set(itertools.combinations(sorted(names), 3))


# Two layers that keep different tokens are two groups, of which neither can have a layer in full precision.
TRIPLES = {
    three
    for three in triples(SETTINGS)
    if not any(_exclude(a, b) for a, b in itertools.combinations(three, 2))
    and not ({"pattern", "full-precision layers"} < {*three} and three[0].startswith("eviction"))
}

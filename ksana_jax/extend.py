"""The public extension API: the ports that code outside the package implements. `docs/extend.md` shows one of each.

    from ksana_jax.extend import Cached, EvictionMethod

Names here keep their meaning and their signatures within a VERSION; other modules may move between releases. A setting
selects an implementation as "package.module:name", or by its name in the registry of its seam (`SEAMS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ksana_jax.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.bench.core import Bench, Case
    from ksana_jax.experiments.tasks.base import BaseTask, TrialContext
    from ksana_jax.experiments.tasks.results import Column, Measurement, ResultRow
    from ksana_jax.kv.codecs.base import BlockCodec, Codec
    from ksana_jax.kv.eviction.base import Cached, EvictionMethod, Observation
    from ksana_jax.kv.replacement import CachedBlock, ReplacementPolicy
    from ksana_jax.patterns import AttentionPattern
    from ksana_jax.router.policies.base import Policy
    from ksana_jax.scheduler.policies import ByRank, SchedulingPolicy
    from ksana_jax.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
    from ksana_jax.step.drafts import Drafts

# Raised by a change that breaks an implementation of a port.
VERSION = 1


class Seam(NamedTuple):
    """A place where methods plug in.

    setting: that selects one. port: the class or function type to implement. registry: "module:NAME" of existing ones.
    """

    setting: str
    port: str
    registry: str


SEAMS = (
    Seam("kv_eviction", "EvictionMethod", "ksana_jax.kv.eviction:EVICTION_METHODS"),
    Seam("kv_cache_dtype", "Codec", "ksana_jax.kv.codecs.registry:CODECS"),
    Seam("kv_cache_dtype", "BlockCodec", "ksana_jax.kv.codecs.registry:BLOCK_CODECS"),
    Seam("prefix_replacement", "ReplacementPolicy", "ksana_jax.kv.replacement:REPLACEMENT_POLICIES"),
    Seam("policy", "SchedulingPolicy", "ksana_jax.scheduler.policies:SCHEDULING_POLICIES"),
    Seam("speculative_config", "SpeculativeMethod", "ksana_jax.speculative:PROPOSERS"),
    Seam("policy of ksana route", "Policy", "ksana_jax.router.policies:POLICIES"),
    Seam("task", "BaseTask", "ksana_jax.experiments.tasks:TASKS"),
    Seam("ksana bench", "Bench", "ksana_jax.bench:BENCHES"),
)

_PUBLIC = {
    "ksana_jax.bench.core": "Bench Case",
    "ksana_jax.experiments.tasks.base": "BaseTask TrialContext",
    "ksana_jax.experiments.tasks.results": "Column Measurement ResultRow",
    "ksana_jax.kv.codecs.base": "BlockCodec Codec",
    "ksana_jax.kv.eviction.base": "Cached EvictionMethod Observation",
    "ksana_jax.kv.replacement": "CachedBlock ReplacementPolicy",
    "ksana_jax.patterns": "AttentionPattern",
    "ksana_jax.router.policies.base": "Policy",
    "ksana_jax.scheduler.policies": "ByRank SchedulingPolicy",
    "ksana_jax.speculative.base": "Proposer ProposerContext SpeculativeMethod Texts",
    "ksana_jax.step.drafts": "Drafts",
}
__all__ = ["SEAMS", "VERSION", "AttentionPattern", "BaseTask", "Bench", "BlockCodec", "ByRank", "Cached", "CachedBlock"]
__all__ += ["Case", "Codec", "Column", "Drafts", "EvictionMethod", "Measurement", "Observation", "Policy", "Proposer"]
__all__ += [
    "ProposerContext",
    "ReplacementPolicy",
    "ResultRow",
    "SchedulingPolicy",
    "Seam",
    "SpeculativeMethod",
    "Texts",
]
__all__ += ["TrialContext"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

"""The public extension API: the interfaces that code outside the package implements. `docs/extend/` shows one of each.

    from ksana_jax.extend import Cached, EvictionMethod

Names here keep their meaning and their signatures within a VERSION; other modules may move between releases. A setting
selects an implementation as "package.module:name", or by its name in its registry (`EXTENSION_POINTS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana_jax.core.lazy import lazy_names
from ksana_jax.methods import EXTENSION_POINTS, ExtensionPoint

if TYPE_CHECKING:
    from ksana_jax.core.patterns import AttentionPattern
    from ksana_jax.kv.codecs.base import BlockCodec, Codec
    from ksana_jax.kv.eviction.base import Cached, EvictionMethod, Merged, Observation
    from ksana_jax.kv.eviction.wrapper import EvictionWrapper
    from ksana_jax.kv.replacement import CachedBlock, ReplacementPolicy
    from ksana_jax.kv.selection.base import SelectionMethod
    from ksana_jax.kv.state_snapshots.base import SnapshotPolicy
    from ksana_jax.lab.bench.core import Bench, Case
    from ksana_jax.lab.runs.tasks.base import BaseTask, TrialContext
    from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow
    from ksana_jax.scheduler.policies import ByRank, SchedulingPolicy
    from ksana_jax.scheduler.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
    from ksana_jax.scheduler.step.drafts import Drafts
    from ksana_jax.serve.router.policies.base import Policy

# Raised by a change that breaks an implementation of an interface.
VERSION = 1


_PUBLIC = {
    "ksana_jax.lab.bench.core": "Bench Case",
    "ksana_jax.lab.runs.tasks.base": "BaseTask TrialContext",
    "ksana_jax.lab.runs.tasks.results": "Column Measurement Part ResultRow",
    "ksana_jax.kv.codecs.base": "BlockCodec Codec",
    "ksana_jax.kv.eviction.base": "Cached EvictionMethod Merged Observation",
    "ksana_jax.kv.eviction.wrapper": "EvictionWrapper",
    "ksana_jax.kv.replacement": "CachedBlock ReplacementPolicy",
    "ksana_jax.kv.selection.base": "SelectionMethod",
    "ksana_jax.kv.state_snapshots.base": "SnapshotPolicy",
    "ksana_jax.core.patterns": "AttentionPattern",
    "ksana_jax.serve.router.policies.base": "Policy",
    "ksana_jax.scheduler.policies": "ByRank SchedulingPolicy",
    "ksana_jax.scheduler.speculative.base": "Proposer ProposerContext SpeculativeMethod Texts",
    "ksana_jax.scheduler.step.drafts": "Drafts",
}
__all__ = [
    "EXTENSION_POINTS",
    "VERSION",
    "AttentionPattern",
    "BaseTask",
    "Bench",
    "BlockCodec",
    "ByRank",
    "Cached",
    "CachedBlock",
]
__all__ += ["Case", "Codec", "Column", "Drafts", "EvictionMethod", "EvictionWrapper", "Measurement", "Merged"]
__all__ += [
    "Observation",
    "Part",
    "Policy",
    "Proposer",
    "ProposerContext",
    "ReplacementPolicy",
    "ResultRow",
    "SchedulingPolicy",
    "ExtensionPoint",
    "SelectionMethod",
    "SnapshotPolicy",
    "SpeculativeMethod",
    "Texts",
]
__all__ += ["TrialContext"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

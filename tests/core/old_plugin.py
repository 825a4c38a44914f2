"""A plug-in as users wrote it before modules moved: a method, a codec, a proposer, policies, a task."""

import dataclasses

from ksana_jax.config import ConfigError, EngineConfig
from ksana_jax.experiments.tasks.base import BaseTask, Column, Measurement
from ksana_jax.kv.eviction.h2o import H2O
from ksana_jax.patterns import AttentionPattern
from ksana_jax.router import Policy
from ksana_jax.sequence import Sequence
from ksana_jax.simulator.polled import Polled
from ksana_jax.speculative.base import Proposer, SpeculativeMethod
from ksana_jax.step.contract import StepShape
from ksana_jax.step.drafts import Drafts
from ksana_jax.workload.base import WorkloadSettings

from ksana_jax.kv.codecs.base import Codec
from ksana_jax.kv.eviction.base import Cached, EvictionMethod
from ksana_jax.kv.replacement import CachedBlock, lru
from ksana_jax.scheduler.policies import LongestPrefix, SchedulingPolicy

IMPORTED = (ConfigError, EngineConfig, BaseTask, Column, Measurement, Codec, Cached, AttentionPattern, Policy, Polled)
IMPORTED += (SchedulingPolicy, Proposer, SpeculativeMethod, StepShape, Drafts, WorkloadSettings, LongestPrefix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgetful(H2O):
    """H2O with the old name of an attribute."""

    forgets = True


class Newest(EvictionMethod):
    def priority(self, cached, xp):
        return xp.broadcast_to(xp.arange(cached.keys.shape[3]), cached.keys.shape[:4])


def oldest(block: CachedBlock, age: float) -> tuple[float, ...]:
    return lru(block, age)


def last_come(seq: Sequence) -> float:
    return -seq.seq_id

"""Engines that proposers are for, without the engine."""

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.kv.groups import group_layers
from ksana_jax.kv.layout import KVLayout
from ksana_jax.scheduler.speculative.base import ProposerContext
from ksana_jax.scheduler.step.ladders import make_buckets


def context_of(num_rows: int) -> ProposerContext:
    """An engine with some rows."""
    config = EngineConfig(max_num_seqs=num_rows, max_model_len=512)
    return ProposerContext(config, 100, KVLayout(group_layers([FULL]), 16), [FULL], make_buckets(config, "test"))

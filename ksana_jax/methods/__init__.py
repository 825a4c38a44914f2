"""The researcher's room: methods that plug into the engine, one file a paper. `SEAMS` lists all that can be plugged in.

A method's port (its interface) and registry stay in the room that uses them, so that a method can be added from
outside the package too: `ksana_jax.extend` exports the ports.
"""

from typing import NamedTuple


class Seam(NamedTuple):
    """A place where methods plug in.

    setting: its selecting setting. port: the class or function type to implement. registry: "module:NAME" of entries.
    """

    setting: str
    port: str
    registry: str


SEAMS = (
    Seam("kv_eviction", "EvictionMethod", "ksana_jax.kv.eviction:EVICTION_METHODS"),
    Seam("kv_selection", "SelectionMethod", "ksana_jax.kv.selection:SELECTION_METHODS"),
    Seam("kv_cache_dtype", "Codec", "ksana_jax.kv.codecs.registry:CODECS"),
    Seam("kv_cache_dtype", "BlockCodec", "ksana_jax.kv.codecs.registry:BLOCK_CODECS"),
    Seam("prefix_replacement", "ReplacementPolicy", "ksana_jax.kv.replacement:REPLACEMENT_POLICIES"),
    Seam("policy", "SchedulingPolicy", "ksana_jax.scheduler.policies:SCHEDULING_POLICIES"),
    Seam("speculative_config", "SpeculativeMethod", "ksana_jax.scheduler.speculative:PROPOSERS"),
    Seam("policy of ksana route", "Policy", "ksana_jax.serve.router.policies:POLICIES"),
    Seam("task", "BaseTask", "ksana_jax.lab.experiments.tasks:TASKS"),
    Seam("ksana bench", "Bench", "ksana_jax.lab.bench:BENCHES"),
)

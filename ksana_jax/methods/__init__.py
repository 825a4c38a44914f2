"""Methods that plug into the engine, one file a paper. `EXTENSION_POINTS` lists the interfaces they implement.

A method's interface and registry are in the package that uses them, so that a method can be added from outside too:
`ksana_jax.extend` exports the interfaces.
"""

from typing import NamedTuple


class ExtensionPoint(NamedTuple):
    """An interface that methods implement.

    setting: the setting that selects one. interface: the class or function type. registry: "module:NAME" of entries.
    """

    setting: str
    interface: str
    registry: str


EXTENSION_POINTS = (
    ExtensionPoint("kv_eviction", "EvictionMethod", "ksana_jax.kv.eviction:EVICTION_METHODS"),
    ExtensionPoint("kv_selection", "SelectionMethod", "ksana_jax.kv.selection:SELECTION_METHODS"),
    ExtensionPoint("kv_cache_dtype", "Codec", "ksana_jax.kv.codecs.registry:CODECS"),
    ExtensionPoint("kv_cache_dtype", "BlockCodec", "ksana_jax.kv.codecs.registry:BLOCK_CODECS"),
    ExtensionPoint("prefix_replacement", "ReplacementPolicy", "ksana_jax.kv.replacement:REPLACEMENT_POLICIES"),
    ExtensionPoint("state_snapshots", "SnapshotPolicy", "ksana_jax.kv.state_snapshots:STATE_SNAPSHOTS"),
    ExtensionPoint("policy", "SchedulingPolicy", "ksana_jax.scheduler.policies:SCHEDULING_POLICIES"),
    ExtensionPoint("speculative_config", "SpeculativeMethod", "ksana_jax.scheduler.speculative:PROPOSERS"),
    ExtensionPoint("policy of ksana route", "Policy", "ksana_jax.serve.router.policies:POLICIES"),
    ExtensionPoint("task", "BaseTask", "ksana_jax.lab.runs.tasks:TASKS"),
    ExtensionPoint("ksana bench", "Bench", "ksana_jax.lab.bench:BENCHES"),
)

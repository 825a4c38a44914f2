"""State snapshots: decides where in a text the states of recurrent layers are cached. STATE_SNAPSHOTS has one entry and
file for each policy.

A policy of your own needs no entry: `state_snapshots={"method": "my_package.module:Mine"}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.plugins import read_method
from ksana_jax.kv.state_snapshots.base import SnapshotPolicy

STATE_SNAPSHOTS: dict[str, str] = {
    "prompt_end": "ksana_jax.methods.state_snapshots.prompt_end:PromptEnd",
    "request_end": "ksana_jax.methods.state_snapshots.request_end:RequestEnd",
    "every": "ksana_jax.methods.state_snapshots.every:Every",
    "forks": "ksana_jax.methods.state_snapshots.forks:Forks",
    "marconi": "ksana_jax.methods.state_snapshots.marconi:Marconi",
}


def read_state_snapshots(setting: Mapping[str, Any] | None) -> SnapshotPolicy:
    """Returns the policy of `EngineConfig.state_snapshots`; with None, "prompt_end".

    Args:
      setting: {"method": a key of STATE_SNAPSHOTS or "package.module:Class", and the fields of that class}.

    Raises:
      ConfigError: the policy or a field does not exist, or a value is out of range.
    """
    given, example = {"method": "prompt_end"} if setting is None else setting, '{"method": "every", "blocks": 8}'
    return read_method(given, STATE_SNAPSHOTS, SnapshotPolicy, "state_snapshots", example)

"""Requests that arrive over time: generated ones and published traces. Knows no engine; NumPy only, no jax.

A workload of your own needs no entry here: `{kind: "my_package.module:Mine"}`, a subclass of `base.WorkloadSettings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest, resolve
from ksana_jax.serve.workload.base import WorkloadSettings

WORKLOADS: dict[str, str] = {
    "synthetic": "ksana_jax.serve.workload.synthetic:Synthetic",
    "sessions": "ksana_jax.serve.workload.sessions:Sessions",
    "azure": "ksana_jax.serve.workload.azure:Azure",
    "mooncake": "ksana_jax.serve.workload.mooncake:Mooncake",
    "burstgpt": "ksana_jax.serve.workload.burstgpt:BurstGPT",
    "sharegpt": "ksana_jax.serve.workload.sharegpt:ShareGPT",
}

# Named settings. Azure's are the rate, the coefficient of variation of the gaps, and the medians and 99th
# percentiles of the traces of 2023.
PRESETS: dict[str, dict[str, Any]] = {
    "azure_code": {
        "kind": "synthetic",
        "rate": 2.57,
        "cv": 13.0,
        "prompt": {"p50": 1469, "p99": 7436},
        "output": {"p50": 13, "p99": 252},
    },
    "azure_conv": {
        "kind": "synthetic",
        "rate": 5.53,
        "cv": 1.09,
        "prompt": {"p50": 1020, "p99": 4142},
        "output": {"p50": 129, "p99": 601},
    },
    # Mean prompt, median and 99th percentile near the traces', and their hit rates: how much turns and system
    # prompts contribute is not in the traces.
    "mooncake_conversation": {
        "kind": "sessions",
        "rate": 3.40,
        "turns": 1.3,
        "user": {"p50": 3700, "p99": 62000},
        "output": {"p50": 350, "p99": 1120},
        "hit_rate": 0.37,
    },
    "mooncake_synthetic": {
        "kind": "sessions",
        "rate": 3.91,
        "turns": 2.0,
        "user": {"p50": 4400, "p99": 21000},
        "output": {"p50": 130, "p99": 420},
        "hit_rate": 0.64,
    },
    # ORCA, OSDI'22, section 6.2: Poisson arrivals.
    "orca": {"kind": "synthetic", "rate": 1.0, "cv": 1.0, "prompt": [32, 512], "output": [1, 128]},
}


def read_workload(setting: Mapping[str, Any] | str, **overrides: Any) -> WorkloadSettings:
    """Returns the settings of a workload.

    Args:
      setting: {"kind": a key of WORKLOADS, or "preset": a key of PRESETS, and fields of the kind, which replace those
        of the preset}; or the name of a preset or a kind.
      overrides: more fields, which replace the setting's.

    Raises:
      ConfigError: there is no such kind, preset or field, with the nearest one, or a value is out of range.
    """
    if isinstance(setting, str):
        setting = {"preset" if setting in PRESETS else "kind": setting}
    if not isinstance(setting, Mapping) or not ("kind" in setting or "preset" in setting):
        raise ConfigError(f"workload is {setting!r:.80}, must be a mapping with a 'kind' or a 'preset'")
    fields = {**setting, **overrides}
    if "preset" in fields:
        preset = fields.pop("preset")
        if preset not in PRESETS:
            close = nearest(str(preset), PRESETS, cutoff=0.0)
            raise ConfigError(f"workload has no preset {preset!r}; the nearest of {', '.join(PRESETS)} is {close!r}")
        fields = {"name": preset, **PRESETS[preset], **fields}
    kind = fields.pop("kind")
    found = resolve(kind, WORKLOADS, "workload kind")
    if not (isinstance(found, type) and issubclass(found, WorkloadSettings)):
        raise ConfigError(f"workload kind is {kind!r}, which is not a subclass of WorkloadSettings")
    known = [field.name for field in dataclasses.fields(found)]
    for key in fields:
        if key not in known:
            close = nearest(str(key), known, cutoff=0.0)
            raise ConfigError(f"workload {kind!r} has no setting {key!r}; the nearest is {close!r}")
    return found(**fields)

"""Policies: which server a request goes to. One file and one entry of POLICIES each.

A policy of your own needs no entry: `policy: {name: "my_package.module:Mine", threshold: 0.3}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest, resolve
from ksana_jax.serve.router.policies.base import Policy

POLICIES: dict[str, str] = {
    "random": "ksana_jax.serve.router.policies.load:Random",
    "round_robin": "ksana_jax.serve.router.policies.load:RoundRobin",
    "least_work": "ksana_jax.serve.router.policies.load:LeastWork",
    "power_of_two": "ksana_jax.serve.router.policies.load:PowerOfTwo",
    "chwbl": "ksana_jax.serve.router.policies.chwbl:CHWBL",
    "cache_aware": "ksana_jax.serve.router.policies.cache_aware:CacheAware",
    "e2": "ksana_jax.serve.router.policies.e2:E2",
    "min_ttft": "ksana_jax.serve.router.policies.min_ttft:MinTTFT",
    "prefix_table": "ksana_jax.serve.router.policies.prefix_table:PrefixTablePolicy",
}


def read_policy(setting: Any) -> Policy:
    """Returns the policy of a setting.

    Args:
      setting: a key of POLICIES or "package.module:Class"; a mapping with that as "name" and fields of the class; a
        subclass of Policy, or an instance, which must not be shared by routers.

    Raises:
      ConfigError: there is no such policy or field, or a value is out of range.
    """
    if isinstance(setting, Policy):
        return setting
    fields: dict[str, Any] = {}
    if isinstance(setting, Mapping):
        if "name" not in setting:
            raise ConfigError(f"policy is {setting!r:.80}, must have a name, such as {{name: min_ttft}}")
        fields = {key: value for key, value in setting.items() if key != "name"}
        setting = setting["name"]
    if isinstance(setting, str) and setting not in POLICIES and ":" not in setting:
        close = nearest(setting, POLICIES, cutoff=0.0)
        raise ConfigError(
            f"there is no policy {setting!r}; the nearest of {', '.join(POLICIES)} is {close!r}. "
            "A policy of your own is 'package.module:Class'"
        )
    found = resolve(setting, POLICIES, "policy")
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"policy is {setting!r:.80}, which is not a subclass of ksana_jax.serve.router.Policy")
    known = [f.name for f in dataclasses.fields(found) if f.init] if dataclasses.is_dataclass(found) else []
    for key in fields:
        if key not in known:
            close = nearest(str(key), known)
            hint = f"; the nearest is {close!r}" if close else f"; it has {', '.join(known) or 'none'}"
            raise ConfigError(f"policy {setting!r} has no setting {key!r}{hint}")
    return found(**fields)

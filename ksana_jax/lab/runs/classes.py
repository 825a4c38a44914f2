"""Digests of the classes that a trial's config names, and notes on records that come from several versions of them."""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ksana_jax.core import own_code
from ksana_jax.core.plugins import name_of
from ksana_jax.methods import EXTENSION_POINTS


def own_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns {"module:name": digest} of the user's own code that a config names: part of a trial's identity."""
    return own_code.digests_of([config, _registered(config)])


def package_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns {"module:name": digest} of the package's classes that a config names, for its records."""
    names = (name for name in _registered(config) if not own_code.is_own(name))
    return {name: own_code.digest_of_module(name.partition(":")[0]) for name in names}


def _registered(config: Mapping[str, Any]) -> list[str]:
    """Returns the "module:name" of all classes that a config names by their key in a registry."""
    settings, found = {**config["engine"], "task": config["task"]}, []
    for point in EXTENSION_POINTS:
        if texts := set(own_code.texts(settings.get(point.setting))):
            module, _, name = point.registry.partition(":")
            registry = getattr(importlib.import_module(module), name)
            found += [name_of(registry[text]) for text in texts & registry.keys()]
    return sorted(set(found))


def notes(starts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns notes if trials ran with several versions of the package, of its classes, or of own code.

    Args:
      starts: their start records.
    """
    packages: Counter[str] = Counter()
    classes: dict[str, set[str]] = defaultdict(set)
    for start in starts:
        environment, config = (start.get(name) for name in ("environment", "config"))
        if isinstance(environment, Mapping) and "commit" in environment:
            packages[_version(environment)] += 1
        for found in (start.get("classes"), config.get("code") if isinstance(config, Mapping) else None):
            for name, digest in found.items() if isinstance(found, Mapping) else ():
                classes[name].add(str(digest))
    said = []
    if len(packages) > 1:
        counts = (f"{name} ({count} trial{'s' * (count > 1)})" for name, count in packages.items())
        said.append(f"The trials ran on {len(packages)} versions of ksana_jax: {', '.join(counts)}.")
    several = [f"{name} ({len(found)})" for name, found in classes.items() if len(found) > 1]
    if several:
        said.append(f"The code of these classes had several versions: {', '.join(several)}.")
    return said


def _version(environment: Mapping[str, Any]) -> str:
    packages, commit = environment.get("packages"), environment["commit"]
    release = packages.get("ksana-jax") if isinstance(packages, Mapping) else None
    if commit is None:
        return str(release)
    return f"{str(commit)[:8]}" + " with uncommitted changes" * (environment.get("dirty") is True)

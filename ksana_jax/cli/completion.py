"""Words that a shell completes after `ksana --install-completion`: names of what ships, and keys of experiments."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable

from ksana_jax.core import shipped
from ksana_jax.core.sources.catalogue import FETCHABLE


def experiments(incomplete: str) -> list[str]:
    """Returns shipped experiments, and the YAML files and folders that the word may become."""
    paths = glob.glob(f"{glob.escape(incomplete)}*")
    files = [path + os.sep * os.path.isdir(path) for path in paths if os.path.isdir(path) or path.endswith(".yaml")]
    return [*_beginning(incomplete, shipped.experiments()), *sorted(files)]


def models(incomplete: str) -> list[str]:
    return _beginning(incomplete, [*shipped.model_names(), *(name for name in FETCHABLE if FETCHABLE[name].is_model)])


def papers(incomplete: str) -> list[str]:
    return _beginning(incomplete, shipped.papers())


def overrides(incomplete: str) -> list[str]:
    """Returns the keys of an experiment with "=", of settings those of all tasks."""
    if shipped.CONFIGS is None:
        return []
    # The file is read in milliseconds; importing all that it is made from takes seconds.
    schema = json.loads((shipped.CONFIGS / "experiment.schema.json").read_text(encoding="utf-8"))
    grids = [schema["properties"]["grid"], *(task["then"]["properties"]["grid"] for task in schema["allOf"])]
    keys = {*schema["properties"], *(key for grid in grids for key in grid["properties"])}
    return _beginning(incomplete, sorted(f"{key}=" for key in keys))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]

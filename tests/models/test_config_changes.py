"""Each field of a config that changes what transformers computes is read, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.models.families import FAMILIES, config_from_hf

FOUND = json.loads((Path(__file__).parents[1] / "golden" / "config_changes.json").read_text())


def with_change(values: dict[str, Any], path: list[str], other: Any) -> dict[str, Any]:
    name, *rest = path
    return values | {name: with_change(values[name], rest, other) if rest else other}


def test_every_family_of_transformers_is_compared():
    assert FOUND.keys() == FAMILIES.keys() - {"llama_sinks", "llama_cla"}  # this project's own


@pytest.mark.parametrize("family", FOUND)
def test_a_field_that_changes_the_result_is_read_or_refused_by_name(family):
    values, changes = FOUND[family]["config"], FOUND[family]["changes"]
    config, ignored = config_from_hf(values), []
    assert len(changes) > 10
    for path, other in changes:
        try:
            if config_from_hf(with_change(values, path, other)) == config:
                ignored.append((path, other))
        except ConfigError as error:
            if path[-1] not in str(error):
                ignored.append((path, other, str(error)))
    assert not ignored

"""The table in docs/reference/eviction.md has the methods' defaults, and kvpress 0.5.5's."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from ksana_jax.kv.eviction import EVICTION_METHODS, read_eviction
from ksana_jax.kv.eviction.base import EvictionMethod
from tests.golden.kvpress_cases import kvpress_defaults

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "eviction.md"
BASE = {field.name: field.default for field in dataclasses.fields(EvictionMethod)}


def table() -> list[list[str]]:
    """Rows of method, default, authors, kvpress, reason."""
    lines = PAGE.read_text(encoding="utf-8").split("## Defaults")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return rows[1:]


ROWS = table()


def values(cell: str) -> dict:
    """`name: value` in a cell, as in YAML."""
    found = re.findall(r"`(\w+: [^`]*)`", cell)
    return {name: value for text in found for name, value in yaml.safe_load(text).items()}


def method_of(row: list[str]) -> EvictionMethod:
    name, *more = re.findall(r"`([^`]*)`", row[0])
    given = {"of": {"method": more[0]}} if " of " in row[0] else values(row[0])
    found = read_eviction({"method": name} | given)
    assert found is not None and len(more) <= 1
    return found


def test_every_method_has_a_row():
    assert {re.findall(r"`([^`]*)`", row[0])[0] for row in ROWS[1:]} == set(EVICTION_METHODS)
    assert ROWS[0][0] == "all"


def test_what_all_methods_have_is_in_the_first_row():
    assert values(ROWS[0][1]) == {name: value for name, value in BASE.items() if name not in ("sinks", "recent")}


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row[0])
def test_the_defaults_of_a_method_are_in_its_row(row):
    # `future` of the oracle is no setting: it is computed from a text. `of` and `decode` are in the first cell.
    method, given = method_of(row), {"of", "decode", *values(row[0])}
    defaults = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.compare}
    changed = defaults.keys() - given
    own = {name: defaults[name] for name in changed if name not in BASE or defaults[name] != BASE[name]}
    always = ("sinks", "recent", "beta") if method_of(row).layers == "pyramid" else ("sinks", "recent")
    assert values(row[1]) == own | {name: defaults[name] for name in always}


def test_the_defaults_of_kvpress_are_those_of_its_classes():
    found = {}
    for row in ROWS[1:]:
        if presses := re.findall(r"`(\w+Press)`", row[3]):
            [press] = presses
            found[press] = values(ROWS[0][3]) | values(row[3])
        else:
            assert row[3] == "none"
    assert found == kvpress_defaults()

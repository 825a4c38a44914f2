"""docs/reference/accelerator.md has what the programs that wrote it find."""

import re
from pathlib import Path

import jax
import pytest

from ksana_jax.lab.device_check.checks import GROUPS
from tests.loopback.page import _HEAD
from tests.loopback.withheld import ENDS, RUNS, RUNS_WITH_RBG, engine_operations
from tests.machine import loopback_plugin

OPERATION = r"^\| `(stablehlo\.\w+)` \| (.*?) \| .*? \| .*? \|$"
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "accelerator.md").read_text()


def test_the_page_has_the_text_and_all_groups_of_a_report():
    assert PAGE.startswith(_HEAD), "print it with tests.loopback.page"
    assert re.findall(r"^(\w+)$", PAGE.partition("```text")[2], re.M) == [*GROUPS]
    assert PAGE.removeprefix(_HEAD).count("The engine's tokens are the CPU's.") == 1


def test_what_is_withheld_leaves_the_engine_running_or_is_named():
    rows = re.findall(r"^\| `(stablehlo\.\w+|dynamic while)` \| .*? \| (.*?) \| (.*?) \|$", PAGE, re.M)
    assert len(rows) > 40
    assert {cell for _, *cells in rows for cell in cells} == {"refused", RUNS, RUNS_WITH_RBG}
    assert ("dynamic while", RUNS, RUNS) in rows and ("stablehlo.case", RUNS, RUNS) in rows
    rows = re.findall(r"^\| (.*?) \| (`\w+`(?:, `\w+`)*) \|$", PAGE, re.M)
    functions = [(name, said) for said, names in rows for name in re.findall(r"\w+", names)]
    assert len(functions) >= 60
    # Of three about memories, jaxlib finds the result wrong, and does not say which function gave it.
    unnamed = {"Buffer_Memory", "Client_AddressableMemories", "Device_AddressableMemories"}
    known = {RUNS, "an error names it", f"{ENDS}; jaxlib names it"}
    assert {name for name, said in functions if said not in known} == unnamed


@loopback_plugin
@pytest.mark.soak
def test_the_operations_are_those_of_the_engines_programs():
    if f"(jax {jax.__version__})" not in PAGE:  # each jax lowers to other operations
        pytest.skip("the page is of another version of jax")
    found = {name: ", ".join(types) for name, types in engine_operations().items() if name.startswith("stablehlo.")}
    assert dict(re.findall(OPERATION, PAGE, re.M)) == found

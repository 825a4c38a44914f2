"""docs/new-accelerator.md has what the programs that wrote it find."""

import re
from pathlib import Path

import jax
import pytest

from ksana_jax.probe.page import _HEAD
from ksana_jax.probe.report import NAMES, TOKENS
from ksana_jax.probe.stablehlo import engine_operations

PAGE = (Path(__file__).parents[2] / "docs" / "new-accelerator.md").read_text()


def test_the_page_has_the_text_and_all_groups_of_both_devices():
    assert PAGE.startswith(_HEAD), "python -m ksana_jax.probe.page > docs/new-accelerator.md"
    assert re.findall(r"^### (\w+)$", PAGE, re.M) == [*NAMES, TOKENS] * 2
    assert PAGE.count("The engine's tokens are the CPU's.") == 2


@pytest.mark.soak
def test_the_operations_are_those_of_the_engines_programs():
    if f"(jax {jax.__version__})" not in PAGE:  # each jax lowers to other operations
        pytest.skip("the page is of another version of jax")
    found = {name: ", ".join(types) for name, types in engine_operations().items() if name.startswith("stablehlo.")}
    assert dict(re.findall(r"^\| `(stablehlo\.\w+)` \| (.*?) \|$", PAGE, re.M)) == found

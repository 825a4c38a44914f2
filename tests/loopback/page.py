"""Prints docs/reference/accelerator.md: `python -m tests.loopback.page PLUGIN.so`.

The plugin is the one of the page, which `make plugin` fetches.
"""

from __future__ import annotations

import sys

import jax

from ksana_jax.lab.device_check.report import probe
from tests.loopback.operations import DYNAMIC_WHILE
from tests.loopback.withheld import ENDS, called_functions, engine_operations, without
from tests.loopback.wrapper import FUNCTIONS

_HEAD = """# What the engine needs of a device

`python -m tests.loopback.page PLUGIN.so` prints this page.
[new-accelerator.md](../extend/new-accelerator.md) brings a device up; `ksana doctor --device` prints the report below.
"""


def _operation(name: str, types: str, found: dict[str, str]) -> str:
    """Returns the row of an operation that was withheld."""
    refused = f"failed to legalize operation '{name}'"
    return _row(f"`{name}`", types, *("refused" if refused in said else said for said in found.values()))


def _functions(found: dict[str, dict[str, str]]) -> list[str]:
    """Returns a row for each outcome, with the functions that were withheld."""
    by_outcome: dict[str, list[str]] = {}
    for name, said in found.items():
        outcome = "; ".join(dict.fromkeys(_short(name, text) for text in said.values()))
        by_outcome.setdefault(outcome, []).append(f"`{name}`")
    return [_row(outcome, ", ".join(names)) for outcome, names in by_outcome.items()]


def _short(name: str, said: str) -> str:
    if f"PJRT_{name} is not implemented" not in said:
        return said
    return f"{ENDS}; jaxlib names it" if said.startswith(ENDS) else "an error names it"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(plugin: str) -> str:
    """Returns the page: its text, the engine's requirements, and a device's report; takes some minutes.

    Args:
      plugin: path of OpenXLA's CPU plugin.
    """
    functions = called_functions()
    operations = {name: types for name, types in engine_operations().items() if name.startswith("stablehlo.")}
    refused = without("lacks_operations", [*operations, DYNAMIC_WHILE])
    lines = [_HEAD, "## Operations of StableHLO that the engine needs", ""]
    lines += [
        f"All programs of `ksana-tiny` in bfloat16, greedy, sampled and beam search (jax {jax.__version__}), need",
        f"{len(operations)} operations and no custom call. Where the compiler refuses one, requests run with the same",
        "tokens, or end with one line that names it (refused). `dynamic while` is a `stablehlo.while` whose number of",
        "turns varies.",
        "",
        "| operation | element types | greedy without it | sampled without it |",
        "|---|---|---|---|",
        *(_operation(name, ", ".join(types), refused[name]) for name, types in operations.items()),
        _operation(DYNAMIC_WHILE, "any", refused[DYNAMIC_WHILE]),
        "",
        "## Functions of the PJRT C API that the engine calls",
        "",
        f"The engine calls {len(functions)} of {len(FUNCTIONS)} through jaxlib (jax {jax.__version__}).",
        "Where one answers UNIMPLEMENTED:",
        "",
        "| without it | functions |",
        "|---|---|",
        *_functions(without("lacks", functions)),
        "",
    ]
    found = probe({"platform": "npu", "plugin": plugin}).text()
    lines += ["## `ksana doctor --device` on OpenXLA's CPU plugin", "", "```text", f"{found}```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(sys.argv[1]), end="")

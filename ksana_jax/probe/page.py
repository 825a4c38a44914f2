"""Writes docs/new-accelerator.md: `python -m ksana_jax.probe.page > docs/new-accelerator.md`."""

from __future__ import annotations

import jax

from ksana_jax.devices.loopback.abi import ARGUMENTS
from ksana_jax.devices.loopback.operations import DYNAMIC_WHILE
from ksana_jax.probe.report import probe
from ksana_jax.probe.stablehlo import DEVICE, engine_operations
from ksana_jax.probe.withheld import ENDS, without_functions, without_operations_in_a_process

_HEAD = """# Bringing up a new accelerator

The engine runs on any device that jax has a PJRT plugin for. This page is for whoever brings the plugin.

1. **Register it.** A package with an entry point of the group `jax_plugins`, a module in the namespace package
   `jax_plugins`, or `PJRT_NAMES_AND_LIBRARY_PATHS=npu:/path/to/plugin.so`: then `device: npu` finds it. A library
   without a package works too: `device: {platform: npu, plugin: /path/to/plugin.so, options: {...}}`. In Python,
   `LLM(..., device={"platform": "npu"})`; on the command line, `--device npu`, and `engine.device=npu` for
   experiments.
2. **Try it out.** `ksana doctor --device npu` runs ten groups of checks, each in a process of its own with a time
   limit, because plugins abort and hang where they lack something. It says what works, what is missing, and what the
   engine does without it, and ends with tokens of `ksana-tiny` compared with the CPU's. `--json` prints it for a
   script.
3. **Allow donation.** jax donates arrays only to the platforms in a list of its own. `device: {platform: npu,
   donation: true}` is your word that the plugin supports it; the checks try it. Without it, a step has the pool
   twice, and the engine plans so.
4. **Say how much memory there is**, if the plugin does not: `device: {platform: npu, memory_bytes: 68719476736}`.
5. **Say what programs may be made of**, if trying it is dangerous: on a platform that it does not know, the engine
   compiles a loop of dynamic length, a branch and threefry, and does without what fails: `device: {platform: npu,
   features: {dynamic_loops: false, branches: false, generator: rbg}}` says so without trying. Loops of constant
   length then read whole block tables, however short the texts are. Sampled tokens depend on a request's seed and
   the position alone: with `threefry` they are the same on all devices, up to the rounding of scores; with `rbg`,
   which takes over where threefry's bits are wrong or cannot be computed, they are those of the device's own
   generator, and repeat on devices of that kind only.
6. **Bring kernels as a package.** An entry point of the group `ksana_jax.attention` adds an implementation of
   attention to those that the engine chooses from: see `ksana_jax.ops.implementations.Implementation`.

## Without a device

`device: {platform: npu, plugin: loopback}` takes a plugin that ships with the package: jaxlib's CPU client behind the
PJRT C API. It plays a device with `options`: `num_devices`, `memory_bytes`, `pinned_host`, `lacks` (functions of the
PJRT C API that answer UNIMPLEMENTED, and `donation`) and `lacks_operations` (operations that no program may have).
Its devices have "loopback" in their kind, so that no record passes for a measurement of an accelerator. It shows that
discovery, options, errors, limits and missing functions are handled, and that the engine assumes neither a CPU nor a
GPU. It shows nothing of a vendor's compiler, numbers or speed: arrays are computed by XLA for CPUs, and every event
has happened when it is handed out.
"""


def _operation(name: str, types: str, found: dict[str, str]) -> str:
    """Returns the row of an operation that was withheld."""
    refused = f"failed to legalize operation '{name}'"
    cells = ("refused" if refused in said else said for said in found.values())
    return _row(f"`{name}`", types, *cells)


def _function(name: str, found: dict[str, str]) -> str:
    """Returns the row of a function that was withheld."""

    def short(said: str) -> str:
        if f"PJRT_{name} is not implemented" not in said:
            return said
        return f"{ENDS}; jaxlib names it" if said.startswith(ENDS) else "an error names it"

    return _row(f"`{name}`", "; ".join(dict.fromkeys(short(said) for said in found.values())))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """Returns the page: its text, what the engine needs, and the reports of two devices; takes some minutes."""
    functions = without_functions()
    operations = {name: types for name, types in engine_operations().items() if name.startswith("stablehlo.")}
    without = without_operations_in_a_process([*operations, DYNAMIC_WHILE])
    lines = [_HEAD, "## Operations of StableHLO that the engine needs", ""]
    lines += [
        "Those of all programs of `ksana-tiny` in bfloat16, with greedy, sampled and beam search "
        f"(jax {jax.__version__}): {len(operations)},",
        "without a custom call. The last two columns say what becomes of greedy and of sampled requests where the",
        "compiler refuses the operation: they run, with the same tokens, or end with one line that names it (refused).",
        "`dynamic while` are those of `stablehlo.while` whose number of turns is no constant of the program.",
        "",
        "| operation | element types | greedy without it | sampled without it |",
        "|---|---|---|---|",
        *(_operation(name, ", ".join(types), without[name]) for name, types in operations.items()),
        _operation(DYNAMIC_WHILE, "any", without[DYNAMIC_WHILE]),
        "",
        "## Functions of the PJRT C API that the engine calls",
        "",
        f"Through jaxlib, {len(functions)} of {len(ARGUMENTS)} (jax {jax.__version__}, one device), and what becomes",
        "of requests where a function answers UNIMPLEMENTED.",
        "",
        "| function | without it |",
        "|---|---|",
        *(_function(name, found) for name, found in functions.items()),
        "",
    ]
    for name, device in {"the loopback": DEVICE, "a CPU": {"platform": "cpu"}}.items():
        lines += [f"## `ksana doctor --device` on {name}", "", probe(device).markdown()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")

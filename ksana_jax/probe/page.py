"""Writes docs/new-accelerator.md: `python -m ksana_jax.probe.page > docs/new-accelerator.md`."""

from __future__ import annotations

import jax

from ksana_jax.probe.report import probe
from ksana_jax.probe.stablehlo import DEVICE, engine_operations

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
5. **Bring kernels as a package.** An entry point of the group `ksana_jax.attention` adds an implementation of
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


def page() -> str:
    """Returns the page: its text, the operations of the engine's programs, and the reports of two devices."""
    operations = {name: types for name, types in engine_operations().items() if name.startswith("stablehlo.")}
    lines = [_HEAD, "## Operations of StableHLO that the engine needs", ""]
    lines += [
        "Those of all programs of `ksana-tiny` in bfloat16, with greedy, sampled and beam search "
        f"(jax {jax.__version__}):",
        f"{len(operations)}, without a custom call. Some loops (`stablehlo.while`) have a dynamic length.",
        "",
        "| operation | element types |",
        "|---|---|",
        *(f"| `{name}` | {', '.join(types)} |" for name, types in operations.items()),
        "",
    ]
    for name, device in {"the loopback": DEVICE, "a CPU": {"platform": "cpu"}}.items():
        lines += [f"## `ksana doctor --device` on {name}", "", probe(device).markdown()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")

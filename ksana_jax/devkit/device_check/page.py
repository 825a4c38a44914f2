"""Writes docs/new-accelerator.md: `python -m ksana_jax.devkit.device_check.page PLUGIN.so > docs/new-accelerator.md`.

The plugin is the one of the page, which `make plugin` fetches.
"""

from __future__ import annotations

import sys

import jax

from ksana_jax.devices.loopback.abi import ARGUMENTS
from ksana_jax.devices.loopback.operations import DYNAMIC_WHILE
from ksana_jax.devkit.device_check.report import probe
from ksana_jax.devkit.device_check.stablehlo import engine_operations
from ksana_jax.devkit.device_check.withheld import ENDS, without_functions, without_operations_in_a_process

_HEAD = """# Bringing up a new accelerator

The engine runs on any device that jax has a PJRT plugin for. This page is for plugin authors.

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
   attention to those that the engine chooses from: see `ksana_jax.ops.implementations.Implementation`. It calls C++
   by `jax.ffi`, registered with `platform="npu"`: the engine has jaxlib pass that on to the FFI extension of the
   plugin's PJRT C API. The engine's own C++ operators take the same way, onto any device that computes on the host's
   memory.

A device is the backend that jax has registered: the plugin may give its client, its devices and their kind any name.

## Every step without hardware

OpenXLA's own CPU plugin is somebody else's compiled code behind the real C API. The package `lammps-jax-pjrt-cpu`
(Apache-2.0, Linux on x86-64) has it as a library that runs programs of jax 0.11.2 or older; `make plugin` fetches it
for the tests. Here it plays the new accelerator, on a machine with two cores and jax 0.10.2.

Get the library, and try it out; the report is further down.

```console
$ pip download --no-deps lammps-jax-pjrt-cpu==0.11.2
$ python -m zipfile -e lammps_jax_pjrt_cpu-0.11.2-*.whl plugin
$ export NPU=plugin/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so
$ ksana doctor --device "{platform: npu, plugin: $NPU}"
identity
          platform: npu (cpu), 4 devices, whose client calls itself cpu
...
The engine's tokens are the CPU's.
```

Generate with it, by the path of the library or, if jax is told of it, by its name. jax warns that it has not met the
platform.

```console
$ ksana generate ksana-tiny --prompt "def main(" --max-tokens 24 --device "{platform: npu, plugin: $NPU}"
$ export PJRT_NAMES_AND_LIBRARY_PATHS=npu:$NPU
$ ksana generate ksana-tiny --prompt "def main(" --max-tokens 24 --device npu
```

Show the implementations of each operator there. The plugin takes custom calls and computes on the host's memory, so the
C++ operators serve it; without its FFI extension, this table would say so, and name XLA's.

```console
$ JAX_PLATFORMS=npu,cpu ksana doctor
device     4 x cpu (npu), 2 cores
...
 attention   native           yes    runs on a CPU and a C++ compiler
...
```

Say of it what cannot be tried, as steps 3 to 5 do. Here donation works without being asked for, because jax's list has
names that clients give themselves, and this one calls itself "cpu". Without it, the plan has the pool twice:

```console
$ ksana generate ksana-tiny --prompt "def main(" --device "{platform: npu, plugin: $NPU, donation: false}"
$ ksana generate ksana-tiny --prompt "def main(" --device "{platform: npu, plugin: $NPU, features: {branches: false}}"
```

Run an experiment, and compare its table with a CPU's: perplexities agree to rounding.

```console
$ ksana run quickstart --out runs/npu engine.device="{platform: npu, plugin: $NPU}"
$ ksana run quickstart --out runs/cpu engine.device=cpu
```

Call C++ of your own, such as this function in `own.cc`:

```c++
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

ffi::Error Double(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}

using Array = ffi::Buffer<ffi::F32>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(own_double, Double, ffi::Ffi::Bind().Arg<Array>().Ret<Array>());
```

```console
$ g++ -std=c++17 -O2 -fPIC -shared -isystem $(python -c 'import jax; print(jax.ffi.include_dir())') own.cc -o own.so
```

```python
import ctypes
import os

import sys

import jax
import jax.numpy as jnp

from ksana_jax.devices.starting import use_device

library = ctypes.CDLL("./own.so")
use_device({"platform": "npu", "plugin": os.environ["NPU"]})
jax.ffi.register_ffi_target("own_double", jax.ffi.pycapsule(library.own_double), platform="npu")
x = jnp.arange(4.0)
double = jax.ffi.ffi_call("own_double", jax.ShapeDtypeStruct(x.shape, x.dtype))
print(jax.jit(double)(x))  # [0. 2. 4. 6.]
```

In a checkout, `make test ARGS="--device=plugin tests/engine tests/kv tests/sampling"` runs the engine's tests on it.

## Withholding functions and operations

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


def page(plugin: str) -> str:
    """Returns the page: its text, what the engine needs, and the reports of two devices; takes some minutes.

    Args:
      plugin: path of OpenXLA's CPU plugin.
    """
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
    return "\n".join([*lines, *reports(plugin)])


def reports(plugin: str) -> list[str]:
    """Returns the reports of OpenXLA's CPU plugin and of a CPU."""
    devices = {"OpenXLA's CPU plugin": {"platform": "npu", "plugin": plugin}, "a CPU": {"platform": "cpu"}}
    return [
        line
        for name, device in devices.items()
        for line in (f"## `ksana doctor --device` on {name}", "", probe(device).markdown())
    ]


if __name__ == "__main__":
    print(page(sys.argv[1]), end="")

"""Compiles for a GPU on a machine without one. Knows descriptions of chips, no kernels.

XLA queries the GPU before it compiles; here a file answers instead. The plugin is the real one, so the output is
what the chip would run: machine code, registers, memory. Only measurements on the chip are missing: XLA chooses
its own matrix products without timing them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import shutil
from pathlib import Path

EXTRA = "aot-gpu"
PLUGIN = "jax-cuda13-plugin"
_FOLDER = Path(__file__).parent / "targets"


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Args:
      name: of its file in `targets`.
      arch: as ptxas calls it: sm_90a.
      num_cores: multiprocessors.
      shared_bytes: shared memory that one block of threads can have. memory_bytes: of the device.
      description: text of the file, an xla GpuTargetConfigProto.
    """

    name: str
    device: str
    arch: str
    num_cores: int
    shared_bytes: int
    memory_bytes: int
    description: str = dataclasses.field(repr=False)

    @property
    def hopper(self) -> bool:
        return self.arch == "sm_90a"


def targets() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.txtpb"))


def target(name: str) -> Target:
    """Returns a target by name.

    Raises:
      ValueError: no target has that name.
    """
    if name not in targets():
        raise ValueError(f"unknown target {name!r}; there are {', '.join(targets())}")
    text = (_FOLDER / f"{name}.txtpb").read_text()

    def number(key: str, text: str = text) -> int:
        found = re.search(rf"\b{key}: (\d+)", text)
        return int(found.group(1)) if found else 0

    capability = re.findall(r"cuda_compute_capability \{(.*)\}", text)[0]
    special = "a" if "ACCELERATED_FEATURES" in capability else ""
    return Target(
        name,
        device=re.findall(r'^  name: "(.*)"', text, re.MULTILINE)[0],
        arch=f"sm_{number('major', capability)}{number('minor', capability)}{special}",
        num_cores=number("core_count"),
        shared_bytes=number("shared_memory_per_block_optin"),
        memory_bytes=number("device_memory_size"),
        description=text,
    )


def missing() -> str | None:
    """Returns why this machine cannot compile for a GPU, with the command to install; None if it can."""
    install = f"; install the extra: pip install 'ksana-jax[{EXTRA}]'"
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return f"compiling for a GPU needs {PLUGIN}{install}"
    plugin, jaxlib = importlib.metadata.version(PLUGIN), importlib.metadata.version("jaxlib")
    if plugin != jaxlib:
        return f"{PLUGIN} is {plugin} and jaxlib {jaxlib}, they must be equal{install}"
    return None if find_ptxas() else f"the report needs ptxas, of nvidia-cuda-nvcc{install}"


def find_ptxas() -> str | None:
    """Returns the path of ptxas: from the package nvidia-cuda-nvcc, or another on the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(path)
    return shutil.which("ptxas")


@functools.cache
def devices(target: Target, number: int):
    """Returns jax devices that represent targets of one host for compilation; they hold no arrays."""
    from jax.experimental import topologies

    described_by = {"target_config": target.description, "topology": f"1x1x{number}"}
    return tuple(topologies.get_topology_desc("", platform="cuda", **described_by).devices)


def device(target: Target):
    """Returns the device of `devices`, if any."""
    return devices(target, 1)[0]


def placed(target: Target, arrays):
    """Returns the shapes of a tree of arrays, placed on the target, so functions are lowered for it."""
    import jax

    there = jax.sharding.SingleDeviceSharding(device(target))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arrays)


def described(target: Target):
    """Returns a context in which jax lowers for the target, not its own GPU. jax 0.10.2 takes any GPU for a Hopper."""
    import jax

    try:
        device = jax.sharding.AbstractDevice(device_kind=target.device, num_cores=None, platform="cuda")
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    except (AttributeError, TypeError):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def lower(target: Target, function, *args, donate_argnums=()):
    """Lowers a function for the target.

    Args:
      args: trees of arrays or of jax.ShapeDtypeStruct.
    """
    import jax

    with described(target):
        traced = jax.jit(function, donate_argnums=donate_argnums).trace(*placed(target, args))
        return traced.lower(lowering_platforms=("cuda",))

"""Imports go one way: no circle, no arrow upward, no jax in the host half. Imports for type checkers count too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up: a room (a package, or a module at the top) imports rooms that stand before it.
LEAVES = "errors refusals units lazy checks plugins files folder_lock forks interrupts processor compilation_cache"
LEAVES += " gguf_file metrics dtypes cluster"
# The setting is read without jax; starting it is not.
DEVICES = "devices hosts"
ASKED_FOR = "vllm_names shipped sources"
ASKED_FOR += " patterns pattern_presets layer_spec operator_settings config request tokenizers recall"
TRAFFIC = "workload router"
HOST_HALF = "kv sequence step speculative scheduler"
DEVICE_HALF = "native models ops sampling parallel runner loading"
ENGINE = "planner draft_models engine"
AROUND_IT = "simulator probe inspect compile_check training"
FRONT = "ksana_jax evaluation server proxy experiments bench trace align vllm_flags cli extend __main__"
ROOMS = " ".join((LEAVES, DEVICES, ASKED_FOR, TRAFFIC, HOST_HALF, DEVICE_HALF, ENGINE, AROUND_IT, FRONT)).split()


def modules(package: str) -> dict[str, Path]:
    """Files of a package by module name; packages by their own."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


OURS = modules("ksana_jax")
KERNELS = modules("pallas_kernels")
FILES = OURS | KERNELS


def imports(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative imports are not followed here"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return found


IMPORTS = {module: imports(path) for module, path in FILES.items()}
ARROWS = {module: (names & set(FILES)) - {module} for module, names in IMPORTS.items()}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A path from a node back to itself; empty where there is none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for other in sorted(graph.get(node, ())):
                if found := search(other, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := search(node, []))), [])


def test_no_module_imports_itself_through_others():
    assert not (found := circle(ARROWS)), " -> ".join(found)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == ["b", "d", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_every_room_has_a_place_in_the_order():
    rooms = {room_of(module) for module in OURS}
    assert not (rooms - set(ROOMS)), f"give {sorted(rooms - set(ROOMS))} a place in ROOMS"
    assert not (set(ROOMS) - rooms), f"{sorted(set(ROOMS) - rooms)} are gone"


def test_a_room_imports_only_rooms_below_it():
    level = {module: ROOMS.index(room_of(module)) for module in OURS}
    pairs = [(module, other) for module in OURS for other in ARROWS[module] if other in OURS]
    wrong = sorted(f"{module} imports {other}" for module, other in pairs if level[module] < level[other])
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize(
    "room", [*LEAVES.split(), *ASKED_FOR.split(), *TRAFFIC.split(), *HOST_HALF.split(), "simulator"]
)
def test_nothing_below_the_device_half_imports_jax(room):
    # compilation_cache sets jax's options, and does so only when it is called.
    users = [m for m in OURS if room_of(m) == room and any(n.split(".")[0] in ("jax", "jaxlib") for n in IMPORTS[m])]
    assert users == (["ksana_jax.compilation_cache"] if room == "compilation_cache" else [])


def test_the_setting_of_a_device_is_read_without_jax():
    setting = ["devices", "devices.target", "devices.loopback", "devices.loopback.options", "devices.loopback.abi"]
    modules = [f"ksana_jax.{name}" for name in setting]
    assert not [m for m in modules if any(n.split(".")[0] in ("jax", "jaxlib") for n in IMPORTS[m])]
    assert (
        not set().union(*(ARROWS[m] for m in modules)) - set(modules) - {f"ksana_jax.{name}" for name in LEAVES.split()}
    )


def test_the_proxy_starts_servers_from_a_process_without_jax():
    code = "import sys, ksana_jax.proxy.running, ksana_jax.proxy.spawning; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_kernels_import_jax_and_nothing_of_ours():
    allowed = {"pallas_kernels", "jax", "jaxlib", "numpy", "ml_dtypes"} | sys.stdlib_module_names
    wrong = {m: used for m in KERNELS if (used := {n.split(".")[0] for n in IMPORTS[m]} - allowed)}
    assert not wrong

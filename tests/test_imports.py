"""Imports go one way: no circle, no arrow upward, no jax in the host half. Imports for type checkers count too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up: a package (or a module at the top) imports packages that stand before it. INSIDE has the order
# of packages inside a package.
HOST_HALF = "tokenizers kv scheduler methods"
DEVICE_HALF = "native models ops sampling sharding loading runner"
PACKAGES = f"core devices {HOST_HALF} {DEVICE_HALF} engine ksana_jax serve lab extend cli __main__".split()
INSIDE = {
    "serve": "workload server router on_ray_serve".split(),
    "lab": "device_check recording recall simulator evaluation".split() + "runs calibration bench trace align".split(),
}


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


def package_of(module: str) -> str:
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


def test_every_package_has_a_place_in_the_order():
    packages = {package_of(module) for module in OURS}
    assert not (packages - set(PACKAGES)), f"give {sorted(packages - set(PACKAGES))} a place in PACKAGES"
    assert not (set(PACKAGES) - packages), f"{sorted(set(PACKAGES) - packages)} are gone"


def test_a_package_imports_only_packages_below_it():
    level = {module: PACKAGES.index(package_of(module)) for module in OURS}
    pairs = [(module, other) for module in OURS for other in ARROWS[module] if other in OURS]
    wrong = sorted(f"{module} imports {other}" for module, other in pairs if level[module] < level[other])
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("package", INSIDE)
def test_a_subpackage_imports_only_subpackages_below_it(package):
    inner = {m: m.split(".")[2] for m in OURS if package_of(m) == package and m.count(".") > 1}
    assert set(inner.values()) == set(INSIDE[package])
    pairs = [(module, other) for module in inner for other in ARROWS[module] if other in inner]
    order = INSIDE[package].index
    assert not [(m, other) for m, other in pairs if order(inner[m]) < order(inner[other])]


@pytest.mark.parametrize(
    "package", ["core", *HOST_HALF.split(), "serve.workload", "serve.router", "lab.recall", "lab.simulator"]
)
def test_nothing_in_the_host_half_imports_jax(package):
    inside = [m for m in OURS if f"{m}.".startswith(f"ksana_jax.{package}.")]
    users = [m for m in inside if any(n.split(".")[0] in ("jax", "jaxlib") for n in IMPORTS[m])]
    # compilation_cache sets jax's options, and does so only when it is called.
    assert users == (["ksana_jax.core.compilation_cache"] if package == "core" else [])


def test_only_the_server_imports_pydantic():
    users = {
        module for module in OURS if {name.split(".")[0] for name in IMPORTS[module]} & {"pydantic", "pydantic_core"}
    }
    assert users and all(module.startswith("ksana_jax.serve.server.") for module in users)


def test_the_proxy_starts_servers_from_a_process_without_jax():
    code = "import sys\nfrom ksana_jax.serve.router.proxy import running, spawning\nsys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_kernels_import_jax_and_nothing_of_ours():
    allowed = {"pallas_kernels", "jax", "jaxlib", "numpy", "ml_dtypes"} | sys.stdlib_module_names
    wrong = {m: used for m in KERNELS if (used := {n.split(".")[0] for n in IMPORTS[m]} - allowed)}
    assert not wrong

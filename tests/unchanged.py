"""Long tests that no changed file can affect: `pytest --changed` leaves them out.

A test file depends on what it and the fixtures that it names import, on what that imports, and so on. Modules that
strings name count too, as registries import them. A changed file that is not Python may affect every test.
"""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG = ("tests/ops", "tests/pallas_kernels", "tests/serve/router/test_fluid.py")
DATA = ("ksana_jax/", "pallas_kernels/", "tests/", "configs/", "constraints.txt", "pyproject.toml")


def changed_files() -> list[str] | None:
    """Files that differ from the commit of .ci/speed.base, new ones too; None where git or that commit is missing."""
    base = (ROOT / ".ci/speed.base").read_text().strip()
    found = []
    for command in (["diff", "--name-only", "--no-renames", base], ["ls-files", "--others", "--exclude-standard"]):
        try:
            done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        found += done.stdout.splitlines()
    return found


def unchanged(files: list[str] | None) -> list[str]:
    """Test files to leave out; none where it is not known what has changed."""
    if files is None or any(f.startswith(DATA) and not f.endswith((".py", ".md")) for f in files):
        return []
    changed = {ROOT / name for name in files}
    tests = [test for name in LONG for test in sorted((ROOT / name).rglob("test_*.py")) or [ROOT / name]]
    return [str(test.relative_to(ROOT)) for test in tests if changed.isdisjoint(dependencies(test))]


def dependencies(test: Path) -> Iterator[Path]:
    """Files of this repository whose code may run in a test."""
    text, found, todo = test.read_text(), set(), [test]
    for conftest in (ROOT / folder / "conftest.py" for folder in test.relative_to(ROOT).parents):
        if conftest.is_file():
            yield conftest
            for node in ast.parse(conftest.read_text()).body:
                if not isinstance(node, ast.FunctionDef) or re.search(rf"\b{node.name}\b", text):
                    todo += _used(node)
    while todo:
        if (path := todo.pop()) not in found:
            yield path
            found.add(path)
            todo += _named_in(path, strings=not _is_lazy(path))


@functools.cache
def _named_in(path: Path, strings: bool) -> list[Path]:
    return list(_used(ast.parse(path.read_text()), strings))


@functools.cache
def _is_lazy(path: Path) -> bool:
    """Whether a module's strings name modules that it imports only when asked for their names (`core.lazy`)."""
    return "lazy_names(__name__" in path.read_text()


def _used(node: ast.AST, strings: bool = True) -> Iterator[Path]:
    """Files of modules that code imports, except for type checkers, and that its strings name."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            yield from (paths := _modules(package + alias.name))
            if paths and _is_lazy(paths[-1]):
                yield from _named_in(paths[-1], strings=True)
    elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
        for name in re.findall(r"\w+(?:\.\w+)+", node.value):
            yield from _modules(name)
        if re.fullmatch(r"\w+(\.\w+)+\.?", node.value):  # a package, to which an f-string appends any of its modules
            yield from ROOT.joinpath(*node.value.split(".")).glob("*.py")
    elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from _used(child, strings)


@functools.cache
def _modules(name: str) -> list[Path]:
    """Files of a module and of the packages that it is in."""
    parts = name.split(".")
    bases = [ROOT.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    return [path for base in bases for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()]

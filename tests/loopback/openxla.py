"""A prebuilt PJRT plugin: OpenXLA's CPU client as a shared library, from the package lammps-jax-pjrt-cpu.

`make plugin` fetches it into .cache/; without it, tests on it are skipped.
"""

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

# Apache-2.0, Linux x86-64. Built from the XLA of the jaxlib of that version; it runs programs of that jax or older.
PACKAGE, NEWEST_JAX = "lammps-jax-pjrt-cpu==0.11.2", (0, 11, 2)
SHA256 = "1319390d948b39f69f7dade496b7c385149d9ca6097a6b62114da113216d9ad1"
LIBRARY = "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so"
PATH = Path(__file__).parents[2] / ".cache" / Path(LIBRARY).name
DEVICE = {"platform": "npu", "plugin": str(PATH)}
# Seconds that pip waits for an index that does not answer, and how often it asks again.
PATIENCE = ("--timeout", "10", "--retries", "1")


def why_unusable() -> str | None:
    """Returns why the plugin cannot run here, wherever it comes from, or None."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"it is for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if tuple(map(int, re.findall(r"\d+", version("jax"))[:3])) > NEWEST_JAX:
        return f"it runs programs of jax {'.'.join(map(str, NEWEST_JAX))} or older, this is {version('jax')}"
    return None


def why_missing() -> str | None:
    """Returns why there is no plugin for tests, or None."""
    return why_unusable() or (None if PATH.is_file() else "`make plugin` has not fetched it")


def fetch(package: str = PACKAGE, sha256: str = SHA256, path: Path = PATH) -> None:
    """Downloads the wheel with pip, which checks its sum, and takes the library out of it.

    Raises:
      RuntimeError: pip cannot download it, or its sum is another one.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{package} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *PATIENCE]
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--require-hashes", "-r", str(wanted), "-d", folder],
            capture_output=True,
            text=True,
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["no message"]
            raise RuntimeError(f"pip did not download {package}: {said[-1]}")
        library = zipfile.ZipFile(wheels[0]).read(LIBRARY)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(library)
    part.replace(path)


def main() -> None:
    reason = why_unusable()
    if reason is None and not PATH.is_file():
        print(f"== fetching a PJRT plugin for tests, {PACKAGE}: 62 MB")
        try:
            fetch()
        except (RuntimeError, OSError) as error:
            reason = str(error)
    if reason:
        print(f"== tests on a PJRT plugin are skipped: {reason}")


if __name__ == "__main__":
    main()

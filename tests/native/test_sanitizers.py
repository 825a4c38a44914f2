"""The native kernels, compiled with the compiler's sanitizers, in the tests of this folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax.native import build
from ksana_jax.native.compiler import compiler_command

NAMES = ("blocks", "kernel", "layer", "linear", "norm", "recurrent")
TESTS = [str(Path(__file__).with_name(f"test_{name}.py")) for name in NAMES]
RUN = """
import sys
import pytest
from ksana_jax.native import build
build.FLAGS += (f"-fsanitize={sys.argv[1]}", "-g", "-O1")
sys.exit(pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
# Only calls from our own library are checked: jax's is not compiled for it, so its locks are unknown.
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0"},
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"},
}
LIBRARIES = {"address": ("libasan.so", "libstdc++.so"), "thread": ("libtsan.so",)}


def of_compiler(library: str) -> Path:
    """Returns the path of one of the compiler's libraries; a bare name if it is missing."""
    asked = [*compiler_command(), f"-print-file-name={library}"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.soak
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    if reason := build.why_missing():
        pytest.skip(reason)  # test_build fails if there is a compiler
    libraries = [of_compiler(name) for name in LIBRARIES[sanitizer]]
    if missing := [path.name for path in libraries if not path.is_absolute()]:
        # They are packages of their own in some distributions.
        pytest.skip(f"the compiler has no {', '.join(missing)}")
    found = {"LD_PRELOAD": " ".join(map(str, libraries)), "XDG_CACHE_HOME": str(tmp_path)}
    # The thread sanitizer wants its memory at fixed addresses.
    command = ["setarch", "-R", sys.executable] if sanitizer == "thread" else [sys.executable]
    command += ["-c", RUN, sanitizer, *TESTS]
    done = subprocess.run(
        command, env=os.environ | OPTIONS[sanitizer] | found, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-9000:]
    assert " passed" in done.stdout
    assert "Sanitizer" not in done.stdout + done.stderr, done.stderr[-9000:]

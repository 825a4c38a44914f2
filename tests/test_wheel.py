"""A wheel that needs no compiler where it is installed."""

import os
import subprocess
import sys
import zipfile

import make_wheel as wheel
import pytest

from ksana_jax.native.prebuilt import LEVELS
from tests.machine import compiled

GENERATE = """
from ksana_jax import LLM, SamplingParams
from ksana_jax.native.build import library
llm = LLM("ksana-tiny", max_num_seqs=1, max_num_batched_tokens=32)
[output] = llm.generate("def", SamplingParams(max_tokens=1, temperature=0))
print(library(), llm.runner.implementation.name, llm.runner.products.name)
"""


@pytest.mark.soak
@compiled
def test_an_unpacked_wheel_computes_natively_without_a_compiler(tmp_path):
    built = wheel.build_wheel(tmp_path / "dist")
    assert built.name.startswith("ksana_jax-") and "-py3-none-manylinux_2_" in built.name
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    libraries = sorted((tmp_path / "site/ksana_jax/native/prebuilt").iterdir())
    assert {path.name.split("-")[0] for path in libraries} == {level.name for level in LEVELS}
    run = subprocess.run(
        [sys.executable, "-c", GENERATE],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "KSANA_HIDE": "compiler", "CXX": "/nowhere/c++"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    library, *operators = run.stdout.split()
    assert library in map(str, libraries) and operators == ["native", "packed"]

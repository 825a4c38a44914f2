"""Configurations and models that come with the package: found by name, in a checkout and in a wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax import shipped

ROOT = Path(__file__).parents[1]


def test_shipped_files_are_found_by_name_and_by_their_path_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart, sinks = ROOT / "configs" / "quickstart.yaml", ROOT / "configs" / "experiments" / "sink_window.yaml"
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        assert shipped.experiment_path(name) == quickstart
    assert shipped.experiment_path("sink_window") == sinks
    assert shipped.training_path("ksana_tiny") == ROOT / "configs" / "train" / "ksana_tiny.yaml"
    for name in ("bench-s", "configs/models/bench-s"):
        assert shipped.model_path(name) == ROOT / "configs" / "models" / "bench-s"
    assert (shipped.model_path("ksana-tiny") / "model.safetensors").is_file()
    assert {"quickstart", "sink_window"} <= set(shipped.experiment_names())
    assert {"ksana-tiny", "bench-s"} <= set(shipped.model_names())


def test_a_file_of_the_users_own_goes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("task: perplexity\n")
    Path("ksana-tiny").mkdir()
    assert shipped.experiment_path("quickstart") == Path("quickstart")
    assert shipped.model_path("ksana-tiny") == Path("ksana-tiny")


@pytest.mark.parametrize("name", ["nowhere", "configs/nowhere.yaml", "elsewhere/quickstart", "/quickstart"])
def test_what_is_not_shipped_stays_the_path_it_was(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.experiment_path(name) == Path(name)


def test_experiments_of_a_built_package_resolve_outside_the_repository(tmp_path):
    source, built = tmp_path / "source", tmp_path / "built"
    for name in ("ksana_jax", "pallas_kernels", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(build, cwd=source, check=True, capture_output=True, text=True, timeout=60)
    assert (built / "ksana_jax" / "py.typed").is_file()
    # Trials of prefix_cache name configs/models/bench-s, as from the repository's root.
    code = (
        "import ksana_jax.experiments.config as c, ksana_jax\n"
        "print(ksana_jax.__file__, *[c.load(n).name for n in ('quickstart', 'prefix_cache', 'host_embedding')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=built, env={**os.environ, "PYTHONPATH": str(built)}, check=True,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [
        str(built / "ksana_jax" / "__init__.py"), "quickstart", "prefix_cache", "host_embedding",
    ]  # fmt: skip

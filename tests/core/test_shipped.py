"""Configurations and models that come with the package: found by name, in a checkout and in a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ksana_jax.core import shipped
from ksana_jax.core.sources import model_path

ROOT = Path(__file__).parents[2]


def test_shipped_files_are_found_by_name_and_by_their_path_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart, sinks = ROOT / "configs" / "quickstart.yaml", ROOT / "configs" / "experiments" / "sink_window.yaml"
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        assert shipped.experiment_path(name) == quickstart
    assert shipped.experiment_path("sink_window") == sinks
    for name in ("bench-s", "configs/models/bench-s"):
        assert shipped.shipped_model(name) == model_path(name) == ROOT / "configs" / "models" / "bench-s"
    assert (model_path("ksana-tiny") / "model.safetensors").is_file()
    assert {"quickstart", "sink_window"} <= shipped.experiments().keys()
    assert {"ksana-tiny", "bench-s"} <= set(shipped.model_names())


def test_a_file_of_the_users_own_goes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("task: perplexity\n")
    Path("ksana-tiny").mkdir()
    assert shipped.experiment_path("quickstart") == Path("quickstart")
    assert model_path("ksana-tiny") == Path("ksana-tiny")


@pytest.mark.parametrize("name", ["nowhere", "configs/nowhere.yaml", "elsewhere/quickstart", "/quickstart"])
def test_what_is_not_shipped_stays_the_path_it_was(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.experiment_path(name) == Path(name)
    assert shipped.shipped_model(name) is None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("ksana_jax", "pallas_kernels", "configs", "experiments"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True, text=True, timeout=60)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_a_wheel_owns_two_packages_and_the_command(wheel):
    names = wheel.namelist()
    [info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    assert {name.partition("/")[0] for name in names} == {"ksana_jax", "pallas_kernels", info}
    assert wheel.read(f"{info}/top_level.txt").split() == [b"ksana_jax", b"pallas_kernels"]
    assert wheel.read(f"{info}/entry_points.txt").split() == [
        b"[console_scripts]",
        b"ksana",
        b"=",
        b"ksana_jax.__main__:main",
        b"[lm_eval.models]",
        b"ksana",
        b"=",
        b"ksana_jax.lab.evaluation.harness:KsanaLM",
    ]
    # Checkouts and editable installs have configs/ next to the package; a wheel has it inside.
    assert {"ksana_jax/py.typed", "ksana_jax/configs/quickstart.yaml"} <= set(names)
    assert "ksana_jax/assets/ksana-tiny/model.safetensors" in names


def test_experiments_of_an_installed_wheel_resolve_outside_the_repository(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    # Trials of prefix_cache name configs/models/bench-s, as from the repository's root.
    code = (
        "import ksana_jax.lab.runs.config as c, ksana_jax\n"
        "print(ksana_jax.__file__, *[c.load(n).name for n in ('quickstart', 'prefix_cache', 'host_embedding')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [
        str(tmp_path / "site" / "ksana_jax" / "__init__.py"),
        "quickstart",
        "prefix_cache",
        "host_embedding",
    ]

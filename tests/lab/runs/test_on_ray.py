"""Trials on a cluster: what needs no Ray, and the tests of `on_ray` in a process with a cluster."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.engine.distributed.ray_connection import connected
from ksana_jax.engine.distributed.ray_places import Resources
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.on_ray import RayTrials, _Queue

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RAY = {
    "KSANA_TEST_RAY": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE / "on_ray"))),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster on 127.0.0.1 and nowhere else
    "RAY_AUTH_MODE": "token",
}


@pytest.mark.soak
def test_trials_on_a_ray_cluster():
    pytest.importorskip("ray", reason="the extra ray is not installed")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--durations=0", str(HERE / "on_ray")],
        env=os.environ | RAY | {"RAY_AUTH_TOKEN": secrets.token_hex(32)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "passed" in ran.stdout and "skipped" not in ran.stdout


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=r"^Ray is not installed \(.*pip install 'ksana-jax\[ray\]'$"),
        connected("127.0.0.1:6379"),
    ):
        pass


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--on", "roy"], "--on is 'roy', must be local or ray"),
        (["--ray-address", "a:1", "--num-cpus", "2"], "--ray-address, --num-cpus: only with --on ray"),
        (["--on", "ray", "--num-cpus", "-1"], "num_cpus is -1.0, must be a number from 0"),
    ],
)
def test_wrong_options_give_one_line(run_ksana, options, problem):
    assert run_ksana("run", "quickstart", *options) == (2, "", f"ksana: error: {problem}\n")


@pytest.mark.usefixtures("fake")
def test_workers_take_trials_for_the_engine_that_they_have(model):
    grid = {"engine.block_size": [8, 16], "settings.x": [1, 2]}
    a1, a2, b1, b2 = trials = plan({"task": "fake", "model": model, "grid": grid}).trials
    queue = _Queue(trials, in_order=False)
    assert queue.take(None, set()) is a1
    assert queue.take(None, {queue.engine(a1)}) is b1
    assert queue.take(queue.engine(b1), {queue.engine(a1)}) is b2
    assert queue.take(queue.engine(b1), {queue.engine(a1)}) is a2
    assert queue.take(None, set()) is None
    queue.put_back(a1)
    assert len(queue) == 1
    strict = _Queue(trials, in_order=True)
    assert [strict.take(None, {None}) for _ in trials] == trials


@pytest.mark.usefixtures("fake")
def test_engines_in_several_processes_are_refused(model):
    experiment = plan({"task": "fake", "model": model, "engine": {"distributed": "auto"}})
    with pytest.raises(
        ConfigError, match=r"^engine\.distributed: a trial on a Ray cluster has an engine in one process"
    ):
        RayTrials(experiment, None, Resources()).environment()

"""A cluster worker's handling of a trial, in this process."""

import os

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import trial_runner
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.trial_runner import Assignment, TrialRunner, TrialSender

pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def runner():
    return TrialRunner(TrialSender.here())


def trial_of(model, **settings):
    return plan({"task": "fake", "model": model, "settings": settings}).trials[0]


def test_an_answer_has_the_records_of_a_trial(runner, model):
    trial = trial_of(model, x=4)
    answer = runner.run(Assignment(trial, 0))
    kinds = [kind for kind, _ in answer.records]
    assert kinds == ["start", "measurement", "measurement", "measurement", "done"]
    assert answer.records[0][1]["config"] == trial.config
    assert answer.records[0][1]["environment"] == {"device": "none"}
    assert answer.records[-1][1]["num_measurements"] == 3


def test_an_error_of_a_trial_is_its_last_record(runner, model):
    answer = runner.run(Assignment(trial_of(model, fail_at=1), 0))
    assert [kind for kind, _ in answer.records] == ["start", "failed"]
    assert answer.records[-1][1]["error"] == "RuntimeError: x is 1"
    with pytest.raises(RuntimeError, match="x is 1"):
        runner.run(Assignment(trial_of(model, fail_at=1), 0, debug=True))


def test_arrays_and_warnings_are_answered(runner, model, fake, monkeypatch):
    def run(self, trial):
        trial.progress(0.25)
        import warnings

        warnings.warn("beware", stacklevel=1)
        yield {"metric": "value", "value": 1.0, "file": trial.save("a", x=np.arange(3))}

    monkeypatch.setattr(fake.Fake, "run", run)
    trial = trial_of(model)
    answer = runner.run(Assignment(trial, 0))
    assert list(answer.arrays) == [f"{trial.id}.a.npz"] == [answer.records[1][1]["file"]]
    assert answer.warnings == ["beware"]


def test_measurements_that_cannot_be_written_are_an_error_of_the_trial(runner, model, fake, monkeypatch):
    monkeypatch.setattr(fake.Fake, "run", lambda self, trial: iter([{"metric": "value", "value": {1, 2}}]))
    [_, (kind, fields)] = runner.run(Assignment(trial_of(model), 0)).records
    assert kind == "failed" and fields["error"] == "TypeError: Object of type set is not JSON serializable"


def test_a_model_that_is_not_here_is_named_with_both_folders(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runner = TrialRunner(TrialSender.here())
    trial = trial_of("model")
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match=rf"^there is no model 'model';.*\(in /; the command's folder is {tmp_path}"):
        runner.run(Assignment(trial, 0))


def test_another_version_is_refused():
    with pytest.raises(ConfigError, match=r"ksana_jax here is \S+, that of the command is 0\.0\.0"):
        TrialRunner(TrialSender("0.0.0", "/")).begin()


@pytest.mark.parametrize("hides, given, platforms", [(True, None, "cpu"), (True, "cuda", "cuda"), (False, None, None)])
def test_a_worker_leaves_gpus_to_others(monkeypatch, hides, given, platforms):
    monkeypatch.setattr(trial_runner.build, "begin", lambda: None)
    monkeypatch.setattr(trial_runner, "keep_compiled_steps", lambda: None)
    if given is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", given)
    before = os.environ.get("JAX_PLATFORMS")
    try:
        TrialRunner(TrialSender.here(), hides_gpus=hides).begin()
        assert os.environ.get("JAX_PLATFORMS") == platforms
    finally:
        if before is None:
            os.environ.pop("JAX_PLATFORMS", None)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin processes to cores")
def test_a_worker_is_pinned_to_its_cores_where_there_are_as_many():
    before = os.sched_getaffinity(0)
    try:
        trial_runner._pin(len(before) - 1, 1)
        assert os.sched_getaffinity(0) == {max(before)}
        trial_runner._pin(1, 1)
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)

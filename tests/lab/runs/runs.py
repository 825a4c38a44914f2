"""Runs of experiments without failures, and the engines built for them."""

from pathlib import Path

from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import own_names, run


def reported(experiment, folder: Path, **settings):
    """Runs an experiment and returns its report; no trial may fail."""
    outcome = run(experiment, folder, **settings)
    assert not outcome.failed, outcome.failed
    return report(folder, own_names(experiment))


class Engines(list):
    """Builds real engines, and has those that it built."""

    def __call__(self, *args, **settings):
        from ksana_jax import LLM

        self.append(LLM(*args, **settings))
        return self[-1]

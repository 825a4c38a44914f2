"""Runs trials in a worker process of a cluster, for a run elsewhere that writes the records. Knows no Ray."""

from __future__ import annotations

import dataclasses
import os
import platform
import tempfile
import warnings
from pathlib import Path

from ksana_jax import __version__
from ksana_jax.core.compilation_cache import keep_compiled_steps
from ksana_jax.core.config import ConfigError
from ksana_jax.core.plugins import own_folders, search_in
from ksana_jax.core.processor import pin
from ksana_jax.devices.starting import use_device
from ksana_jax.lab.runs.classes import own_digests
from ksana_jax.lab.runs.config import Trial
from ksana_jax.lab.runs.identity import contents
from ksana_jax.lab.runs.models import inputs_of
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.trials import Context, EnginePool, Record, attempt
from ksana_jax.native import build


@dataclasses.dataclass(frozen=True)
class TrialSender:
    """The process that sends trials: its version, its working directory, where relative paths of trials begin, and the
    folders of own code."""

    version: str
    folder: str
    own_folders: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> TrialSender:
        return cls(__version__, os.getcwd(), own_folders())


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A trial to run. num_sinks: see `EnginePool`. debug: see `attempt`."""

    trial: Trial
    num_sinks: int
    debug: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """Everything that a trial gave. arrays: {file name: content}. warnings: texts of the warnings meanwhile."""

    records: list[Record]
    arrays: dict[str, bytes]
    warnings: list[str]


class TrialRunner:
    """Runs one trial at a time in this process and keeps the last engine.

    Args:
      cores: (number of the first, count) of this process's cores to which it pins itself; None leaves it all.
      hides_gpus: leave this machine's GPUs to others, unless JAX_PLATFORMS is set here.
    """

    def __init__(self, sender: TrialSender, cores: tuple[int, int] | None = None, hides_gpus: bool = False):
        self._sender, self._cores, self._hides_gpus = sender, cores, hides_gpus
        self._num_sinks = 0
        self._pool = EnginePool(lambda trial: self._num_sinks)

    def begin(self) -> int:
        """Prepares the process, before jax starts in it; returns its pid.

        Raises:
          ConfigError: ksana_jax here is of another version than the sender's.
        """
        if self._sender.version != __version__:
            raise ConfigError(
                f"ksana_jax here is {__version__}, that of the command is {self._sender.version}: records would differ"
            )
        if self._cores is not None:
            _pin(*self._cores)
        if self._hides_gpus:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if os.path.isdir(self._sender.folder):
            os.chdir(self._sender.folder)
        for place in reversed(self._sender.own_folders):
            search_in(place)
        keep_compiled_steps()
        build.begin()
        return os.getpid()

    def run(self, assignment: Assignment) -> Answer:
        """Runs a trial. Its errors are among the records.

        Raises:
          ConfigError: what the trial reads is not here, or not the same as where it was resolved; or there is no such
            device.
        """
        trial, self._num_sinks = assignment.trial, assignment.num_sinks
        self._check_inputs(trial)
        with tempfile.TemporaryDirectory(prefix="ksana-") as name, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            use_device(trial.config["engine"]["device"])
            folder = Path(name)
            records = list(attempt(Context(trial, self._pool, lambda fraction: None, folder), assignment.debug))
            arrays = {path.name: path.read_bytes() for path in folder.iterdir()}
        return Answer(records, arrays, [str(warning.message) for warning in caught])

    def _check_inputs(self, trial: Trial) -> None:
        config, wanted = trial.config, contents(trial.config["inputs"]) | trial.config.get("code", {})
        task = task_named(config["task"])
        try:
            settings = task.Settings(**config["settings"])
            found = contents({**inputs_of(config), **task.inputs(settings)}) | own_digests(config)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{error} (in {os.getcwd()}; the command's folder is {self._sender.folder})") from None
        if differing := [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]:
            raise ConfigError(
                f"{trial.label}: other contents here than where the command runs: {', '.join(differing)} (model "
                f"{config['model']}, in {os.getcwd()}, Python {platform.python_version()})"
            )


def _pin(first: int, count: int) -> None:
    """Restricts all threads of this process to some of its cores, where the system can and there are as many."""
    if not hasattr(os, "sched_setaffinity"):
        return
    mine = sorted(os.sched_getaffinity(0))[first : first + count]
    if len(mine) == count:
        pin(*mine)

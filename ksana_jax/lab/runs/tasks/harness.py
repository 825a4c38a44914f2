"""Tasks of lm-evaluation-harness as rows of an experiment: accuracy and the KV memory that it took."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.tasks.base import INPUT_FILES, BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, kib, number, of_metric
from ksana_jax.lab.runs.text_files import content_digest


@dataclasses.dataclass
class HarnessSettings:
    """Fields of `settings` in an experiment with tasks of lm-evaluation-harness (extra `eval`).

    tasks: names of tasks, from the harness or files in `task_files`.
    task_files: task files of your own, in the harness' format.
    data: one file of JSON lines per task, instead of its dataset; empty takes the datasets that the tasks name, from
      the Hugging Face hub or its cache.
    fewshot_data: one file of JSON lines per task, for examples in the prompt; empty if the tasks need none.
    num_fewshot: number of examples in the prompt; null takes the task's.
    num_samples: documents of each task, drawn by the seed; null takes all, and then every seed measures the same.
    """

    tasks: list[str] = dataclasses.field(default_factory=list)
    task_files: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_FILES)
    data: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_FILES)
    fewshot_data: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_FILES)
    num_fewshot: int | None = int_field(None, 0)
    num_samples: int | None = int_field(None)


class Harness(BaseTask):
    """Tasks of lm-evaluation-harness, scored with the trial's cache policy."""

    Settings = HarnessSettings
    measures_speed = False

    def inputs(self, settings: HarnessSettings) -> dict[str, str]:
        names = ("task_files", "data", "fewshot_data")
        found = {n: [content_digest(path, f"settings.{n}") for path in getattr(settings, n)] for n in names}
        return {name: "-".join(digests) for name, digests in found.items() if digests}

    def check(self, config: Mapping[str, Any]) -> None:
        settings = HarnessSettings(**config["settings"])
        if not settings.tasks:
            raise ConfigError("settings.tasks is empty: name at least one task of lm-evaluation-harness")
        for name in ("data", "fewshot_data"):
            if (count := len(getattr(settings, name))) not in (0, len(settings.tasks)):
                raise ConfigError(
                    f"settings.{name} has {count} files and settings.tasks {len(settings.tasks)} names: give one file "
                    "per task, or none"
                )
        if settings.fewshot_data and not settings.data:
            raise ConfigError("settings.fewshot_data needs settings.data")
        self.inputs(settings)  # report a missing file first
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError("task 'harness' needs the extra eval: pip install 'ksana-jax[eval]'")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]

        from ksana_jax.lab.evaluation import KsanaLM

        settings, llm = HarnessSettings(**trial.config["settings"]), trial.llm
        tasks = load_tasks(settings)
        picked = {name: _draw(task, settings.num_samples, trial.seed) for name, task in tasks.items()}
        began = time.perf_counter()
        found = simple_evaluate(
            model=KsanaLM(llm),
            tasks=list(tasks.values()),
            num_fewshot=settings.num_fewshot,
            samples=None if settings.num_samples is None else picked,
            bootstrap_iters=0,
            log_samples=False,
        )
        seconds = time.perf_counter() - began
        for name in tasks:
            better = found["higher_is_better"][name]
            for key, value in found["results"][name].items():
                score = key.partition(",")[0]
                if isinstance(value, (int, float)) and better.get(score) is not None:
                    yield {
                        "metric": "score",
                        "task": name,
                        "name": key.removesuffix(",none"),
                        "value": float(value),
                        "higher_is_better": better[score],
                        "samples": picked[name],
                    }
        yield {
            "metric": "cost",
            "seconds": seconds,
            "block_bytes": llm.block_bytes,
            "peak_blocks": max((int(r.peak_blocks) for r in llm.records), default=0),
        }

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes "TASK NAME" for each score, peak_kv_bytes (of all requests at once) and seconds, with compiling."""
        result = {_key(m): m["value"] for m in measurements if m["metric"] == "score"}
        for m in measurements:
            if m["metric"] == "cost":
                result |= {"peak_kv_bytes": m["peak_blocks"] * m["block_bytes"], "seconds": m["seconds"]}
        return result

    def sample(self, key: str, measurements: Sequence[Measurement]) -> Hashable | None:
        return next((tuple(m["samples"]) for m in measurements if m["metric"] == "score" and _key(m) == key), None)

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        scores = {_key(m): m for m in of_metric(rows, "score")}
        return [
            *(Column(key, key, number(4), "max" if m["higher_is_better"] else "min") for key, m in scores.items()),
            Column("peak_kv_bytes", "peak KV, KiB", kib, "min", exact=True),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        counts = {m["task"]: len(m["samples"]) for m in of_metric(rows, "score")}
        documents = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        return [f"Documents per seed: {documents}."] if counts else []


def load_tasks(settings: HarnessSettings) -> dict[str, Any]:
    """Returns the harness' tasks by name, with their datasets replaced by files if there are any."""
    from lm_eval.tasks.manager import TaskIndex, TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager()
    for path in settings.task_files:  # alone: include_path would register all other YAML files of its folder too
        try:
            entry = TaskIndex.entry_from_path(Path(path))
        except Exception as error:  # whatever its reader raises
            raise ConfigError(f"settings.task_files: {path} is no task of the harness: {error}") from error
        manager.task_index[entry.name] = entry
    if not settings.data:
        return manager.load(settings.tasks)["tasks"]
    # A group is the harness' way to load a task by name with some of its fields replaced.
    members = [{"task": name, **_source(settings, index)} for index, name in enumerate(settings.tasks)]
    return manager.load([{"group": "from files", "task": members}])["tasks"]


def _source(settings: HarnessSettings, index: int) -> dict[str, Any]:
    """Returns the fields of a task that name its dataset."""
    files = {"test": settings.data[index]}
    if settings.fewshot_data:
        files["train"] = settings.fewshot_data[index]
    train = "train" if settings.fewshot_data else None
    splits = {"test_split": "test", "validation_split": None, "training_split": train, "fewshot_split": train}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}, **splits}


def _draw(task: Any, num_samples: int | None, seed: int) -> list[int]:
    """Returns sorted indices of documents: all, or the seed's part of a fixed permutation, starting over at its end."""
    count = len(task.eval_docs)
    if num_samples is None:
        return list(range(count))
    if num_samples > count:
        raise ConfigError(f"settings.num_samples is {num_samples:,}, {task.config.task} has {count:,} documents")
    start = seed % (count // num_samples) * num_samples
    return sorted(np.random.default_rng(0).permutation(count)[start : start + num_samples].tolist())


def _key(score: Measurement) -> str:
    return f"{score['task']} {score['name']}"

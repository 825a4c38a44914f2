"""Turns an experiment, a YAML file and dotted overrides, into a list of trials. Knows no engine, no jax.

A trial is one point of the experiment: model, engine settings, attention pattern, task settings and a seed, all
resolved. Its id is a hash of its non-default values and its inputs (weights, texts): changing a value makes another
trial, and so does editing own code that its settings name; changing a label, or adding a setting in a later version,
does not.

Numbers may be given as multiples of the model's training context: `window: ${context:1/4}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.plugins import nearest, nearest_hint, search_in
from ksana_jax.core.shipped import experiment_path, experiments
from ksana_jax.core.sources import expanded
from ksana_jax.engine.settings import check_policies
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.lab.runs import dotted, text_files
from ksana_jax.lab.runs.classes import own_digests
from ksana_jax.lab.runs.identity import canonical, trial_id
from ksana_jax.lab.runs.models import inputs_of, num_layers
from ksana_jax.lab.runs.patterns import layer_groups, patterns_of, write_patterns
from ksana_jax.lab.runs.points import TRIAL_KEYS, Variant, grid_of, merge, rows_of, variants_of
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.tasks.base import check_bounds
from ksana_jax.lab.runs.text_files import MissingInput
from ksana_jax.lab.runs.typed import explained, typed
from ksana_jax.methods.presets import names_layers


@dataclasses.dataclass
class Experiment:
    """The fields of an experiment's YAML file.

    name: of the default output folder in runs/, one path component; empty takes the file's. --out takes any path.
    title: one line above the table. An override that changes a field, and may make it wrong, replaces it by the name
      and the overrides, unless it gives another title.
    task: name of a task (`ksana list tasks` lists them), or "package.module:Class" of your own.
    model: its path (a Hugging Face directory or a .gguf file) or name (shipped, fetched, or of the Hugging Face hub).
    load_format: "auto" reads the weights, "dummy" draws random ones.
    engine: fields of `EngineConfig`; max_model_len null takes the length that the task needs.
    pattern: fields of `AttentionPattern`, a preset's name, {preset: name} with fields that override the preset, or one
      of these for layers, {"0-9": {...}, "12": full}; null takes the model's own, as do layers that are not named. With
      `full_heads`, the kv heads that it names keep the model's own.
    layer_patterns: one pattern per layer, instead of `pattern`.
    settings: fields of the task's settings.
    variants: named rows, each {name: ..., dotted.key: value}; empty for a single row. One with `grid: false` is a row
      outside the grid. Variants with the same settings are one row with both names, "a = b".
    grid: {dotted.key: [values]}; every combination, for every variant. Values that are equal once they have the key's
      type, such as 1 and 1.0, are one row. A key that variants set cannot be in the grid too. Rows times seeds are at
      most 10,000.
    baseline: label of the row that changes are relative to; empty takes the full cache, for rows that compress it.
    pivot: key of the grid whose values become columns of the table, which then shows the headline number alone.
    seeds: each row runs once per seed.
    interleave: run all rows with the first seed, then all with the next: changes in the machine's load then affect all
      rows alike, so speeds can be compared. Otherwise rows that share an engine run in succession, and none is built
      twice.
    fetch: the download, its licence and its destination; shown in the error if an input file, or a model, is missing.
    """

    name: str = ""
    title: str = ""
    task: str = "perplexity"
    model: str = "ksana-tiny"
    load_format: str = "auto"
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    pattern: Any = None
    layer_patterns: list[Any] = dataclasses.field(default_factory=list)
    settings: Any = None
    variants: list[Any] = dataclasses.field(default_factory=list)
    grid: dict[str, Any] = dataclasses.field(default_factory=dict)
    baseline: str = ""
    pivot: str = ""
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    interleave: bool = False
    fetch: str = ""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One point of an experiment. config: resolved plain values with the keys TRIAL_KEYS, `seed`, `inputs` and, if
    settings name own code, `code`."""

    id: str
    label: str
    seed: int
    config: dict[str, Any]

    @property
    def engine_key(self) -> str:
        """Key that is equal for trials that can share a loaded engine; patterns that leave the groups of layers as they
        are, and the numbers of an eviction method, are set without reloading."""
        engine = dict(self.config["engine"])
        if (method := read_eviction(engine["kv_eviction"])) is not None:
            # Where rows never hold more than a budget in tokens, the pool is as large as the budget asks for.
            sizes = method.prompts == "streamed" and isinstance(method.budget, int)
            engine["kv_eviction"] = [repr(method.compiled), method.layers, method.budget if sizes else None]
        return canonical([self.config["model"], self.config["load_format"], engine, layer_groups(self.config)])


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table, whose trials differ only in seed. point: the grid's keys with this row's values."""

    label: str
    point: dict[str, Any]
    trials: tuple[Trial, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A resolved experiment. source: the experiment's fields as plain values, for run.json."""

    name: str
    title: str
    task: str
    rows: tuple[Row, ...]
    source: dict[str, Any]

    @property
    def trials(self) -> list[Trial]:
        """Each trial once, in the order of the rows."""
        return list({t.id: t for row in self.rows for t in row.trials}.values())

    def max_repositioned_sinks(self, trial: Trial) -> int:
        """Maximum number of repositioned sinks in any trial that shares this trial's engine."""
        patterns = [p for t in self.trials if t.engine_key == trial.engine_key for p in patterns_of(t.config)]
        return max((p.num_repositioned_sinks for p in patterns), default=0)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Reads an experiment and its overrides ("key=value", dotted) into a plan.

    Raises:
      FileNotFoundError: there is no such file, model or text.
      ConfigError: a key is unknown (the nearest one is named), or a value has the wrong type or is out of range.
    """
    path = experiment_path(path)
    if not path.is_file():
        hint = nearest_hint(path.name.removesuffix(".yaml"), experiments())
        raise FileNotFoundError(
            f"{path}: no such experiment file; `ksana list experiments` lists the shipped ones{hint}"
        )
    search_in(path.parent)
    try:
        return plan(_read(path), overrides, default_name=path.stem, folder=path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: keys or lists are nested too deeply to be read") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        given, written = dotted.from_yaml(text), yaml.load(text, yaml.BaseLoader)
    except OmegaConfBaseException as error:
        raise explained(error) from error
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"not a YAML file of keys and values: {' '.join(str(error).split())}") from error
    if not given:
        raise ConfigError("the file is empty: it needs a task at least, `ksana list tasks` lists them")
    if isinstance(written, dict):
        _take_names(given, written)
        lists = (values["variants"] if isinstance(values.get("variants"), list) else [] for values in (given, written))
        for variant, as_text in zip(*lists, strict=False):
            _take_names(variant, as_text)
    return given


def _take_names(given: Any, written: Any) -> None:
    """Gives names the text that was written: YAML reads off as false, and 010 as 8."""
    for key in ("name", "title") if isinstance(given, dict) and isinstance(written, dict) else ():
        if isinstance(given.get(key), (bool, int, float)) and isinstance(written.get(key), str):
            given[key] = written[key]


def plan(
    given: Mapping[str, Any],
    overrides: Sequence[str] = (),
    default_name: str = "experiment",
    folder: Path | None = None,
) -> Plan:
    """Resolves an experiment given as plain values; see `load`.

    Args:
      folder: base of relative input files in `given`; relative files in overrides start at the working directory.
    """
    pinned = dotted.dotlist(overrides)
    _take_names(pinned, dict(item.split("=", 1) for item in overrides))
    task = str(pinned.get("task", given.get("task", Experiment.task)))
    given, pinned = _anchored(given, folder, task), _anchored(pinned, None, task)
    # Rows are merged by hand into each trial, so they stay out of the typed merge of the rest.
    written, given = merge(given), merge(given, pinned)
    source = dotted.plain(typed(Experiment, given))
    name = _folder_name(source["name"] or default_name)
    source["title"] = _title(source["title"], name, written, overrides, task)
    _check_seeds(source["seeds"])
    variants, grid = variants_of(source["variants"]), grid_of(source["grid"])
    _check_shown(source, variants, grid)
    base = {k: v for k, v in given.items() if k in TRIAL_KEYS}
    rows = []
    for variant, values in rows_of(variants, grid, len(source["seeds"]), pinned):
        merged = merge(base, variant.changes, dotted.nested(values))
        try:
            config = _resolved(merged)
        except (MissingInput, LoadError) as error:
            if not source["fetch"]:
                raise
            if isinstance(error, MissingInput):
                raise MissingInput(error.path, f"{error.path} is missing. {source['fetch']}") from error
            raise LoadError(f"{str(error).partition('; supported')[0]}: {source['fetch']}") from None
        # A preset is shown by its name, ranges of layers as given, other values as resolved.
        point = {k: v if k == "pattern" and isinstance(v, str) else dotted.at(config, k) for k, v in values.items()}
        if names_layers(values.get("pattern")):
            point["pattern"] = yaml.safe_dump(values["pattern"], default_flow_style=True, width=1000).strip()
        names = [variant.name] * bool(variant.name)
        full_label = ", ".join(names + [f"{k.rpartition('.')[2]}={v}" for k, v in point.items()])
        point = dict.fromkeys(grid) | point
        rows.append(Row(variant.name, point, tuple(_trial(config, full_label, seed) for seed in source["seeds"])))
    return Plan(name, source["title"], source["task"], tuple(_distinct(rows)), source)


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows without those whose trials are an earlier row's, which then has the names of both."""
    equal: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        equal.setdefault(tuple(trial.id for trial in row.trials), []).append(row)
    return [
        dataclasses.replace(same[0], label=" = ".join(dict.fromkeys(row.label for row in same)))
        for same in equal.values()
    ]


def _anchored(given: Mapping[str, Any], folder: Path | None, task: str) -> dict[str, Any]:
    """Makes the input files in an experiment's settings, rows and grid relative to a folder; ~ is the home folder."""
    fields = dataclasses.fields(task_named(task).Settings)
    keys = {
        "pattern.full_heads.statistics",
        *(f"settings.{field.name}" for field in fields if field.metadata.get("files")),
    }

    def walk(node: Any, key: str = "") -> Any:
        if isinstance(node, Mapping):
            return {k: walk(v, f"{key}.{k}" if key else str(k)) for k, v in node.items()}
        if isinstance(node, list) and key in ("", *keys):
            return [walk(item, key) for item in node]
        if key in keys and isinstance(node, str) and not node.startswith("${"):
            path = (folder or Path()) / expanded(node)
            keep = node in text_files.NAMES and not path.exists()
            return node if keep or (folder is None and not node.startswith("~")) else str(path)
        return node

    return {**walk(given), **{k: walk(given[k]) for k in ("variants", "grid") if k in given}}


def _folder_name(name: str) -> str:
    if name.startswith(".") or any(char in "/\\" or not char.isprintable() for char in name):
        raise ConfigError(
            f"name is {name!r:.80}, must be one path component that does not begin with a dot; --out takes any folder"
        )
    if (size := len(name.encode())) > 200:
        raise ConfigError(f"name has {size:,} bytes, must have at most 200: it names a folder")
    return name


def _title(title: str, name: str, written: Mapping[str, Any], overrides: Sequence[str], task: str) -> str:
    """Returns the title, or the name with the overrides that change what was written: it may be wrong of those."""
    changed = []
    for item in overrides:
        pinned = _anchored(dotted.dotlist([item]), None, task)
        if "title" in pinned or not title:
            return title
        if "name" not in pinned and merge(written, pinned) != written:
            changed.append(item if len(item) < 80 else f"{item[:76]}...")
    return f"{name} with {', '.join(changed)}" if changed else title


def _check_shown(source: Mapping[str, Any], variants: Sequence[Variant], grid: Mapping[str, Any]) -> None:
    rows = [variant.name for variant in variants]
    for key, kind, names in (("baseline", "a variant's name", rows), ("pivot", "a key of the grid", list(grid))):
        if (name := source[key]) and name not in names:
            known = f"; the nearest is {nearest(name, names, cutoff=0.0)!r}" if any(names) else ""
            raise ConfigError(f"{key} is {name!r}, must be {kind}{known}")


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds:
        raise ConfigError("seeds is empty: give at least one")
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seeds has {seed}, must be integers from 0 and below 2^63")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds is {seeds!r:.80}, must be distinct: a repeated seed repeats the same measurement")


def _trial(config: dict[str, Any], label: str, seed: int) -> Trial:
    config = {**config, "seed": seed}
    return Trial(trial_id(config), label or config["task"], seed, config)


def _resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a trial's checked config as plain values, with digests of its inputs; the seed is added later."""
    try:
        config = dotted.plain(typed(Experiment, raw), resolve=True)
    except OmegaConfBaseException as error:
        raise explained(error) from error
    config = {k: config[k] for k in TRIAL_KEYS}
    task = task_named(config["task"])
    if config["settings"] is None:
        raise ConfigError("settings is null, must be a mapping; omit it for the defaults")
    try:
        settings = task.Settings(**config["settings"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    write_patterns(config)
    check_bounds(task.Settings, config["settings"])
    task.check(config)  # before EngineConfig rejects a length that follows from the settings
    if config["engine"]["max_model_len"] is None:
        config["engine"]["max_model_len"] = task.max_model_len(settings)
    config["engine"] = check_policies(EngineConfig(**config["engine"])).plain()  # one spelling of each value
    given, wanted = len(config["layer_patterns"]), num_layers(config["model"])
    if given and wanted is not None and given != wanted:
        raise ConfigError(f"layer_patterns has {given} patterns, {config['model']} has {wanted} layers")
    config["inputs"] = {**inputs_of(config), **task.inputs(settings)}
    if code := own_digests(config):
        config["code"] = code
    return config

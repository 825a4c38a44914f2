"""Generates the reference of experiment files from dataclasses, for `ksana list tasks` and `docs/reference/yaml.md`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.docstrings import field_meanings
from ksana_jax.core.operator_settings import IMPLEMENTATION_NAMES, OperatorSettings
from ksana_jax.core.patterns import SINK_POSITIONS, AttentionPattern
from ksana_jax.kv.replacement import REPLACEMENT_POLICIES
from ksana_jax.lab.runs.config import Experiment
from ksana_jax.lab.runs.tasks import TASKS, task_named
from ksana_jax.methods.full_heads import ChosenHeads
from ksana_jax.methods.presets import PRESETS
from ksana_jax.scheduler.policies import SCHEDULING_POLICIES

INTRODUCTION = """\
# Experiment files

`ksana run FILE.yaml` runs an experiment. An unknown key is an error that names the nearest one. A file can be as short
as this:

```yaml
title: Windows on ksana-tiny
task: perplexity
settings: {num_texts: 1, num_tokens: 1024}
variants:
  - {name: full}
  - {name: sinks + window, pattern: {window: "${context:7/16}", num_sinks: 4}}
seeds: [0, 1, 2]
```

- `ksana run FILE key=value ...` replaces values by their dotted keys: `engine.block_size=8`, `pattern.window=64`.
- `variants` are named rows of the table; `grid` multiplies them, for instance `grid: {pattern.window: [32, 64, 128]}`.
- `${context:1/4}` is a quarter of the model's training context, in tokens. It is written in quotes.
- Trials that differ in nothing but the pattern share one loaded engine, and its compiled steps.

`ksana list tasks --markdown` prints this page, with the first sentence on each key; `ksana list tasks NAME` and
`help(ksana_jax.EngineConfig)` print the rest.
"""


class Field(NamedTuple):
    """A key of a YAML file. type and default are written as in YAML."""

    name: str
    type: str
    default: str
    meaning: str


def fields_of(cls: type) -> list[Field]:
    """Returns the fields of a dataclass with their descriptions from its own and its bases' docstrings."""
    meanings = field_meanings(cls)
    return [Field(f.name, _type(f), _default(f), meanings.get(f.name, "")) for f in dataclasses.fields(cls)]


def summary(found: Any) -> str:
    """Returns the first paragraph of a docstring: a class's or function's, or its module's if it refers to that."""
    found = getattr(found, "func", found)  # of functools.partial
    docs = [inspect.getdoc(found) or "", inspect.getdoc(sys.modules[found.__module__]) or ""]
    return next((d.partition("\n\n")[0].replace("\n", " ") for d in docs if d and "See the module" not in d), "")


def markdown() -> str:
    """Returns docs/reference/yaml.md."""
    presets = "\n".join(f"- `{name}`: `{json.dumps(fields)}`" for name, fields in PRESETS.items())
    parts = [
        INTRODUCTION,
        "## The file\n",
        _table(Experiment),
        "## `engine`\n\nThese are keyword arguments of `LLM` too.\n",
        _table(EngineConfig),
        f"`policy` is one of {_names(SCHEDULING_POLICIES)}; `prefix_replacement` of {_names(REPLACEMENT_POLICIES)}.\n",
        "### `engine.operators`\n",
        _table(OperatorSettings),
        f"Implementations: {_implementations()}.\n",
        "## `pattern`\n\nFields of `AttentionPattern`, drawn in [concepts.md](../learn/concepts.md#patterns).\n",
        _table(AttentionPattern),
        "`full_heads` names kv heads that keep the model's own pattern, as DuoAttention does: a list for each layer, "
        "or these fields:\n",
        _table(ChosenHeads),
        f"Presets, by name (`pattern: streaming_llm`) or as `preset` with fields that replace its own:\n\n{presets}\n",
        "## `settings` of each task\n",
    ]
    settings = {name: task_named(name).Settings for name in TASKS}
    for name, cls in settings.items():
        base = next((other for other, found in settings.items() if found in cls.__mro__[1:]), None)
        also = f"The settings of `task: {base}`, and:\n\n" if base else ""
        rows = _table(cls, fields_of(settings[base]) if base else ())
        parts.append(f"### `task: {name}`\n\n{summary(type(task_named(name)))}\n\n{also}{rows}")
    return "\n".join(parts)


def _table(cls: type, without: Collection[Field] = ()) -> str:
    rows = [
        f"| `{f.name}` | {_cell(f.type)} | {_cell(f'`{f.default}`')} | {_cell(first_sentence(f.meaning))} |\n"
        for f in fields_of(cls)
        if f not in without
    ]
    return "| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\w[.])\s|(?<=[)\]`\"][.])\s", text, maxsplit=1)[0]


def _names(choices: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in choices)


def _implementations() -> str:
    return "; ".join(
        f"{operator}: {', '.join(f'`{n}`' for n in names)}" for operator, names in IMPLEMENTATION_NAMES.items()
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("None", "null")


def _type(field: dataclasses.Field) -> str:
    name = str(field.type)
    if choices := re.fullmatch(r"Literal\[(.*)\]", name):
        return choices[1].replace("'", '"').replace(", ", " or ")
    if name.startswith("SinkPosition"):
        name = name.replace("SinkPosition", " or ".join(f'"{choice}"' for choice in SINK_POSITIONS))
    names = {
        "Any": "any",
        "EngineConfig": "mapping",
        "OperatorSettings": "mapping",
        "dict[str, Any]": "mapping",
        "list[Any]": "list",
    }
    return names.get(name, name).replace(" | None", " or null").replace(" | ", " or ")


def _default(field: dataclasses.Field) -> str:
    made: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "{}" if dataclasses.is_dataclass(made) else json.dumps(made)

"""The JSON Schema of experiment files, made from the dataclasses that read them: `ksana schema`.

Editors complete and check files by it. It accepts what `lab.runs.config` reads, and refuses unknown keys. Whether
values go together is checked when an experiment is loaded.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.docstrings import field_meanings
from ksana_jax.core.dtypes import KV_SPELLINGS
from ksana_jax.core.operator_settings import OperatorSettings
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.plugins import resolve
from ksana_jax.core.shipped import model_names
from ksana_jax.kv.codecs.registry import BLOCK_CODECS, CODECS, LATENT_CODECS, find_block_codec
from ksana_jax.kv.codecs.sealing import Sealing
from ksana_jax.kv.eviction import EVICTION_METHODS
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.replacement import REPLACEMENT_POLICIES
from ksana_jax.kv.selection import SELECTION_METHODS
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.lab.runs.config import TRIAL_KEYS, Experiment
from ksana_jax.lab.runs.tasks import TASKS, task_named
from ksana_jax.methods.full_heads import ChosenHeads
from ksana_jax.methods.presets import PRESETS
from ksana_jax.scheduler.policies import SCHEDULING_POLICIES
from ksana_jax.scheduler.speculative import PROPOSERS
from ksana_jax.scheduler.speculative.base import SpeculativeMethod

Schema = dict[str, Any]

METHODS = {
    "kv_eviction": (EVICTION_METHODS, EvictionMethod),
    "kv_selection": (SELECTION_METHODS, SelectionMethod),
    "speculative_config": (PROPOSERS, SpeculativeMethod),
}
# Definitions of fields whose types say less, by the field's name. `of` and `decode` are of methods around others.
_DEFINED = {name: name for name in (*METHODS, "kv_cache_dtype", "pattern")} | dict.fromkeys(
    ("of", "decode"), "kv_eviction"
)
# Dotted keys of rows below those that `_dotted` lists.
_DEEPER = (
    rf"^engine\.({'|'.join(METHODS)})\.\w+\.",
    r"^engine\.(kv_cache_dtype|device|distributed)\.",
    r"^pattern\.full_heads\.",
    r"^settings\.",
)
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
_BOUNDS = {"low": "minimum", "high": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}


def schema() -> Schema:
    """Returns the schema of experiment files, draft 2020-12."""
    fields = {**_fields(Experiment), "task": _named(TASKS), "model": _named(model_names(), own="")}
    fields["layer_patterns"]["items"] = _reference("layer_pattern")
    row = {key: fields[key] for key in TRIAL_KEYS if key != "task"} | _dotted()
    # Rows may have dotted keys on each level: {engine: {kv_eviction.budget: 8}}.
    row |= {"engine": _reference("row_engine"), "pattern": {"anyOf": [fields["pattern"], _reference("row_pattern")]}}
    lists = {key: {"type": "array", "minItems": 1, "items": value} for key, value in row.items()}
    lists |= {key: {"anyOf": [lists[key], {"type": "object"}]} for key in ("engine", "pattern", "settings")}
    fields["variants"]["items"] = {
        **_object(
            {"name": {"type": "string", "minLength": 1}, "grid": {"type": "boolean"}, **row},
            {key: {} for key in _DEEPER},
        ),
        "required": ["name"],
    }
    fields["grid"] |= _object(lists, {key: {"type": "array"} for key in _DEEPER})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An experiment of ksana_jax, which `ksana run` reads",
        **_object(fields),
        "allOf": [_of_task(name) for name in TASKS],
        "$defs": _definitions(),
    }


def _definitions() -> Schema:
    classes = (OperatorSettings, ChosenHeads, *(task_named(name).Settings for name in TASKS))
    found = {cls.__name__: _object(_fields(cls)) for cls in classes}
    named = {"policy": _named(SCHEDULING_POLICIES), "prefix_replacement": _named(REPLACEMENT_POLICIES)}
    found[EngineConfig.__name__] = _object(_fields(EngineConfig) | named)
    found |= {setting: _methods(*method) for setting, method in METHODS.items()}
    preset, null = {"enum": [*PRESETS]}, {"type": "null"}
    fields = {"preset": preset, **_fields(AttentionPattern)}
    heads = {"full_heads": {"anyOf": [{"type": "array"}, _reference(ChosenHeads.__name__), null]}}
    found["layer_pattern"] = {"anyOf": [preset, _object(fields)]}
    layers = _object({}, {r"^\d+(-\d+)?$": _reference("layer_pattern")})
    found["pattern"] = {"anyOf": [preset, null, _object(fields | heads), layers]}
    found |= {f"row_{key}": _nested(key) for key in ("engine", "pattern")}
    return found | {AttentionPattern.__name__: _object(fields | heads), "kv_cache_dtype": _kv_cache_dtype()}


def _of_task(name: str) -> Schema:
    """Returns what holds for the files of a task: its settings, also where rows set them by dotted keys."""
    settings = task_named(name).Settings
    names = [field.name for field in dataclasses.fields(settings)]
    whole, keys = _reference(settings.__name__), {f"settings.{n}": _reference(settings.__name__, n) for n in names}
    known = {"propertyNames": {"pattern": rf"^(?!settings\.)|^settings\.({'|'.join(names)})(\.|$)"}}
    deeper = {rf"^({'|'.join(names)})\.": {}}
    nested = _object({n: _reference(settings.__name__, n) for n in names}, deeper)
    rows = {"properties": {"settings": nested, **keys}, **known}
    grid = {"properties": {key: {"items": value} for key, value in keys.items()}, **known}
    chosen: Schema = {"properties": {"task": {"const": name}}}
    if name != Experiment.task:
        chosen["required"] = ["task"]
    return {"if": chosen, "then": {"properties": {"settings": whole, "variants": {"items": rows}, "grid": grid}}}


def _dotted() -> Schema:
    """Returns the keys of rows that name a field of the engine or the pattern, such as engine.block_size."""
    classes = {"engine": EngineConfig, "engine.operators": OperatorSettings, "pattern": AttentionPattern}
    names = {key: [field.name for field in dataclasses.fields(cls)] for key, cls in classes.items()}
    names["pattern"] += ["preset", "full_heads"]
    found = {f"{key}.{name}": _reference(classes[key].__name__, name) for key in names for name in names[key]}
    for setting, (registry, base) in METHODS.items():
        shared = ["method", *(field.name for field in dataclasses.fields(base))]
        own = (field.name for name in registry for field in dataclasses.fields(resolve(name, registry, setting)))
        found |= {f"engine.{setting}.{name}": {} for name in own}
        found |= {f"engine.{setting}.{name}": _reference(setting, name) for name in shared}
    return found


def _nested(key: str) -> Schema:
    """Returns what a row may have below a key, by the rest of the dotted keys."""
    names = {name.removeprefix(f"{key}."): value for name, value in _dotted().items() if name.startswith(f"{key}.")}
    deeper = {name.replace(rf"^{key}\.", "^"): {} for name in _DEEPER if name.startswith(rf"^{key}\.")}
    return _object(names, deeper)


def _methods(registry: Mapping[str, Any], base: type) -> Schema:
    """Returns the schema of a setting {"method": name, and the method's fields}."""
    shared, own = _fields(base), {name: _fields(resolve(name, registry, "method")) for name in registry}
    given = {"required": ["method"]}
    anywhere = {name for fields in own.values() for name in fields}
    branches: list[Schema] = [{"if": {"not": given}, "then": _known(anywhere)}]
    for name, fields in own.items():
        theirs = {field: value for field, value in fields.items() if value != shared.get(field)}
        then = {"properties": theirs, **_known({"method", *fields})}
        branches.append({"if": {"properties": {"method": {"const": name}}, **given}, "then": then})
    return {"type": ["object", "null"], "properties": {"method": _named(registry), **shared}, "allOf": branches}


def _kv_cache_dtype() -> Schema:
    built_in = {**CODECS, **BLOCK_CODECS}
    shared = {field.name: {} for field in dataclasses.fields(Sealing)}
    sides = {side: _named(built_in) for side in "kv"}
    codecs = [find_block_codec(name)(side="k") for name in built_in]
    known = {field.name for codec in codecs for field in dataclasses.fields(codec)} - {"side"}
    both = {"properties": {side: {"enum": [*built_in]} for side in "kv"}}
    mapping = {"type": "object", "properties": {**shared, **sides}, "if": both, "then": _known({*shared, *known})}
    return {"anyOf": [_named(["auto", *built_in, *LATENT_CODECS, *KV_SPELLINGS]), mapping]}


def _fields(cls: type) -> dict[str, Schema]:
    """Returns the schema of each field of a dataclass."""
    hints, meanings = get_type_hints(cls), field_meanings(cls)
    return {field.name: _field(field, hints[field.name], meanings.get(field.name)) for field in dataclasses.fields(cls)}


def _field(field: dataclasses.Field, hint: Any, meaning: str | None) -> Schema:
    defined = EngineConfig.__name__ if field.metadata.get("engine") else _DEFINED.get(field.name)
    found = _reference(defined) if defined else _type(hint)
    check = field.metadata.get("check")
    bounds = {} if check is None else {_BOUNDS[k]: v for k, v in check.keywords.items() if k in _BOUNDS}
    found |= {name: bound for name, bound in bounds.items() if bound is not None}
    if meaning:
        found["description"] = meaning.replace("None", "null")
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
        found["default"] = default
    return found


def _type(hint: Any) -> Schema:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": [*args]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(each) for each in args]}
    if origin in (list, tuple):
        return {"type": "array", "items": _type(args[0])}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _reference(hint.__name__)
    if hint in (int, float):  # or ${context:1/4}
        return {"type": [_TYPES[hint], "string"], "pattern": r"^\$\{"}
    if hint is Any:
        return {}
    return {"type": "object" if origin is dict else _TYPES[hint]}


def _named(names: Iterable[str], own: str = ":") -> Schema:
    """Returns the schema of a name among some, or of an own one, "package.module:name"."""
    return {"anyOf": [{"enum": [*dict.fromkeys(names)]}, {"type": "string", "pattern": own}]}


def _object(fields: Mapping[str, Any], patterns: Mapping[str, Any] | None = None) -> Schema:
    more = {"patternProperties": dict(patterns)} if patterns else {}
    return {"type": "object", "properties": dict(fields), **more, "additionalProperties": False}


def _known(names: Iterable[str]) -> Schema:
    return {"propertyNames": {"enum": sorted(names)}}


def _reference(*path: str) -> Schema:
    return {"$ref": "/".join(("#/$defs", path[0], *(f"properties/{name}" for name in path[1:])))}

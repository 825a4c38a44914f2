"""Reads how a checkpoint is quantised from its config.json. Knows no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.loading.quantised.formats import Format, InFirst
from ksana_jax.models.families.fields import Fields

FIELDS = ("quantization_config", "compression_config")


def read_scheme(values: Mapping[str, Any], source: str) -> Format | None:
    """Returns the format of a checkpoint's quantised matrices, or None if its config names none.

    Lists of modules that are not quantised are not read: a matrix is quantised if it is stored so.

    Args:
      values: a parsed config.json. source: its origin, for error messages.

    Raises:
      ConfigError: the format, or a part of it, is not supported; one line names all fields concerned.
    """
    name = next((name for name in FIELDS if values.get(name)), None)
    if name is None:
        return None
    if not isinstance(values[name], dict):
        raise ConfigError(f"{source}: {name} is {checks.shown(values[name])}; must be an object")
    fields = Fields(values[name], f"{source}: {name}", {})
    method = fields.get("quant_method")
    if method not in METHODS:
        fields.problem("quant_method", method, f"supported: {', '.join(METHODS)}")
        fields.check()
    found = METHODS[method](fields)
    fields.check()
    return found


def _group_size(fields: Fields, name: str = "group_size") -> int | None:
    return None if fields.get(name) == -1 else fields.integer(name)


def _bits(fields: Fields, name: str, allowed: tuple[int, ...]) -> int:
    if fields.get(name) not in allowed:
        fields.problem(name, fields.get(name), f"supported: {' or '.join(map(str, allowed))}")
    return fields.get(name)


def _gptq(fields: Fields) -> Format:
    version = next((fields.get(name) for name in ("checkpoint_format", "format") if fields.get(name)), "gptq")
    if version not in ("gptq", "gptq_v2"):
        fields.problem("checkpoint_format", version, "supported: gptq, gptq_v2")
    fields.must_be("pack_dtype", ("int32",), "supported: int32")
    fields.must_be("is_marlin_format", (False,), "supported: false")
    rules = fields.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(str(rule).startswith("-:") for rule in rules):
        fields.problem("dynamic", rules, "supported: rules that leave modules out, which begin with -:")
    return InFirst(
        "GPTQ",
        _bits(fields, "bits", (4, 8)),
        has_zeros=not fields.flag("sym"),
        rows=1,
        columns=_group_size(fields),
        along_in=True,
        one_less=version == "gptq",
        sorts=fields.flag("desc_act"),
    )


METHODS: dict[str, Callable[[Fields], Format]] = {"gptq": _gptq}

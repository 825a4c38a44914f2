"""Reads how a checkpoint is quantised from its config.json. Knows no files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.loading.quantised.formats import MXFP4, Format, InFirst, OutFirst
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
    if not isinstance(method, str) or method not in METHODS:
        fields.problem("quant_method", method, f"supported: {', '.join(METHODS)}")
        fields.check()
    found = METHODS[method](fields)
    fields.check()
    return found


def _group_size(fields: Fields, name: str = "group_size") -> int | None:
    return None if fields.get(name) == -1 else fields.integer(name)


def _bits(fields: Fields, name: str, allowed: tuple[int, ...]) -> int:
    if not checks.is_integer(fields.get(name)) or fields.get(name) not in allowed:
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
        method="GPTQ",
        bits=_bits(fields, "bits", (4, 8)),
        has_zeros=not fields.flag("sym"),
        rows=1,
        columns=_group_size(fields),
        along_in=True,
        one_less=version == "gptq",
        sorts=fields.flag("desc_act"),
    )


def _awq(fields: Fields) -> Format:
    version = next((name for name in ("version", "checkpoint_format", "format") if fields.get(name)), "version")
    if str(fields.get(version) or "gemm").lower() != "gemm":
        fields.problem(version, fields.get(version), "supported: gemm")
    if fields.get("backend") == "llm-awq":
        fields.problem("backend", "llm-awq", "which packs in another way; supported: others")
    fields.must_be("zero_point", (True,), "supported: true")
    bits, size = (next((n for n in names if fields.get(n) is not None), names[0]) for names in _AWQ_NAMES)
    return InFirst(
        method="AWQ",
        bits=_bits(fields, bits, (4,)),
        has_zeros=True,
        rows=1,
        columns=_group_size(fields, size),
        along_in=False,
    )


def _compressed(fields: Fields) -> Format:
    """Reads compressed-tensors; all groups of modules must be quantised alike."""
    stored, bits = _STORED.get(str(fields.get("format")), ("I32", (4, 8)))
    if fields.get("format") not in (*_STORED,):
        fields.problem("format", fields.get("format"), f"supported: {', '.join(_STORED)}")
    fields.must_be("kv_cache_scheme", (), "supported: null")
    for name in ("sparsity_config", "transform_config"):
        given = fields.get(name)
        if given and not (isinstance(given, dict) and given.get("format") == "dense"):
            fields.problem(name, given, "supported: null")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not (flat := [_flat(group) for group in groups.values()]) or None in flat:
        fields.problem("config_groups", groups, "must have groups, with weights of settings")
    elif any(group != flat[0] for group in flat):
        fields.problem("config_groups", list(groups), "supported: groups that are quantised alike")
    fields.check()
    of_group = Fields(flat[0] or {}, f"{fields.source}: config_groups", {"weights.symmetric": True})
    if of_group.get("input_activations") and of_group.get("input_activations.dynamic") is not True:
        of_group.problem("input_activations.dynamic", of_group.get("input_activations.dynamic"), "supported: true")
    of_group.must_be("output_activations", (), "supported: null")
    kind = "float" if stored == "F8_E4M3" else "int"
    if of_group.get("weights.type") != kind:
        of_group.problem("weights.type", of_group.get("weights.type"), f"supported by {fields.get('format')}: {kind}")
    num_bits, has_zeros = _bits(of_group, "weights.num_bits", bits), not of_group.flag("weights.symmetric")
    if has_zeros and kind == "float":
        of_group.problem("weights.symmetric", False, "supported by float-quantized: true")
    rows, columns = _block(of_group, stored)
    of_group.check()
    return OutFirst(
        method="compressed-tensors",
        bits=num_bits,
        has_zeros=has_zeros,
        rows=rows,
        columns=columns,
        stored=stored,
        sorts=of_group.get("weights.actorder") not in (None, False, "weight", "static"),
    )


def _flat(group: Any) -> dict[str, Any] | None:
    """Returns the settings of a group as "weights.num_bits" and so on, or None if they are not a group's."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        return None
    parts = {name: group.get(name) for name in ("weights", "input_activations", "output_activations")}
    inner = {f"{name}.{key}": v for name, part in parts.items() if isinstance(part, dict) for key, v in part.items()}
    return parts | inner


def _block(fields: Fields, stored: str) -> tuple[int | None, int | None]:
    """Returns the rows and columns of a matrix that share a scale, None for all."""
    size = fields.get("weights.group_size")
    strategy = fields.get("weights.strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "group":
        return 1, fields.integer("weights.group_size")
    if strategy == "block" and stored == "F8_E4M3":
        return _block_size(fields, "weights.block_structure")
    supported = ["channel", "group"] + ["tensor"] * (stored != "I32") + ["block"] * (stored == "F8_E4M3")
    if strategy not in supported:
        fields.problem("weights.strategy", strategy, f"supported: {', '.join(supported)}")
    return (1 if strategy == "channel" else None), None


def _block_size(fields: Fields, name: str) -> tuple[int, int]:
    sizes = fields.get(name)
    if isinstance(sizes, str) and re.fullmatch("[0-9]{1,9}x[0-9]{1,9}", sizes):  # of older compressed-tensors
        sizes = [int(size) for size in sizes.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2 or any(checks.integer(name, size, 1) for size in sizes):
        fields.problem(name, sizes, "supported: rows and columns of a block, such as [128, 128]")
        return 1, 1
    return sizes[0], sizes[1]


def _fp8(fields: Fields) -> Format:
    fields.must_be("activation_scheme", ("dynamic",), "supported: dynamic")
    fields.must_be("fmt", ("e4m3",), "supported: e4m3")
    fields.must_be("kv_cache_scheme", (), "supported: null")
    rows, columns = _block_size(fields, "weight_block_size")
    return OutFirst(
        method="FP8",
        bits=8,
        has_zeros=False,
        rows=rows,
        columns=columns,
        stored="F8_E4M3",
        scale="weight_scale_inv",
    )


METHODS: dict[str, Callable[[Fields], Format]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": lambda fields: MXFP4(),
}
# AWQ's fields by their present name and the one in older configs.
_AWQ_NAMES = (("bits", "w_bit"), ("group_size", "q_group_size"))
# Dtype of the codes, and their possible bits, by format of compressed-tensors.
_STORED = {"pack-quantized": ("I32", (4, 8)), "int-quantized": ("I8", (8,)), "float-quantized": ("F8_E4M3", (8,))}

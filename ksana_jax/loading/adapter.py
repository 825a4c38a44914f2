"""Reads LoRA adapters from folders that PEFT writes: adapter_config.json and adapter_model.safetensors.

W x becomes W x + s B A x, with s = lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora` (arXiv:2106.09685,
2312.03732); with `use_dora`, the rows of W + s B A get stored lengths (arXiv:2402.09353). Whatever else in a config
would change this is refused by name.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.sources.hub import ADAPTER
from ksana_jax.loading.config_json import read_json
from ksana_jax.loading.find import usual_name
from ksana_jax.loading.load import all_finite, array_dtype
from ksana_jax.loading.tensor_files import SafetensorsTensor, read_header
from ksana_jax.loading.views import sources_of
from ksana_jax.models.adapted import AdapterWeights, LayerAdapter, adaptable
from ksana_jax.models.params import is_shape, param_shapes

logger = logging.getLogger("ksana_jax")
CONFIG, WEIGHTS = ADAPTER
PREFIX = "base_model.model."
MAX_RANK = 4096
# Fields of PEFT's LoraConfig that are read here, and others that change no result of a finished adapter.
_READ = "peft_type r lora_alpha use_rslora use_dora rank_pattern alpha_pattern bias init_lora_weights"
_WITHOUT_EFFECT = (
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules "
    "exclude_modules lora_dropout fan_in_fan_out layers_to_transform layers_pattern megatron_core runtime_config "
    "eva_config qalora_group_size ensure_weight_tying"
)
_REASONS = {"modules_to_save": ": each slot would hold whole matrices; merge the adapter into a model of its own"}
# Why a linear module takes no adapter, by the last part of its name.
_DIVIDED = {
    "kv_b_proj": ": the engine divides it into UK and UV, which multiply queries and weighted sums head by head; merge "
    "the adapter into the model",
}
_KNOWN = {*_READ.split(), *_WITHOUT_EFFECT.split()}
# Initialisations that leave the model's own weights as they are.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_KEY = re.compile(r"(.+)\.lora_(A\.weight|B\.weight|magnitude_vector)")
_A, _B, _LENGTHS = "A.weight", "B.weight", "magnitude_vector"
# Pieces of the keys of rank_pattern and alpha_pattern, and the most characters that all keys of one have.
_PIECES = re.compile(r"\.\*|\\[\W_]|\((?:\?:)?|[\w.^$|)-]")
_SUPPORTED = "names, '.*' and alternatives such as (q_proj|v_proj)"
MAX_PATTERN_LENGTH = 2**18
MAX_CHECKED = 1000  # keys; adapters in use have one for each module at most


class HostAdapter(NamedTuple):
    """An adapter in host memory.

    layers: its changes, in the type of the engine. lengths: float32 [out] by field of each layer, that rows of the
    changed matrices have; None without `use_dora`. digest: of both, 64 hex digits.
    """

    layers: tuple[LayerAdapter, ...]
    lengths: tuple[Mapping[str, np.ndarray], ...] | None
    rank: int
    digest: str


class Module(NamedTuple):
    """A linear module of the model. fields: (layer, field of LayerParams, its rows of the module or None for all)."""

    rows: int
    columns: int
    fields: list[tuple[int, str, np.ndarray | None]]


def read_adapter(folder: Path, config: ModelConfig, dtype: str, max_rank: int) -> HostAdapter:
    """Reads an adapter of a model.

    Args:
      dtype: of its matrices in memory. max_rank: maximum rank of each.

    Raises:
      ConfigError: adapter_config.json is missing or is not JSON.
      LoadError: the adapter is of another model or kind, its rank is larger, or its values are not finite; one line
        names what cannot be used.
    """
    settings = read_json(folder / CONFIG)
    source = str(folder / CONFIG)
    _check_settings(settings, source)
    if not (folder / WEIGHTS).is_file():
        raise LoadError(f"{folder / WEIGHTS} is missing or not a file")
    tensors, modules = read_header(folder / WEIGHTS), modules_of(config)
    ranks, alphas = (_patterns(settings, name, source) for name in ("rank_pattern", "alpha_pattern"))
    layers: list[dict[str, AdapterWeights]] = [{} for _ in config.layers]
    lengths: list[dict[str, np.ndarray]] = [{} for _ in config.layers]
    has_lengths, largest, adapted = bool(settings.get("use_dora")), 0, []
    for name, found in _found(tensors, config, modules, has_lengths):
        module, a, b = modules[name], found[_A], found[_B]
        rank = a.shape[0]
        _check_shapes(name, module, found, _of_module(ranks, name, settings["r"]), max_rank)
        alpha = _of_module(alphas, name, settings["lora_alpha"])
        scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        low, high = _values(a, 1.0, dtype), _values(b, scale, dtype)
        of_rows = _values(found[_LENGTHS], 1.0, "f32").reshape(-1) if has_lengths else None
        for layer, field, rows in module.fields:
            layers[layer][field] = AdapterWeights(low, high if rows is None else high[rows])
            if of_rows is not None:
                lengths[layer][field] = of_rows if rows is None else of_rows[rows]
        largest = max(largest, rank)
        adapted.append(name)
    if not largest:
        raise LoadError(f"{folder / WEIGHTS} has no matrices of an adapter")
    ends = {module[place:] for module in adapted for place in (0, *(m.end() for m in re.finditer(r"\.", module)))}
    for name, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for key, pattern in list(zip(settings.get(name) or (), patterns))[:MAX_CHECKED]:
            if key not in ends and not any(_of_module([pattern], module, None) is not None for module in adapted):
                logger.warning(
                    "%s: key %.80r of %s matches no module of the adapter, such as %s: it has no effect, as in PEFT",
                    *(source, key, name, adapted[0]),
                )
                break
    digest = _digest([*layers, *lengths] if has_lengths else layers)
    return HostAdapter(tuple(layers), tuple(lengths) if has_lengths else None, largest, digest)


def _check_settings(settings: Mapping[str, Any], source: str) -> None:
    """Checks that the settings describe a LoRA that is read here.

    Raises:
      LoadError: they do not; the line names each field that would change the result.
    """
    problems = [
        checks.integer("r", settings.get("r"), 1, MAX_RANK),
        checks.number("lora_alpha", settings.get("lora_alpha"), 0),
        checks.boolean("use_rslora", settings.get("use_rslora", False)),
        checks.boolean("use_dora", settings.get("use_dora") or False),
    ]
    for name, supported in (("peft_type", "LORA"), ("bias", "none")):
        if (value := settings.get(name)) != supported:
            problems.append(f"{name} is {value!r:.40}, supported: {supported}")
    if (start := settings.get("init_lora_weights")) not in _STARTS:
        problems.append(f"init_lora_weights is {start!r:.40}, which changes the model's own weights")
    for name, check, least in (("rank_pattern", checks.integer, 1), ("alpha_pattern", checks.number, 0)):
        if isinstance(pattern := settings.get(name) or {}, dict):
            problems += [check(f"{name}[{key!r:.60}]", value, least) for key, value in pattern.items()]
        else:
            problems.append(f"{name} is {pattern!r:.40}, must be an object of module names")
    problems += [
        f"{name} is {value!r:.60}, which is not supported{_REASONS.get(name, '')}"
        for name, value in settings.items()
        if name not in _KNOWN and value not in (None, False, "") and value != {} and value != []
    ]
    if found := [problem for problem in problems if problem]:
        raise LoadError(f"{source}: {'; '.join(found)}")


def _patterns(settings: Mapping[str, Any], name: str, source: str) -> list[tuple[list[str], Any]]:
    """Returns the keys of a pattern, cut into pieces, with their values.

    Raises:
      LoadError: a key is another kind of regular expression, of which some take exponential time.
    """
    found, keys = [], settings.get(name) or {}
    if (length := sum(map(len, keys))) > MAX_PATTERN_LENGTH:
        raise LoadError(f"{source}: {name} has {length:,} characters; supported: at most {MAX_PATTERN_LENGTH:,}")
    for key, value in keys.items():
        pieces, depth = _PIECES.findall(key), 0
        for piece in pieces:
            depth += piece.startswith("(") - (piece == ")")
            if depth < 0:
                break
        if depth or "".join(pieces) != key:
            raise LoadError(f"{source}: {name} has {key!r:.60}; supported: {_SUPPORTED}")
        found.append((["(", *pieces, ")", "$"], value))
    return found


def _of_module(patterns: Sequence[tuple[Sequence[str], Any]], module: str, otherwise: Any) -> Any:
    """Returns a module's rank or alpha: of the first key that matches the end of its name, as in PEFT."""
    places = {char: sum(1 << i for i, other in enumerate(module) if other == char) for char in module}
    return next((value for pieces, value in patterns if _matches(pieces, places, len(module))), otherwise)


def _matches(pieces: Sequence[str], places: Mapping[str, int], length: int) -> bool:
    """True if a pattern matches a name from its start, or from a dot on, to its end.

    All ways to match are followed at once: bit i of `at` is set if the pieces so far can end before character i.

    Args:
      places: bits of the characters of the name. length: of the name.
    """
    everywhere = (2 << length) - 1
    at, groups, one_way = 1 | places.get(".", 0) << 1, [], "|" not in pieces
    for piece in pieces:
        if one_way and not at:
            return False
        if piece in ("(", "(?:"):
            groups.append((at, 0))
        elif piece == "|":
            groups[-1] = (groups[-1][0], groups[-1][1] | at)
            at = groups[-1][0]
        elif piece == ")":
            at |= groups.pop()[1]
        elif piece == ".*":
            at = everywhere & -(at & -at)  # from the first place on
        elif piece in "^$":
            at &= 1 if piece == "^" else 1 << length
        else:
            at = (at if piece == "." else at & places.get(piece[-1], 0)) << 1 & everywhere
    return at != 0


def modules_of(config: ModelConfig) -> dict[str, Module]:
    """Returns the linear modules of a model that adapters may change, by name."""
    places = adaptable(config)
    found: dict[str, Module] = {}
    shapes = jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=is_shape)
    for source, (path, _) in zip(sources_of(config), shapes, strict=True):
        field = path[-1].name
        if path[0].name != "layers" or field not in places[layer := path[1].idx]:
            continue
        [(tensor, stored)] = source.tensors.items()
        rows, columns = stored[::-1] if source.transposed else stored
        module = found.setdefault(tensor.removesuffix(".weight"), Module(rows, columns, []))
        module.fields.append((layer, field, source.rows))
    return found


def _found(
    tensors: Mapping[str, SafetensorsTensor],
    config: ModelConfig,
    modules: Mapping[str, Module],
    has_lengths: bool,
) -> Iterator[tuple[str, Mapping[str, SafetensorsTensor]]]:
    """Yields the name of each adapted module with its tensors.

    Raises:
      LoadError: a tensor is none of an adapter of these modules, or lacks another; all are listed.
    """
    needed = {_A, _B} | ({_LENGTHS} if has_lengths else set())
    found: dict[str, dict[str, SafetensorsTensor]] = {}
    problems = []
    for name, stored in tensors.items():
        match = _KEY.fullmatch(name.removeprefix(PREFIX))
        module = "" if match is None else usual_name(f"{match[1]}.weight", config).removesuffix(".weight")
        if match is None or match[2] not in needed or not name.startswith(PREFIX) or module not in modules:
            reason = _DIVIDED.get(module.rpartition(".")[2], "")
            problems.append(f"{name} belongs to no linear module of this {config.family}'s layers{reason}")
        elif stored.dtype not in stored.dtypes:
            problems.append(f"{name} is {stored.dtype}, supported: {', '.join(stored.dtypes)}")
        else:
            found.setdefault(module, {})[match[2]] = stored
    for name, held in found.items():
        problems += [f"{name} has no lora_{missing}" for missing in sorted(needed - held.keys())]
    if problems:
        listed = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        path = next(iter(tensors.values())).path
        raise LoadError(f"{path}: {len(problems)} tensors do not fit: {listed}")
    yield from sorted(found.items())


def _check_shapes(name: str, module: Module, found: Mapping[str, SafetensorsTensor], rank: int, max_rank: int) -> None:
    shapes = {_A: (rank, module.columns), _B: (module.rows, rank), _LENGTHS: (module.rows,)}
    for kind, stored in found.items():
        if stored.shape != (expected := shapes[kind]):
            raise LoadError(
                f"{stored.path}: {stored.name} has shape {list(stored.shape)}, config and model give {list(expected)}"
            )
    if rank > max_rank:
        raise LoadError(f"{found[_A].path}: {name} has rank {rank}, max_lora_rank is {max_rank}")


def _values(stored: SafetensorsTensor, scale: float, dtype: str) -> np.ndarray:
    """Returns a matrix times a factor, in the type of the engine."""
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        values = (stored.read(slice(None), slice(None)).astype(np.float32) * np.float32(scale)).astype(
            array_dtype(dtype)
        )
    if not all_finite(values):
        raise LoadError(f"{stored.path}: {stored.name} has values that are NaN or infinite in {values.dtype.name}")
    return values


def _digest(layers: Sequence[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for index, layer in enumerate(layers):
        for field, held in sorted(layer.items()):
            for values in (held.a, held.b) if isinstance(held, AdapterWeights) else (held,):
                digest.update(f"{index} {field} {values.shape} {values.dtype} ".encode())
                digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()

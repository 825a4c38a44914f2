"""Keeps matrices in memory as their file stores them (`quantization: stored`): selects and reads them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.sources import model_path
from ksana_jax.devices.platforms import platform_of
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.quantised.tensor import QuantisedTensor
from ksana_jax.loading.stored_tensor import CHUNK_BYTES, StoredTensor
from ksana_jax.loading.views import PartOfTensor, sources_of
from ksana_jax.models.block_matrix import FORMS, BlockMatrix
from ksana_jax.models.params import check_quantises, heads_of, is_shape, param_shapes, stated
from ksana_jax.native.shapes import BLOCK
from ksana_jax.sharding.shares import WHOLE_WEIGHT, Share, share
from ksana_jax.sharding.specs import layer_of

logger = logging.getLogger("ksana_jax")
_IN_BLOCKS = ", ".join(name for name in FORMS if not name.startswith(("int", "fp8")))


def with_kept(config: ModelConfig, model: Any, embedding_device: str = "device") -> ModelConfig:
    """Returns a model's config with the types of the matrices that `quantization: stored` keeps.

    Args:
      model: path or name of the model; see `core.sources.model_path`.

    Raises:
      ConfigError: it has no such matrix.
    """
    if isinstance(model, ModelConfig):
        raise ConfigError("quantization is 'stored', but a ModelConfig has no file; give a model that is quantised")
    return keeping(config, find_weights(model_path(model), config), str(model), embedding_device)


def keeping(
    config: ModelConfig,
    found: Mapping[str, StoredTensor],
    source: str,
    embedding_device: str = "device",
    num_devices: int = 1,
) -> ModelConfig:
    """The same, from a checkpoint's tensors; num_devices: that divide each matrix.

    Matrices are dequantised, and named in a warning, if devices would divide their blocks.
    """
    check_quantises(config, "stored")
    paths = jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=is_shape)
    kept, cut, unkept = [], [], collections.Counter()
    for (path, shape), of_weight in zip(paths, sources_of(config), strict=True):
        field, tensors = path[-1].name, of_weight.of(found) if of_weight.tensors.keys() <= found.keys() else []
        is_stack = stated(field, "quantization").stacked
        if len(shape) != 2 + is_stack or len(tensors) != (shape[0] if is_stack else 1):
            continue
        serves = field == "head" or stated(field, "quantization").quantises
        serves |= field == "embed" and embedding_device == "device"
        if not serves:
            continue
        part = (
            share(field, shape, 0, num_devices, heads_of(field, layer_of(path, config)))
            if num_devices > 1
            else WHOLE_WEIGHT
        )
        columns, forms = len(range(shape[-1])[part.columns]), {stored.form for stored in tensors}
        first = tensors[0]
        if len(forms) > 1:
            unkept["other blocks than other experts"] += 1
        elif first.form and columns % first.block:
            cut.append(f"{first.name} ({shape[-1]} / {num_devices} = {columns} columns, blocks of {first.block})")
        elif first.form:
            kept.append((jax.tree_util.keystr(path), first.form))
        else:
            unkept[_reason(first)] += 1
    if cut:
        _warn_once(f"{source}: {len(cut)} matrices are dequantised, for devices would divide blocks: {'; '.join(cut)}")
    reasons = "; ".join(f"{count:,} have {reason}" for reason, count in unkept.items() if reason)
    if not kept:
        raise ConfigError(
            f"quantization is 'stored', but {source} stores no matrix in {_IN_BLOCKS}, or in FP8 or integers of "
            f"4 or 8 bits with groups of a multiple of {BLOCK} columns, which memory keeps"
            f"{reasons and f' ({reasons})'}; leave it out to load a checkpoint in `dtype`"
        )
    if reasons:
        _warn_once(f"{source}: quantised matrices that memory cannot keep are dequantised: {reasons}")
    if (platform := platform_of()) != "cpu":
        logger.info(
            "%s: all matrices are dequantised; only programs of CPUs keep them as stored, not %s", source, platform
        )
        kept = []
    return dataclasses.replace(config, kept=tuple(kept))


@functools.cache  # an engine opens a model for its config, and again for its weights
def _warn_once(message: str) -> None:
    logger.warning(message)


def _reason(stored: StoredTensor) -> str | None:
    """Returns why a quantised matrix is not kept, or None."""
    whole = stored.whole if isinstance(stored, PartOfTensor) else stored
    return whole.unkept if isinstance(whole, QuantisedTensor) else None


def _zeros(row: np.ndarray, count: int) -> np.ndarray:
    return np.zeros((count, *row.shape[1:]), row.dtype)


def read_kept(
    tensors: Sequence[StoredTensor], shape: tuple[int, ...], dtype: Any, share: Share = WHOLE_WEIGHT
) -> BlockMatrix:
    """Reads a matrix in blocks, a stack of them [E, out, in], or one device's part of it.

    Raises:
      LoadError: the file cannot be read, or a scale is not finite.
    """
    first = _read_matrix(tensors[0], dtype, share)
    if len(shape) == 2:
        return first
    stack = jax.tree.map(lambda part: np.empty((len(tensors), *part.shape), part.dtype), first)
    for index, stored in enumerate(tensors):
        one = _read_matrix(stored, dtype, share) if index else first
        for whole, part in zip(jax.tree.leaves(stack), jax.tree.leaves(one), strict=True):
            whole[index] = part
    return stack


def _read_matrix(stored: StoredTensor, dtype: Any, share: Share) -> BlockMatrix:
    row, last, _ = share.rows.indices(stored.shape[0])
    step = max(CHUNK_BYTES // stored.shape[1], 1)
    pieces = [stored.apart(slice(first, min(first + step, last)), share.columns) for first in range(row, last, step)]
    if share.padding or not pieces:
        codes, scales, *others = stored.apart(slice(0, 1), share.columns)
        minima, factors = (None if part is None else _zeros(part, share.padding) for part in others)
        pieces.append((_zeros(codes, share.padding), _zeros(scales, share.padding), minima, factors))
    codes: Any
    scales: Any
    minima: Any
    factors: Any
    codes, scales, minima, factors = (
        None if part[0] is None else np.concatenate(part) for part in zip(*pieces, strict=True)
    )
    is_float = stored.form is not None and FORMS[stored.form].is_float
    magnitude = 9 if is_float else 7  # of a code, at most 2 to this power
    with np.errstate(over="ignore"):
        checked = (scales, minima) if factors is None else (factors,)
        if not all(np.isfinite(numbers * np.float32(2**magnitude)).all() for numbers in checked if numbers is not None):
            limit = 127 - magnitude
            raise LoadError(f"{stored.path}: {stored.name} has scales that are NaN or infinite, or above 2 ** {limit}")
    if is_float and (codes.view(np.uint8) & 127 == 127).any():
        raise LoadError(f"{stored.path}: {stored.name} has codes that are NaN")
    return BlockMatrix(codes, scales, minima, np.dtype(dtype), factors)

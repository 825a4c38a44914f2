"""Finds the quantised matrices among the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.loading.quantised.formats import Format, TensorSpec
from ksana_jax.loading.quantised.tensor import QuantisedStack, QuantisedTensor
from ksana_jax.loading.stored_tensor import StoredTensor
from ksana_jax.loading.views import sources_of


def with_quantised(
    found: Mapping[str, StoredTensor], scheme: Format, config: ModelConfig, source: str
) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint, in which one stands for all parts of each quantised matrix.

    Raises:
      LoadError: parts of a matrix are missing, or of another shape or dtype than its format has; all are listed.
    """
    tensors, problems = dict(found), []
    expected = {name: (shape, weight) for weight in sources_of(config) for name, shape in weight.tensors.items()}
    for name, (shape, weight) in expected.items():
        if (stem := scheme.stem(name, shape)) is None:
            continue
        wanted = scheme.parts(shape)
        parts = {part: tensors.pop(stem + part) for part in wanted if _stores(found.get(stem + part), wanted[part])}
        if not parts:
            continue
        if weight.transposed and len(shape) == 2:
            problems.append(f"{name} is the transpose of a matrix, which is supported only without quantization")
        if name in found and "weight" not in wanted:
            problems.append(f"{name} is stored besides {', '.join(parts)}")
        problems += [problem for part in wanted if (problem := _problem(stem + part, found, wanted[part]))]
        path = next(iter(parts.values())).path
        kind = QuantisedTensor if len(shape) == 2 else QuantisedStack
        tensors[name] = kind(path, name, scheme.method, shape, scheme, parts)
        bias = stem + "bias"
        if bias not in expected and bias in tensors and _is_zero(tensors[bias]):
            del tensors[bias]  # AutoGPTQ adds it to layers that have none
    if problems:
        raise LoadError(f"{source}: {len(problems)} tensors do not fit {scheme}: {'; '.join(problems)}")
    return tensors


def _stores(stored: StoredTensor | None, part: TensorSpec) -> bool:
    return stored is not None and stored.dtype in part.dtypes


def _problem(name: str, found: Mapping[str, StoredTensor], part: TensorSpec) -> str | None:
    """Returns what is wrong with a part of a matrix, or None."""
    if (stored := found.get(name)) is None:
        return f"{name} is missing" if part.required else None
    if stored.dtype not in part.dtypes:
        return f"{name} is {stored.dtype}, supported: {', '.join(part.dtypes)}"
    if stored.shape != part.shape:
        return f"{name} has shape {list(stored.shape)}, the config gives {list(part.shape)}"
    return None


def _is_zero(bias: StoredTensor) -> bool:
    return bias.dtype in bias.dtypes and not any(piece.any() for _, piece in bias.chunks())

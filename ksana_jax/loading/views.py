"""Maps each weight to its place in a checkpoint: a tensor, a stack of several, or a part of one."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.gguf_file import TYPES
from ksana_jax.loading.quantised.tensor import QuantisedStack
from ksana_jax.loading.stored_tensor import Apart, StoredTensor
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.families.family import View
from ksana_jax.models.frequencies import row_order
from ksana_jax.models.params import LayerParams, is_shape, param_shapes, stated

# Fields of LayerParams whose rows belong to rotated heads, or to one such head.
ROTATED = {f"{kind}_{part}" for kind in "wb" for part in "qk"} | {f"{part}_norm" for part in ("q", "k")}
ROTATED |= {f"{part}_proj_norm" for part in "qk"}


class WeightSource(NamedTuple):
    """The tensors of one weight.

    tensors: Hugging Face name -> shape. Several are stacked; a single one may hold the weight as a part, or with its
      rows in another order.
    field: of Params or LayerParams.
    rows: rows of the single tensor that are the weight's, in order; None for all of them.
    transposed: True if the tensor's columns are the weight's rows.
    stacked: True if the single tensor is a stack of matrices [E, ...], and the weight of their parts.
    """

    tensors: dict[str, tuple[int, ...]]
    field: str = ""
    rows: np.ndarray | None = None
    transposed: bool = False
    stacked: bool = False

    def of(self, found: Mapping[str, StoredTensor]) -> list[StoredTensor]:
        """Returns tensors of a checkpoint whose values, stacked, are the weight's."""
        stored = [found[name] for name in self.tensors]
        if self.rows is None:
            return stored
        [whole] = stored
        if isinstance(whole, OfFields):
            order = np.argsort(np.argsort(self.rows))
            if np.array_equal(order, np.arange(len(order))):
                return list(whole.fields[self.field])
            return [
                PartOfTensor(m.path, m.name, m.dtype, m.shape, m, order, transposed=False)
                for m in whole.fields[self.field]
            ]
        if isinstance(whole, QuantisedStack):
            return [
                PartOfTensor(m.path, m.name, m.dtype, (len(self.rows), m.shape[1]), m, self.rows, transposed=False)
                for m in whole.matrices
            ]
        each = range(whole.shape[0]) if self.stacked else (None,)
        of_one = whole.shape[self.stacked :]
        shape = (len(self.rows), *(of_one[:-1] if self.transposed else of_one[1:]))
        return [
            PartOfTensor(whole.path, whole.name, whole.dtype, shape, whole, self.rows, self.transposed, index)
            for index in each
        ]

    def write(self, weight: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        """Writes a weight to the tensors of a checkpoint, by name; missing ones are added."""
        if self.rows is None:
            shape = next(iter(self.tensors.values()))
            tensors.update(zip(self.tensors, weight.reshape(len(self.tensors), *shape), strict=True))
            return
        [(name, shape)] = self.tensors.items()
        whole = tensors.setdefault(name, np.zeros(shape, weight.dtype))
        turned = whole.swapaxes(-1, -2) if self.transposed else whole
        turned[(slice(None), self.rows) if self.stacked else self.rows] = weight


def sources_of(config: ModelConfig) -> list[WeightSource]:
    """Returns the place of each weight, in the order of jax.tree.leaves.

    Raises:
      ConfigError: the family has no name for a weight, or a weight's rows do not divide into the groups of its view.
    """
    family, shapes, found = FAMILIES[config.family], param_shapes(config), []
    for path, shape in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_shape):
        layer = path[1].idx if path[0].name == "layers" else None
        plain = layer is not None and config.experts is not None and layer in config.experts.plain_layers
        recurrent = layer is not None and config.layers[layer].recurrent is not None
        field, name = path[-1].name, family.name(path[-1].name, layer, config.norm_placement, plain, recurrent)
        if isinstance(name, View):
            assert layer is not None, "the fields of a view are a layer's"
            source = _part(field, name, config, shapes.layers[layer])
        elif isinstance(name, tuple):
            if len(name) != shape[0]:
                raise ConfigError(f"family {config.family} names {len(name)} rows of weight {field}, it has {shape[0]}")
            source = WeightSource({row: shape[1:] for row in name})
        elif "{}" in name:
            source = WeightSource({name.format(i): shape[1:] for i in range(shape[0])})
        else:
            stored = family.stored_shapes.get(field, shape)
            source = WeightSource({name: tuple(shape[0] if n < 0 else n for n in stored)})
        if layer is not None and field in ROTATED and not recurrent:
            source = _for_rotation(source, config, layer, shape)
        found.append(source._replace(field=field))
    return found


def _for_rotation(source: WeightSource, config: ModelConfig, layer: int, shape: tuple[int, ...]) -> WeightSource:
    """Returns the places of rotated heads' rows, in the engine's order."""
    spec, neighbours = config.layers[layer].attention, FAMILIES[config.family].rotates_neighbours
    order = row_order(spec.rope, spec.head_dim, neighbours)
    if np.array_equal(order, np.arange(spec.head_dim)):
        return source
    rows = np.arange(shape[0]) if source.rows is None else source.rows
    return source._replace(rows=rows.reshape(-1, spec.head_dim)[:, order].reshape(-1))


def _part(field: str, view: View, config: ModelConfig, shapes: LayerParams) -> WeightSource:
    groups = operator.attrgetter(view.groups)(config) if view.groups else 1
    fields = view.fields or (field,)
    num_stacks = int(stated(field, "loading").stacked)
    sizes = [getattr(shapes, name)[num_stacks] for name in fields]
    for name, size in zip(fields, sizes, strict=True):
        if size % groups:
            raise ConfigError(f"{view.tensor}: {size} rows of {name} are not a multiple of {view.groups} {groups}")
    starts, at = np.cumsum([0, *sizes]) // groups, fields.index(field)
    rows = np.arange(sum(sizes)).reshape(groups, -1)[:, starts[at] : starts[at + 1]].reshape(-1)
    stack, rest = getattr(shapes, field)[:num_stacks], getattr(shapes, field)[1 + num_stacks :]
    shape = (sum(sizes), *rest)
    whole = (*stack, *(shape[::-1] if view.transposed else shape))
    return WeightSource({view.tensor: whole}, field, rows, view.transposed, bool(stack))


@dataclasses.dataclass(frozen=True, eq=False)
class OfFields(StoredTensor):
    """A tensor of several weights, from a file that has each of them apart, with its rows in order.

    fields: matrices [out, in] or vectors of each weight, by field of LayerParams; several of a stack.
    """

    fields: Mapping[str, Sequence[StoredTensor]]
    dtypes = tuple(kind.name for kind in TYPES.values())

    @property
    def value_bytes(self) -> int:
        return max(part.value_bytes for each in self.fields.values() for part in each)

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        raise NotImplementedError(f"{self.name} is read weight by weight")


@dataclasses.dataclass(frozen=True, eq=False)
class PartOfTensor(StoredTensor):
    """Rows of a tensor, or of its transpose; pieces are cut from the rows between the first and the last of them.

    index: of the matrix that they are rows of, in a stack of matrices; None if the tensor is no stack.
    """

    whole: StoredTensor
    rows: np.ndarray
    transposed: bool
    index: int | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.dtypes

    @property
    def value_bytes(self) -> int:
        return self.whole.value_bytes

    @property
    def form(self) -> str | None:
        return None if self.transposed else self.whole.form

    @property
    def block(self) -> int:
        return self.whole.block

    def apart(self, rows: slice, columns: slice) -> Apart:
        at = self.rows[rows]
        between = slice(int(at.min()), int(at.max()) + 1)
        codes, scales, *others = self.whole.apart(between, columns)
        at = at - between.start
        minima, factors = (None if part is None else part[at] for part in others)
        return codes[at], scales[at], minima, factors

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        at = self.rows[rows]
        between = slice(int(at.min()), int(at.max()) + 1)
        first, second = (columns, between) if self.transposed else (between, columns)
        if self.index is None:
            found = self.whole.read(first, second)
        else:
            found = self.whole.read(slice(self.index, self.index + 1), first)[0]
            found = found[:, second] if found.ndim > 1 else found
        return (found.T if self.transposed else found)[at - between.start]

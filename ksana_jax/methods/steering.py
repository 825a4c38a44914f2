"""Steering of single requests: vectors added to the residual stream after layers, and heads switched off.

Steps with steered rows have their own programs (`StepShape.steered`), which get the vectors with the step's arrays, so
that neither another steering nor another row compiles anything. All other steps are as they would be without this file.

Source: activation addition, arXiv:2308.10248, section 3; heads as in arXiv:1905.10650, section 2.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.per_token import of_tokens
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput, StepShape

# Different steerings in a step are 4, 16, 64 and so on: one with more has another program.
SLOTS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Steering:
    """Changes the network for all tokens of a request, those of its prompt included.

    Args:
      vectors: {layer: [D] numbers that are added to hidden states after it, in their dtype}.
      heads_off: {layer: its query heads whose result is 0}. Their keys stay in the cache, and eviction methods count
        their attention.

    Raises:
      ValueError: it changes nothing, or has anything else than finite vectors and heads of layers.
    """

    vectors: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    heads_off: Mapping[int, Sequence[int] | np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, read in (("vectors", _vector), ("heads_off", _heads)):
            if not isinstance(given := getattr(self, name), Mapping):
                raise ValueError(f"steering: {name} is {checks.shown(given)}, must be a dict with layers as keys")
            checks.require(*(checks.integer(f"steering: a layer of {name}", layer, 0) for layer in given))
            found = {layer: read(f"steering: {name}[{layer}]", given[layer]) for layer in sorted(given)}
            object.__setattr__(self, name, found)
        if not self.vectors and not self.heads_off:
            raise ValueError("steering changes nothing: give vectors or heads_off")

    @functools.cached_property
    def digest(self) -> str:
        """Digest of its contents, 32 hex digits."""
        return hashlib.sha256(repr(self.plain()).encode()).hexdigest()[:32]

    def plain(self) -> dict[str, Any]:
        """Returns its arguments as lists."""
        return {"vectors": {k: v.tolist() for k, v in self.vectors.items()}, "heads_off": dict(self.heads_off)}


def check_steering(given: Any, model: ModelConfig) -> None:
    """Raises ValueError unless a request's steering fits a model's layers, heads and hidden states."""
    if not isinstance(given, Steering):
        raise ValueError(f"steering is of type {type(given).__name__}, must be a ksana_jax.Steering")
    layer, head = model.num_layers - 1, model.num_heads - 1
    for name in ("vectors", "heads_off"):
        checks.require(*(checks.integer(f"steering: a layer of {name}", n, 0, layer) for n in getattr(given, name)))
    for n, vector in given.vectors.items():
        if (count := len(vector)) != model.d_model:
            raise ValueError(f"steering: vectors[{n}] has {count:,} numbers, hidden states have {model.d_model:,}")
    for n, heads in given.heads_off.items():
        if model.layers[n].recurrent is not None:
            raise ValueError(f"steering: heads_off has layer {n}, which is recurrent and has no heads")
        checks.require(*(checks.integer(f"steering: a head of heads_off[{n}]", one, 0, head) for one in heads))


def _vector(name: str, given: Any) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            vector = np.array(given, np.float64).astype(np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {checks.shown(given)}, must be a vector of numbers") from None
    if vector.ndim != 1:
        raise ValueError(f"{name} has the shape {list(vector.shape)}, must be a vector")
    if bad := np.count_nonzero(~np.isfinite(vector)):
        raise ValueError(f"{name} has {bad:,} of {len(vector):,} numbers that are not finite in float32")
    vector.flags.writeable = False
    return vector


def _heads(name: str, given: Any) -> tuple[int, ...]:
    heads = np.asarray(given).tolist() if isinstance(given, (list, tuple, np.ndarray)) else None
    if not heads or not isinstance(heads, list):
        raise ValueError(f"{name} is {checks.shown(given)}, must be a list of heads")
    checks.require(*(checks.integer(f"a head of {name}", head, 0) for head in heads))
    return tuple(sorted({*heads}))


class Steered(NamedTuple):
    """Steering of a step's tokens, NumPy or jax; S is `StepShape.steered`.

    slots: [T] of each token, -1 for none. vectors: [S, L, D] float32. kept: [S, L, N] float32, 0 for heads off.
    """

    slots: Any
    vectors: Any
    kept: Any

    @staticmethod
    def shapes(shape: StepShape, model: ModelConfig, array: Callable[[tuple[int, ...], Any], Any]) -> Steered:
        """Returns the arrays of a step, each made by `array` from its shape and dtype."""
        vectors, kept = ((shape.steered, model.num_layers, width) for width in (model.d_model, model.num_heads))
        return Steered(array((shape.num_tokens,), np.int32), array(vectors, np.float32), array(kept, np.float32))


def steer(model: ModelConfig, step: StepInput, batch: ScheduledBatch, rows: Rows, ends: np.ndarray) -> None:
    """Adds the steering of its rows to a step, if there is any. ends: as in `per_token.query_numbers`."""
    of_rows = [None if (seq := rows.seqs[row]) is None else seq.steering for row in batch.rows.tolist()]
    used = {steering.digest: steering for steering in of_rows if steering is not None}
    if not used:
        return
    size, places = SLOTS, {digest: slot for slot, digest in enumerate(sorted(used))}
    while size < len(used):
        size *= SLOTS
    slots = np.array([-1 if steering is None else places[steering.digest] for steering in of_rows], np.int32)
    tables = _tables(tuple(map(used.get, places)), size, model.num_layers, model.d_model, model.num_heads)
    step.shape = step.shape._replace(steered=size)
    step.arrays = step.arrays._replace(steering=Steered(of_tokens(slots, step.shape, batch, ends), *tables))


@functools.lru_cache(maxsize=4)
def _tables(used: tuple[Any, ...], size: int, num_layers: int, d_model: int, num_heads: int) -> Sequence[np.ndarray]:
    """Returns vectors and kept heads of `Steered`."""
    vectors, kept = (
        np.zeros((size, num_layers, d_model), np.float32),
        np.ones((size, num_layers, num_heads), np.float32),
    )
    for slot, steering in enumerate(used):
        for layer, vector in steering.vectors.items():
            vectors[slot, layer] = vector
        for layer, heads in steering.heads_off.items():
            kept[slot, layer, list(heads)] = 0
    return vectors, kept


def steered(
    attend: Callable[..., Any], given: Steered, layers: Sequence[Any], of_heads: Callable[[Any], Any], xp: Any
) -> tuple[Callable[..., Any], Callable[[int, Any], Any]]:
    """Returns an `Attend` without heads that are off, and a function (index, x) that adds the vectors after a layer.

    Args:
      layers: number in the model of each layer, which may be traced. of_heads: `Operators.of_heads`. xp: jax.numpy.
    """
    row, is_steered = xp.maximum(given.slots, 0), (given.slots >= 0)[:, None]

    def attend_with(index: int, q: Any, k: Any, v: Any, state: Any, *indexed: Any) -> tuple[Any, Any]:
        out, state = attend(index, q, k, v, state, *indexed)
        kept = of_heads(given.kept[:, layers[index]].T)[:, row].T
        return xp.where(is_steered[..., None] & (kept == 0)[..., None], 0, out), state

    def after_layer(index: int, x: Any) -> Any:
        return xp.where(is_steered, x + given.vectors[:, layers[index]][row].astype(x.dtype), x)

    return attend_with, after_layer

"""The field `full_heads` of a pattern: kv heads that attend to the whole sequence, while the others follow the pattern.

Source: DuoAttention, arXiv:2410.10819: retrieval heads keep all tokens, streaming heads sinks and recent ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.statistics import read_statistics

KIND = "duoattention"
# For each layer its heads, counted from 0; or fields of `ChosenHeads`.
FullHeads: TypeAlias = Sequence[Sequence[int]] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ChosenHeads:
    """Chooses a share of a model's kv heads, in all layers together.

    Args:
      share: of all kv heads, from 0 to 1; the paper's for models with grouped queries.
      statistics: a file of `ksana calibrate --for duoattention`, whose scores say which heads need the whole sequence;
        None draws heads by the seed.
      lowest: True takes the heads with the lowest scores, as a control.
      seed: of the draw.
    """

    share: float = 0.5
    statistics: str | None = None
    lowest: bool = False
    seed: int = 0

    def heads(self, num_layers: int, num_kv_heads: int) -> list[list[int]]:
        """Returns the heads of each layer.

        Raises:
          ConfigError: a value is out of range, or the file does not belong to a model of this shape.
        """
        problems = checks.number("full_heads.share", self.share, 0, 1), checks.integer("full_heads.seed", self.seed, 0)
        checks.require(*problems, error=ConfigError)
        if self.statistics is None:
            scores = np.random.default_rng(self.seed).random((num_layers, num_kv_heads))
        else:
            scores = read_scores(self.statistics, num_layers, num_kv_heads)
        order = np.argsort(scores if self.lowest else -scores, axis=None, kind="stable")
        chosen = np.zeros(scores.size, bool)
        chosen[order[: round(self.share * scores.size)]] = True
        return [np.flatnonzero(row).tolist() for row in chosen.reshape(scores.shape)]


def read_full_heads(given: FullHeads, num_layers: int, num_kv_heads: int) -> list[list[int]]:
    """Returns for each layer its kv heads, in rising order, that `full_heads` names.

    Raises:
      ConfigError: it names no heads of a model of this shape.
    """
    if isinstance(given, Mapping):
        known = [field.name for field in dataclasses.fields(ChosenHeads)]
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"pattern.full_heads has no field {unknown[0]!r}, only {', '.join(known)}")
        return ChosenHeads(**given).heads(num_layers, num_kv_heads)
    if not isinstance(given, (list, tuple)) or len(given) != num_layers:
        raise ConfigError(
            f"pattern.full_heads is {given!r:.60}, must be a list with the kv heads of each of {num_layers} layers, or "
            "{share: 0.5, statistics: heads.npz}"
        )
    for heads in given:
        if not isinstance(heads, (list, tuple)) or any(checks.integer("", n, 0, num_kv_heads - 1) for n in heads):
            raise ConfigError(
                f"pattern.full_heads has {heads!r:.60}, must be a list of kv heads 0 to {num_kv_heads - 1}"
            )
    return [sorted(set(heads)) for heads in given]


def read_scores(path: str | Path, num_layers: int, num_kv_heads: int) -> np.ndarray:
    """Returns the scores [L, K] of a file of `ksana calibrate --for duoattention`.

    Raises:
      ConfigError: there is no such file, or it has scores of another kind or shape.
    """
    scores = read_statistics(Path(path).expanduser(), KIND).arrays["scores"]
    if scores.shape != (num_layers, num_kv_heads):
        raise ConfigError(
            f"statistics {path} have scores {list(scores.shape)}, the model has {num_layers} layers of {num_kv_heads} "
            "kv heads"
        )
    return scores

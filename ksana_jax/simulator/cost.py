"""What steps cost: seconds by their sizes. Cost models are read from JSON files that say where their times are from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ksana_jax import checks
from ksana_jax.errors import ConfigError
from ksana_jax.simulator.step_size import StepSize

FORMAT = 1


class Cost(Protocol):
    """The time that steps take."""

    def seconds(self, size: StepSize) -> float:
        """Returns the seconds of the device for a step, without the moves of its blocks. Asked once for each step, in
        their order."""
        ...

    def move_seconds(self, size: StepSize) -> float:
        """Returns the seconds of the moves before a step."""
        ...

    def moving_seconds(self, num_saved: int, num_copied: int, num_loaded: int) -> float:
        """Returns the seconds to move blocks."""
        ...

    def host_seconds(self, size: StepSize) -> float:
        """Returns the seconds of the host for a step: to schedule, to build and to report it."""
        ...


@dataclasses.dataclass(frozen=True)
class HostCost:
    """Seconds of the host for a step, by its rows: what it takes in any case, and for each row and each chunk token."""

    step_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, size: StepSize) -> float:
        return self.step_s + self.row_s * size.num_rows


@dataclasses.dataclass(frozen=True)
class MoveCost:
    """Seconds to move a block: to the host, on the device, and from the host."""

    saved_s: float = 0.0
    copied_s: float = 0.0
    loaded_s: float = 0.0

    def seconds(self, num_saved: int, num_copied: int, num_loaded: int) -> float:
        return self.saved_s * num_saved + self.copied_s * num_copied + self.loaded_s * num_loaded


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Host and moves, which all models of costs have besides the step itself."""

    host: HostCost = dataclasses.field(default_factory=HostCost, kw_only=True)
    move: MoveCost = dataclasses.field(default_factory=MoveCost, kw_only=True)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)

    def move_seconds(self, size: StepSize) -> float:
        return self.move.seconds(size.num_saved, size.num_copied, size.num_loaded)

    def moving_seconds(self, num_saved: int, num_copied: int, num_loaded: int) -> float:
        return self.move.seconds(num_saved, num_copied, num_loaded)

    def host_seconds(self, size: StepSize) -> float:
        return self.host.seconds(size)


@dataclasses.dataclass(frozen=True)
class AffineCost(_Parts):
    """Seconds that grow with a step's tokens, what they attend to, and the tokens sampled; nothing depends on shapes.

    step_s: of any step. token_s: for each token. pair_s: for each pair of a token and one that it sees. sampled_s: for
    each token sampled.
    """

    step_s: float
    token_s: float
    pair_s: float = 0.0
    sampled_s: float = 0.0

    def __post_init__(self):
        names = ("step_s", "token_s", "pair_s", "sampled_s")
        checks.require(*(checks.number(name, getattr(self, name), 0) for name in names), error=ConfigError)

    def seconds(self, size: StepSize) -> float:
        return (
            self.step_s
            + self.token_s * size.num_tokens
            + self.pair_s * size.num_attended
            + self.sampled_s * size.num_sampled
        )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> AffineCost:
        """Returns the model of the fields of a JSON object.

        Raises:
          ConfigError: a field is missing, unknown or out of range.
        """
        given = dict(fields)
        host = _read_part(HostCost, given.pop("host", {}))
        move = _read_part(MoveCost, given.pop("move", {}))
        provenance = given.pop("provenance", {})
        known = {"step_s", "token_s", "pair_s", "sampled_s"}
        if unknown := sorted(given.keys() - known):
            raise ConfigError(f"cost has {unknown[0]!r}, fields are {', '.join(sorted(known))}, host, move, provenance")
        if missing := sorted({"step_s", "token_s"} - given.keys()):
            raise ConfigError(f"cost has no {missing[0]!r}")
        return cls(**given, host=host, move=move, provenance=provenance)


def _read_part(kind: type, fields: Mapping[str, Any]) -> Any:
    names = [f.name for f in dataclasses.fields(kind)]
    if unknown := sorted(fields.keys() - set(names)):
        raise ConfigError(f"cost has {unknown[0]!r}, its {kind.__name__} has {', '.join(names)}")
    checks.require(*(checks.number(name, value, 0) for name, value in fields.items()), error=ConfigError)
    return kind(**fields)


# Readers of models of costs by their level, from the fields of a JSON object.
COSTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {"affine": AffineCost.read}


def read_cost(given: Mapping[str, Any] | str | Path) -> Any:
    """Returns a model of costs: of a mapping with a "level" and its fields, or of a JSON file of `ksana simulate fit`.

    Raises:
      ConfigError: there is no such file or level, or a field is wrong.
    """
    if not isinstance(given, Mapping):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cost {given!s}: {error}") from None
        if not isinstance(given, Mapping):
            raise ConfigError("cost: the file has no JSON object")
    fields = dict(given)
    if (format := fields.pop("format", FORMAT)) != FORMAT:
        raise ConfigError(f"cost has format {format}, this version reads {FORMAT}")
    level = fields.pop("level", None)
    checks.require(checks.one_of("cost.level", level, COSTS), error=ConfigError)
    return COSTS[level](fields)

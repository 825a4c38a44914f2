"""Files with the records of an engine's steps, from which costs are fitted: lines of JSON, the first about the engine.

No jax.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.scheduler.step.types import Part, StepShape

FORMAT = 1
KIND = "steps"


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of an engine, and what they ran on.

    about: plain values: model, settings, device, versions, blocks of the pool and their bytes, when it was, other load.
    """

    about: Mapping[str, Any]
    records: Sequence[StepRecord]


def write_steps(path: Path, about: Mapping[str, Any], records: Iterable[StepRecord]) -> None:
    """Writes the records of an engine's steps; `LLM.records`, for example."""
    lines = [json.dumps({"kind": KIND, "format": FORMAT, **about})]
    lines += [json.dumps(record._asdict() | {"shape": plain_shape(record.shape)}) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "\n".join(lines) + "\n")


def read_steps(path: str | Path) -> Steps:
    """Reads a file of `write_steps`.

    Raises:
      ConfigError: there is no such file, or it is another one.
    """
    try:
        header, *lines = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        known = header.pop("kind", None) == KIND
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        known = False
    if not known:
        raise ConfigError(f"{path} has no steps: `ksana simulate record` writes them")
    if (format := header.pop("format", None)) != FORMAT:
        raise ConfigError(f"{path} has steps of format {format}, this version reads {FORMAT}")
    records = [_read_record(path, number, line) for number, line in enumerate(lines, 2)]
    if not records:
        raise ConfigError(f"{path} has no steps: nothing was computed")
    return Steps(header, records)


def _read_record(path: str | Path, number: int, line: Any) -> StepRecord:
    """Returns the step of one line.

    Raises:
      ConfigError: it is no step; names the file, the line and what is wrong.
    """
    try:
        record = StepRecord(**line | {"shape": read_shape(line["shape"])})
    except KeyError as error:
        raise ConfigError(f"{path}, line {number:,}: there is no field {error}") from None
    except (TypeError, ValueError):
        raise ConfigError(f"{path}, line {number:,} is {checks.shown(line)}, must be the fields of a step") from None
    for name, value in record._asdict().items():
        if name not in ("shape", "compiled"):
            checks.require(checks.number(f"{path}, line {number:,}: {name}", value), error=ConfigError)
    return record


def plain_shape(shape: StepShape) -> list[Any]:
    """Returns a shape as lists of numbers."""
    return [[list(part) for part in shape.parts], *shape[1:]]


def read_shape(given: Sequence[Any]) -> StepShape:
    """Returns the shape of `plain_shape`."""
    parts, *others = given
    return StepShape(tuple(Part(*part) for part in parts), *others)


def sizes_of(records: Sequence[StepRecord]) -> list[StepSize]:
    """Returns the sizes of recorded steps."""
    chunks = [False, *(record.num_chunks > 0 for record in records)]
    return [_size_of(record, after_chunk) for record, after_chunk in zip(records, chunks, strict=False)]


def _size_of(record: StepRecord, after_chunk: bool) -> StepSize:
    return StepSize(
        record.shape,
        record.num_sampled,
        record.num_tokens,
        record.num_chunk_tokens,
        record.num_attended,
        record.num_decodes + record.num_chunks,
        record.num_saved,
        record.num_copied,
        record.num_loaded,
        after_chunk,
    )


def device_seconds(records: Sequence[StepRecord]) -> list[float]:
    """Returns the time of each step on the device: from its submission, or from the end of the one before it if that
    was later, to its end.

    Where the host takes longer than the device, this is the host's time: a bound, which only matters where the same
    steps meet a faster host.
    """
    before, found = -float("inf"), []
    for record in records:
        found.append(record.ended_s - max(record.began_s, before))
        before = record.ended_s
    return found


def usable(records: Sequence[StepRecord]) -> list[bool]:
    """Returns whether the time of each step is that of a step alone: neither it nor one beside it was compiled, and it
    is not the first of its shape."""
    seen: set[StepShape] = set()
    found = []
    for at, record in enumerate(records):
        compiled = any(near.compiled for near in records[max(at - 1, 0) : at + 2])
        found.append(not compiled and record.shape in seen)
        seen.add(record.shape)
    return found

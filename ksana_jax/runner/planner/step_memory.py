"""Memory of a compiled step besides weights and pool: its arrays, results and temporary buffers.

Programs are compiled from shapes alone, so a model of any size can be examined anywhere. Where a step is one program,
two and three layers of a deep model are compiled: each further layer adds as much as the third did, which is little,
since XLA for GPUs mostly reuses the buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from ksana_jax.core.compilation_cache import without_cache
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.operator_settings import AUTO, OperatorSettings
from ksana_jax.core.patterns import FULL
from ksana_jax.core.request import SamplingParams
from ksana_jax.devices.capabilities import stored_as_bits
from ksana_jax.devices.platforms import platform_of
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.loading.load import abstract_params
from ksana_jax.runner.decode_loop import LoopKey, only_decodes
from ksana_jax.runner.keys import keys_for
from ksana_jax.runner.program_memory import bytes_of
from ksana_jax.runner.runner import Runner
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.scheduler.step.ladders import most_tiles
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from ksana_jax.sharding.absent import place_on_absent
from ksana_jax.sharding.placement import Placement
from pallas_kernels import aot

# A `kv_cache_dtype`.
KVDtype: TypeAlias = str | dict[str, Any]
# Number of layers compiled from a deeper model, where a step is one program.
FEW, ONE_MORE = 2, 3
# A step's size does not depend on the number of blocks.
NUM_BLOCKS = 256


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of a step's programs, which run one after the other: evictions, the network, and sampling.

    Choosing uses temperature; penalties, biases and log-probabilities take more arrays of the vocabulary's size.
    """

    network: int
    sampling: int
    evicting: int = 0

    @property
    def peak(self) -> int:
        return max(self.network, self.sampling, self.evicting)


@dataclasses.dataclass(frozen=True)
class Line:
    """Bytes of one program at R rows and tables of width P:
    fixed + per_row * R + per_entry * (R + tiles) * P + per_width * P.

    tiles: query tiles of longer chunks, which have block tables too.
    """

    fixed: float
    per_row: float
    per_entry: float
    tiles: int
    per_width: float = 0

    def alpha(self, width: int) -> int:
        """Returns the bytes per row, at a width of the block tables."""
        return math.ceil(self.per_row + self.per_entry * width)

    def constant(self, width: int) -> int:
        """Returns the bytes without rows, at a width of the block tables."""
        return math.ceil(self.fixed + (self.per_entry * self.tiles + self.per_width) * width)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """A step's bytes as a function of its rows: the maximum over its programs.

    target: the target that it was compiled for.
    """

    lines: tuple[Line, ...]
    target: str

    def line(self, rows: int, width: int) -> Line:
        """Returns the line of the program that takes the most memory."""
        return max(self.lines, key=lambda line: line.constant(width) + line.alpha(width) * rows)

    def bytes(self, rows: int, width: int) -> int:
        line = self.line(rows, width)
        return line.constant(width) + line.alpha(width) * rows


NO_STEP = StepCost((Line(0, 0, 0, 0),), "nothing")


def described(target: aot.Target | None = None) -> str:
    """Names the device that steps are compiled for: an absent GPU, or this process's device."""
    device = aot.device(target) if target else jax.local_devices()[0]
    return f"{platform_of(device)} ({device.device_kind}), jax {jax.__version__}"


def program_bytes(compiled: Any) -> int | None:
    """Returns the bytes that a compiled step or another program takes while it runs, besides weights and pool.

    A pool that cannot be donated is among the results of a step a second time, which is not counted here either. None
    if the device's compiler does not report them.
    """
    found = [bytes_of(program) for program in compiled_programs(compiled)]
    known = [size for size in found if size is not None]
    return max(known) if len(known) == len(found) else None


def step_bytes(
    config: ModelConfig,
    shapes: Sequence[StepShape],
    *,
    dtype: str,
    quantization: str | None = None,
    kv_dtype: KVDtype | None = None,
    kv_full_precision_layers: tuple[int, ...] = (),
    kv_eviction: dict[str, Any] | None = None,
    block_size: int,
    max_model_len: int | None = None,
    max_repositioned_sinks: int = 0,
    embedding_device: str = "device",
    settings: OperatorSettings = AUTO,
    target: aot.Target | None = None,
) -> list[StepBytes]:
    """Returns the bytes of steps of some shapes, compiled without arrays for a GPU or this process's device.

    Args:
      dtype, kv_dtype: of weights, and of keys and values; by default they are equal.
      quantization, kv_full_precision_layers, kv_eviction: as in `EngineConfig`.
      max_model_len: longest text, on which programs of evictions depend; None takes the model's max_position.
      settings: names of implementations of operators.
    """
    compiled = functools.partial(
        _compiled,
        shapes=shapes,
        target=target,
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype or dtype,
        block_size=block_size,
        max_model_len=max_model_len or config.max_position,
        max_repositioned_sinks=max_repositioned_sinks,
        embedding_device=embedding_device,
        settings=settings,
        exact=kv_full_precision_layers,
        kv_eviction=kv_eviction,
    )
    platform = platform_of(aot.device(target) if target else None)
    if config.num_layers <= ONE_MORE or tuning(platform).layers_of_program:
        return compiled(config)
    # One layer represents all in full precision.
    exact = kv_full_precision_layers and (0,)
    # A layer without keys and values of its own needs no more memory than one with them.
    alike = dataclasses.replace(config, kv_layers=None)
    few, more = (compiled(alike.first_layers(n), exact=exact) for n in (FEW, ONE_MORE))
    further = config.num_layers - FEW

    def extrapolated(a: int, b: int) -> int:
        return a + further * (b - a)

    return [
        StepBytes(extrapolated(a.network, b.network), b.sampling, extrapolated(a.evicting, b.evicting))
        for a, b in zip(few, more, strict=True)
    ]


def _compiled(
    config: ModelConfig,
    *,
    shapes: Sequence[StepShape],
    target: aot.Target | None,
    dtype: str,
    quantization: str | None = None,
    kv_dtype: KVDtype,
    block_size: int,
    exact: tuple[int, ...],
    kv_eviction: dict[str, Any] | None,
    **settings: Any,
) -> list[StepBytes]:
    params = abstract_params(config, dtype, quantization)
    device = aot.device(target) if target else jax.local_devices()[0]
    patterns = (FULL,) * config.num_layers
    stored = EngineConfig(
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        kv_full_precision_layers=exact,
        kv_eviction=kv_eviction,
        block_size=block_size,
    )
    layout = make_layout(config, patterns, stored, stored_as_bits(device))
    found = []
    with _compiling_for(target):
        runner = Runner(
            config,
            params,
            patterns,
            layout=layout,
            num_blocks=NUM_BLOCKS,
            placement=place_on_absent([device]) if target else Placement(device),
            **settings,
        )
        for shape in shapes:
            most = shape.max_sampled
            keys = keys_for([shape], [most], [SamplingParams(temperature=1.0)], (), config.vocab_size)
            decodes = shape._replace(parts=shape.parts[:1])
            of_decodes = [LoopKey(decodes, 1, True, None)] if runner.chooses_in_step and only_decodes(decodes) else []
            runner.compile([*keys, *of_decodes], table_width=shape.table_width)
            sampling = [p for key, p in runner.programs.items() if key[:3] == ("sample", most, most)]
            evicting = max(map(_known_bytes, runner.evictor.programs), default=0) if runner.evictor else 0
            step = max(_known_bytes(runner.programs[key]) for key in (shape, *of_decodes))
            found.append(StepBytes(step, max(map(_known_bytes, sampling)), evicting))
    return found


def _known_bytes(compiled: Any) -> int:
    """Returns `program_bytes`.

    Raises:
      ConfigError: the compiler does not report them.
    """
    found = program_bytes(compiled)
    if found is None:
        raise ConfigError(
            f"the compiler of {platform_of()} does not say how much memory a step takes: give num_blocks or "
            "memory_bytes instead of memory_fraction"
        )
    return found


@contextlib.contextmanager
def _compiling_for(target: aot.Target | None):
    """Returns a context that compiles steps for an absent GPU; None changes nothing."""
    if target is None:
        yield
        return
    with without_cache(), aot.described(target):
        yield


def measure_step(
    config: ModelConfig,
    *,
    dtype: str,
    quantization: str | None = None,
    kv_dtype: KVDtype | None = None,
    kv_full_precision_layers: tuple[int, ...] = (),
    kv_eviction: dict[str, Any] | None = None,
    block_size: int = 16,
    query_tile: int = 32,
    max_num_batched_tokens: int = 512,
    max_repositioned_sinks: int = 0,
    embedding_device: str = "device",
    target: aot.Target | None = None,
) -> StepCost:
    """Fits a step's bytes over rows and widths of block tables, from three shapes of steps with all their tiles.

    Args:
      dtype, quantization, kv_dtype, kv_full_precision_layers, kv_eviction: as in `step_bytes`.
    """
    tiles = most_tiles(max_num_batched_tokens, query_tile)[0]
    (r1, p1), (r2, _), (_, p2) = points = ((32, 64), (64, 64), (64, 128))
    measured = step_bytes(
        config,
        [StepShape((TileGroup(rows, 1), tiles), width, rows) for rows, width in points],
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        kv_full_precision_layers=kv_full_precision_layers,
        kv_eviction=kv_eviction,
        block_size=block_size,
        max_repositioned_sinks=max_repositioned_sinks,
        embedding_device=embedding_device,
        target=target,
    )
    lines = []
    for a, b, c in ([m.network for m in measured], [m.sampling for m in measured]):
        per_entry = (c - b) / ((r2 + tiles.count) * (p2 - p1))
        per_row = (b - a) / (r2 - r1) - per_entry * p1
        lines.append(Line(a - per_row * r1 - per_entry * (r1 + tiles.count) * p1, per_row, per_entry, tiles.count))
    if evicting := measured[-1].evicting:
        # p2 blocks at a time, or all of one row.
        lines += [Line(evicting, 0, 0, 0), Line(0, 0, 0, 0, per_width=evicting / p2)]
    return StepCost(tuple(lines), described(target))

"""Attention patterns: which cached positions a query attends to. Plain numbers; no jax, no blocks.

One definition, `AttentionPattern.visible`, serves NumPy and jax arrays alike, and everything is tested against it.
`stack` turns one pattern per layer into arrays [L], which enter the compiled step as data: a sweep over windows and
sinks runs on one compilation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ksana_jax.core import checks
from pallas_kernels import mask
from pallas_kernels.mask import FAR

SinkPosition = Literal["absolute", "cache", "ceiling"]
# By index, as `mask.repositioned` reads them.
SINK_POSITIONS: tuple[SinkPosition, ...] = ("absolute", "cache", "ceiling")


class PatternArrays(NamedTuple):
    """Patterns of all layers as int32 arrays [L], or of one layer as scalars.

    window and global_every are FAR where there is none (position 0 then counts as global only through `has_global`).
    sink_position indexes SINK_POSITIONS; sink_ceiling is FAR unless that position is "ceiling".
    """

    window: Any
    num_sinks: Any
    stride: Any
    has_global: Any
    global_every: Any
    sink_position: Any
    sink_ceiling: Any

    def visible(self, q_pos, kv_pos):
        """Boolean mask of the keys that each query attends to, never those at or beyond FAR; shapes broadcast."""
        return mask.visible(self, q_pos, kv_pos)

    def repositioned(self, q_pos, kv_pos):
        """Boolean mask of each query's repositioned sinks; shapes broadcast."""
        return mask.repositioned(self, q_pos, kv_pos)


@dataclasses.dataclass(frozen=True)
class AttentionPattern:
    """Decides to which keys j a query i attends: j <= i and (near, or sink, or global), where

      near    i - j < window and (i - j) % stride == 0
      sink    j < num_sinks
      global  global_every is given and j % global_every == 0

    Args:
      window: tokens, including the query's own; None attends to the whole sequence.
      num_sinks: number of first tokens of the sequence that stay visible.
      stride: 1 is dense; 2 attends to every second token of the window (dilated).
      global_every: positions that are multiples of this stay visible.
      sink_position: the position from which a query looks at a sink. None, the default, becomes "cache" if there are
        both a window and sinks, and "absolute" otherwise.
        "absolute": its own position i.
        "cache": min(i, num_sinks + window - 1), its index in the cache (StreamingLLM, arXiv:2309.17453).
        "ceiling": beyond the window, the position at distance min(i - j, sink_ceiling) (LM-Infinite, arXiv:2308.16137).
      sink_ceiling: tokens; only with "ceiling", where it defaults to the window.

    Raises:
      ValueError: a number is out of range, or sink_position needs a field that is not set.
    """

    window: int | None = None
    num_sinks: int = 0
    stride: int = 1
    global_every: int | None = None
    sink_position: SinkPosition | None = None
    sink_ceiling: int | None = None

    def __post_init__(self):
        for name, least in (("window", 1), ("num_sinks", 0), ("stride", 1), ("global_every", 1), ("sink_ceiling", 1)):
            value = getattr(self, name)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, value := int(value))
            optional = name in ("window", "global_every", "sink_ceiling")
            checks.require(checks.integer(f"AttentionPattern.{name}", value, least, FAR - 1, optional=optional))
        if self.sink_position is None:
            object.__setattr__(self, "sink_position", self._default_sink_position)  # the value is final from here on
        checks.require(checks.one_of("AttentionPattern.sink_position", self.sink_position, SINK_POSITIONS))
        if self.sink_position != "absolute" and self.window is None:
            raise ValueError(f"AttentionPattern.sink_position {self.sink_position!r} needs a window")
        if self.sink_ceiling is not None and self.sink_position != "ceiling":
            raise ValueError(
                f"AttentionPattern.sink_ceiling is {self.sink_ceiling}, "
                f"but sink_position is {self.sink_position!r}, not 'ceiling'"
            )

    @property
    def _default_sink_position(self) -> SinkPosition:
        return "cache" if self.window is not None and self.num_sinks else "absolute"

    @property
    def num_repositioned_sinks(self) -> int:
        """Number of repositioned sinks, at which queries look from a position other than their own."""
        return 0 if self.sink_position == "absolute" else self.num_sinks

    @property
    def ceiling(self) -> int:
        """Maximum distance in tokens at which a sink beyond the window is seen; FAR if there is no limit."""
        if self.sink_position != "ceiling":
            return FAR
        return self.sink_ceiling or self.window or FAR

    @property
    def full_until(self) -> int:
        """A sequence length up to which the pattern surely equals full attention: queries attend to all earlier tokens,
        from their own positions. Exact for dense patterns without global positions."""
        if self.stride > 1:
            return 1
        if self.window is None:
            return FAR
        # Window 4, 2 sinks: query 6 is the first that does not attend to some position, 2, or does so from elsewhere.
        full_until = self.window + self.num_sinks
        if self.num_sinks and self.sink_position == "ceiling":
            # Window 2, ceiling 4: query 5 is the first to see position 0 from elsewhere.
            full_until = min(full_until, max(self.window, self.ceiling + 1))
        return full_until

    @property
    def bounded(self) -> bool:
        """True if some positions become invisible to all later queries."""
        return self.window is not None and self.global_every != 1

    def arrays(self) -> PatternArrays:
        """The pattern as int32 scalars."""
        values = (
            self.window or FAR,
            self.num_sinks,
            self.stride,
            self.global_every is not None,
            self.global_every or FAR,
            SINK_POSITIONS.index(self.sink_position or self._default_sink_position),
            self.ceiling,
        )
        return PatternArrays(*(np.int32(v) for v in values))

    def visible(self, q_pos, kv_pos):
        """Boolean mask of the keys that each query attends to; shapes broadcast."""
        return self.arrays().visible(q_pos, kv_pos)

    def __str__(self) -> str:
        if self == AttentionPattern():
            return "full"
        defaults = {f.name: f.default for f in dataclasses.fields(self)} | {
            "sink_position": self._default_sink_position
        }
        values = {name: getattr(self, name) for name in defaults}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value != defaults[name])


FULL = AttentionPattern()


def per_layer(
    pattern: AttentionPattern | Sequence[AttentionPattern], num_layers: int, num_kv_heads: int = 1
) -> tuple[AttentionPattern, ...]:
    """Returns one pattern per layer, from one for all layers or a list, which may have one for each of a layer's
    num_kv_heads instead, layer by layer: then so has the result.

    Raises:
      ValueError: the list has another number of entries.
    """
    patterns = (pattern,) * num_layers if isinstance(pattern, AttentionPattern) else tuple(pattern)
    if len(patterns) not in (num_layers, num_layers * num_kv_heads):
        raise ValueError(f"{len(patterns)} attention patterns were given, the model has {num_layers} layers")
    return patterns


def stack(patterns: Sequence[AttentionPattern]) -> PatternArrays:
    """Patterns of all layers as int32 arrays [L]."""
    return PatternArrays(*(np.stack(column) for column in zip(*(p.arrays() for p in patterns), strict=True)))

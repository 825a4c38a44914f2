"""Operations that a device's compiler supports, and workarounds for the others. Knows no names of platforms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

THREEFRY, RBG = "threefry", "rbg"


@dataclasses.dataclass(frozen=True)
class Features:
    """Features of a device's compiler.

    Args:
      dynamic_loops: loops whose number of turns is found by the program itself.
      branches: programs that compute one of two branches.
      generator: of random numbers, "threefry" or "rbg", see `sampling.noise`.
    """

    dynamic_loops: bool = True
    branches: bool = True
    generator: str = THREEFRY

    @property
    def missing(self) -> list[str]:
        """Describes missing features and their replacements, a line each."""
        lines = []
        if not self.dynamic_loops:
            lines.append("no loops of dynamic length: attention reads whole block tables, however short the texts are")
        if not self.branches:
            lines.append("no branches: sampling also computes what no request asks for")
        if self.generator == RBG:
            lines.append("random numbers are the device's own (rbg): other devices sample other tokens")
        return lines

    def loop(self, count: Any, most: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """Repeats state = body(i, state) for i from 0 to count, a traced number of at most `most`.

        Where loops need a constant length, it is `most`: then turns from `count` on must leave the state as it is.
        """
        return jax.lax.fori_loop(0, count if self.dynamic_loops else most, body, state)

    def repeat(self, unfinished: Callable[[Any], Any], most: int, body: Callable[[Any], Any], state: Any) -> Any:
        """Repeats state = body(state) while it is unfinished, at most `most` times.

        Where loops need a constant length, it is `most`: then body must leave a finished state as it is.
        """
        if self.dynamic_loops:
            return jax.lax.while_loop(unfinished, body, state)
        return jax.lax.fori_loop(0, most, lambda _, state: body(state), state)

    def either(self, condition: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        """Returns yes(*operands) or no(*operands), by a traced condition; without branches it computes both."""
        if self.branches:
            return jax.lax.cond(condition, yes, no, *operands)
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes(*operands), no(*operands))


# CPUs, GPUs and TPUs have them.
ALL_FEATURES = Features()

# Key and counter of threefry, and the result: test vectors of the library Random123.
THREEFRY_WORDS = (
    np.array([0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3], np.uint32),
    np.array([0xC4923A9C, 0x483DF7A0], np.uint32),
)


def threefry(words: jax.Array) -> jax.Array:
    """Returns threefry's result for a key and a counter, uint32 [4]; for trials."""
    return threefry_2x32(words[:2], words[2:])


def rbg_bits(words: jax.Array) -> jax.Array:
    """Returns bits [8] of the device's own generator, of a key [4]; for trials."""
    return jax.lax.rng_bit_generator(words, (8,), dtype=jnp.uint32)[1]

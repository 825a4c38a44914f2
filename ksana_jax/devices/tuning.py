"""Settings by platform, from measurements there: speed, not results. The only table by platform's name; others
get defaults that run everywhere. Knows no jax.

`capabilities` detects what a device can do.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Tuned settings of a platform.

    Args:
      compiler_options: XLA's, for a step. few_tokens: steps of up to this many tokens have few_tokens_options instead.
      layers_of_program: maximum layers of one compiled program, see `step_runs`; None compiles a step as one program.
      least_rows: minimum rows of XLA's matrix products of bfloat16.
      joins_matrices: whether weights that multiply the same input are kept as one matrix.
      chooses_in_step: whether a step of decodes alone and the choice of its tokens are one program.
      native: whether the C++ operators serve it.
      stored_as_bits: types, by NumPy's names, that a pool stores as unsigned integers of the same bits, because the
        compiler converts a whole pool of them at each scatter.
      compiles_on_one_core: whether its compiler takes one core for a program, so that several are compiled at once.
      slow_dtypes: types in which it multiplies much more slowly than in float32.
    """

    compiler_options: dict[str, Any] | None = None
    few_tokens: int = 0
    few_tokens_options: dict[str, Any] | None = None
    layers_of_program: int | None = None
    least_rows: int = 1
    joins_matrices: bool = False
    chooses_in_step: bool = False
    native: bool = False
    stored_as_bits: frozenset[str] = frozenset()
    compiles_on_one_core: bool = False
    slow_dtypes: frozenset[str] = frozenset()


_TUNING = {
    "cpu": Tuning(
        # LLVM's first level of optimisation compiles a step in four fifths of the time, and the step is as fast as with
        # the third (8 layers, 32 rows, medians of six: 5.3 against 5.8 s in float32, 3.8 against 3.9 s in bfloat16).
        compiler_options={"xla_backend_optimization_level": 1},
        # XLA:CPU compiles every layer of one program again, though they are alike; starting a program costs 80 us.
        # SmolLM2's 30 layers: first tokens take 2.0 s with 3 layers a program, 2.8 s with 4 and a remainder; steps take
        # the same time with 3, 4 and 5, and 6 % more with 2 (AVX-512, jax 0.10.2).
        layers_of_program=4,
        # XLA:CPU converts all weights to float32 for one row: a step of one row (8 layers, d_model 512) takes 27 ms
        # against 7 with eight rows on a CPU with AMX, 71 against 15 on a busy one without (10 with two rows).
        least_rows=8,
        native=True,
        # bfloat16: 110 ms for 128 MB on jax 0.10.2, against 0.01 ms for uint16 and float16.
        stored_as_bits=frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"}),
        # On a GPU XLA uses all cores, and times matrix products meanwhile.
        compiles_on_one_core=True,
        # 3 to 20 times.
        slow_dtypes=frozenset({"f16"}),
    ),
    "gpu": Tuning(
        # XLA's rematerialisation counts the pool, which is written in place, once for each write. It then takes the
        # memory for full and computes in every layer what layers share: a third more kernels for Llama-8B.
        compiler_options={"xla_disable_hlo_passes": "rematerialization"},
        # XLA splits products over their inner dimension, so that fewer multiprocessors read each row, and sums the
        # parts in a launch of its own. Few rows are read from the L2 while the weights come from memory (computed for
        # the longest product of Llama-8B on an H200: 27 us of 30 for 8 rows, 32 for 16, 64 for 64), and without the
        # split the next kernel takes the residual too: a layer is 10 or 11 launches instead of 13. Not measured. It
        # matters where `ops.fused_products` does not serve: there, a layer of few rows has no product of XLA's.
        few_tokens=16,
        few_tokens_options={"xla_disable_hlo_passes": "rematerialization,splitk-rewriter"},
        # Matrix units multiply eight rows as fast as one.
        least_rows=8,
        # Each kernel that is started costs about 2 us, and a decode step of few rows has small ones.
        joins_matrices=True,
        chooses_in_step=True,  # in one command buffer
    ),
    "tpu": Tuning(least_rows=8),
}
# Platforms known to this project: their devices' capabilities need no trial.
KNOWN = frozenset(_TUNING)


def tuning(platform: str) -> Tuning:
    """Returns the settings of a platform, by jax's name."""
    return _TUNING.get(platform, Tuning())

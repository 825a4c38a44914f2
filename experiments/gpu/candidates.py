"""Timed candidates: our implementations of attention and jax's own, each as a step that feeds itself.

A candidate takes `cases.Arguments` apart as it likes them. Its step is (q, shared, own) -> out, where `own` belongs to
one layer and out has q's shape: the output of one call is the query of the next.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.cases import Arguments, Case
from pallas_kernels.contract import Kernel
from pallas_kernels.patterns import Pattern

# For jax's paged_attention: stages of its pipeline and tokens of each.
STAGES = ((2, 128), (3, 128), (3, 64), (4, 64))
TOKAMAX = "tokamax mosaic (dense)"
# Rows of `hopper_prefill`'s tiles: it is not used for fewer queries.
PREFILL_ROWS = 128
# The only kernel that reads latents, and reads nothing else.
LATENT = "hopper_latent"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a case.

    prepare: (arguments) -> (carry, shared, owns), traceable. step: (carry, shared, own) -> carry.
    result: carry -> [S, Q, N, H]. layout: candidates of one layout share what the first one prepares, which is
    compiled; None where preparing moves no data. seen: the part of the arguments that the result must match.
    bytes: minimum bytes of a call, where they differ from the case's. part: of a computation: timed in a chain, not
    checked.
    """

    name: str
    prepare: Callable[[Arguments], tuple[Any, Any, tuple]]
    step: Callable[[Any, Any, Any], Any]
    result: Callable[[Any], Any] = lambda out: out
    ours: bool = False
    layout: str | None = None
    seen: Callable[[Arguments], Arguments] | None = None
    bytes: int | None = None
    part: bool = False


def reference() -> Kernel:
    """The float32 reference of `pallas_kernels`."""
    from pallas_kernels.reference import KERNEL

    return KERNEL


def implementations() -> dict[str, Kernel]:
    """Ours, by name; on a machine without a GPU the reference stands in."""
    if jax.default_backend() == "gpu":
        from pallas_kernels.registry import KERNELS

        shared = KERNELS["hopper_prefill"].tuned(registers=False)
        return KERNELS | {"hopper_prefill, weights in shared memory": shared}
    return {"reference": reference()}


def ours(case: Case) -> list[Candidate]:
    """Each implementation of `pallas_kernels` that the engine could use for a case."""
    few = case.queries * case.num_heads // case.num_kv_heads < PREFILL_ROWS
    found = implementations()
    if LATENT in found:
        of_latents = found.pop(LATENT)
        found = {LATENT: of_latents} if case.rank else found
    left_out = "hopper_prefill" if few else ()
    return [ours_as(name, kernel, case) for name, kernel in found.items() if not name.startswith(left_out)]


def ours_as(name: str, kernel: Kernel, case: Case) -> Candidate:
    """A kernel with the contract of `pallas_kernels`, under a name."""
    pattern = Pattern(*case.pattern)

    def prepare(a: Arguments):
        return a.q, a[1:], tuple(jnp.int32(layer) for layer in range(case.num_layers))

    def step(q, shared, layer):
        return kernel(Arguments(q, *shared).call(layer=layer, pattern=pattern)).out

    return Candidate(name, prepare, step, ours=True)


def _lengths(a: Arguments) -> jax.Array:
    return a.positions[:, -1] + 1


def _layers(case: Case, a: Arguments, axes: tuple[int, ...]) -> tuple:
    """((keys, values), ...) of each layer, each [M, K, B, H] with its axes in another order."""
    return tuple(
        (a.pool[:, layer, 0].transpose(axes), a.pool[:, layer, 1].transpose(axes)) for layer in range(case.num_layers)
    )


def jax_bundled(case: Case, stages: int, tokens: int, interpret: bool = False) -> Candidate:
    """jax.experimental.pallas.ops.gpu.paged_attention (Triton): decode, one query to a row.

    Args:
      tokens: read in one turn of its loop; of 128 tokens, four stages do not fit the shared memory.
    """
    splits = next(n for n in (16, 8, 4, 2, 1) if max(map(case.blocks_of, case.lengths)) % n == 0)

    def prepare(a: Arguments):
        return a.q[:, 0], (a.tables, _lengths(a)), _layers(case, a, (1, 0, 2, 3))

    def step(q, shared, own):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
        per_block = max(1, min(tokens // case.block_size, shared[0].shape[1] // splits))
        return paged_attention(
            q, *own, *shared, num_stages=stages, k_splits=splits, pages_per_compute_block=per_block, interpret=interpret
        )

    name = f"jax paged_attention, {stages} stages of {tokens}"
    return Candidate(name, prepare, step, lambda out: out[:, None], layout="heads first")


def cudnn_paged(case: Case) -> Candidate:
    """cuDNN's paged attention, which jax keeps private. It wants as many blocks as all tables have entries."""

    def prepare(a: Arguments):
        rows, width = a.tables.shape
        # Entries beyond a row's text name any block; the pool is widened to the number of blocks that it wants.
        more = max(rows * width - case.num_blocks, 0)
        owns = tuple(
            tuple(jnp.pad(x, ((0, more), (0, 0), (0, 0), (0, 0))) for x in own)
            for own in _layers(case, a, (0, 2, 1, 3))
        )
        ones = jnp.ones(rows, jnp.int32)
        return a.q, (ones, _lengths(a), a.tables[:, None, :, None]), owns

    def step(q, shared, own):
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

        q_lengths, kv_lengths, tables = shared
        attend: Any = paged_attention
        out = attend(
            q, *own, q_lengths, kv_lengths, tables, tables, scale=1.0, mask_type=MaskType.PADDING, qkv_layout="BTNH"
        )
        return out[0] if isinstance(out, (tuple, list)) else out

    return Candidate("cuDNN paged", prepare, step, layout="cuDNN")


def dense_dot_product(case: Case, implementation: str = "cudnn") -> Candidate:
    """jax.nn.dot_product_attention on dense copies: without blocks, so a bound rather than a competitor."""

    def prepare(a: Arguments):
        rows = case.num_rows
        if case.prefill:  # one row: its tiles in order are the text
            tables, q = a.tables[:1], a.q.reshape(1, -1, *a.q.shape[2:])
        else:
            tables, q = a.tables, a.q

        def dense(layer, which):
            x = a.pool[tables, layer, which]  # [rows, P, K, B, H]
            return x.transpose(0, 1, 3, 2, 4).reshape(rows, -1, case.num_kv_heads, case.head_dim)

        return q, _lengths(a)[:rows], tuple((dense(n, 0), dense(n, 1)) for n in range(case.num_layers))

    def step(q, lengths, own):
        more = {"is_causal": True} if case.prefill else {"key_value_seq_lengths": lengths}
        return jax.nn.dot_product_attention(q, *own, scale=1.0, implementation=implementation, **more)  # pyright: ignore

    def result(out):
        return out.reshape(-1, case.queries, *out.shape[2:])

    return Candidate(f"jax.nn.dot_product_attention {implementation} (dense)", prepare, step, result, layout="dense")


def jax_peers(case: Case, *, stages: tuple[tuple[int, int], ...] = STAGES) -> list[Candidate]:
    """Returns jax's own candidates for a case."""
    ragged = len(set(case.lengths)) > 1
    if jax.default_backend() != "gpu":
        return [dense_dot_product(case, "xla")] if len(case.lengths) == 1 or not ragged else []
    if case.prefill:
        return [dense_dot_product(case)]
    # A dense copy of a ragged batch is padded to the longest row: no bound for anything.
    dense = [] if ragged else [dense_dot_product(case)]
    return [*(jax_bundled(case, *n) for n in stages), cudnn_paged(case), *dense]


def tokamax_prefill(case: Case) -> Candidate:
    """tokamax's kernel for Hopper on dense copies: https://github.com/openxla/tokamax. Written from its source."""
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotImplementedError(f"tokamax is not installed: {error}") from None
    dense = dense_dot_product(case)

    def step(q, lengths, own):
        return tokamax.dot_product_attention(q, *own, scale=1.0, is_causal=True, implementation="mosaic")

    return dataclasses.replace(dense, name=TOKAMAX, step=step)


def relative_error(out: Any, expected: Any) -> float:
    """||out - expected|| / ||expected|| in float64; inf where anything is not finite."""
    out, expected = (np.asarray(x.astype(jnp.float32), np.float64) for x in (out, expected))
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.linalg.norm(out - expected) / max(float(np.linalg.norm(expected)), 1e-30))


def rows_to_check(case: Case, num_tiles: int) -> np.ndarray:
    """A few query tiles: first, last, the longest row's, some in between."""
    longest = 0 if case.prefill else int(np.argmax(case.lengths))
    return np.unique([0, num_tiles // 3, num_tiles // 2, num_tiles - 1, longest])

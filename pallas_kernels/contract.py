"""The contract of kernels: typed calls, their options, their results. Knows shapes and types, no algorithm.

    kernel = KERNELS["hopper_decode"]
    out = kernel(Call(q, Pool(kv), tables, starts, positions, layer=3, pattern=Pattern(window=1024))).out

A `Call` is attention and gives a `Result`; `reference.attend` defines it in 40 lines. A `Write` stores keys and
values and gives a `Written`, see `kv_write_reference.write`; a `Product` gives an array, see
`product_reference.multiply`. A kernel raises NotImplementedError for unsupported calls; `check_options` does so for
options that it does not read. All types are pytrees, so that jax.jit takes a call and jax.eval_shape asks, without
running anything, whether a kernel supports one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels import int4
from pallas_kernels.patterns import FULL, Pattern

Array: TypeAlias = Any  # a jax.Array, or for `Kernel.unsupported` and `Kernel.schedule` a jax.ShapeDtypeStruct


class Pool(NamedTuple):
    """Paged keys and values of all layers, as numbers, as codes with their scales, or as packed codes.

    kv: [M, L, 2, K, B, H]; keys are [:, :, 0], values [:, :, 1]. Or [M, L, 1, K, B, H], keys and values at once.
    scales: None where kv holds numbers. [M, L, 2, K, B] float32 where it holds codes in int8 or float8_e4m3fn: a key or
      value is its code times its scale. For int4 codes bfloat16, laid out and applied as in `int4`.
    zeros: like scales, of packed codes; None for 0.
    levels: [2^bits] float32 where kv is packed codes of 2 to 4 bits, uint8 [M, L, 2, K, B, H * bits / 8], lowest bit
      first: a number is the level of its code times its scale, plus its zero. Scales are float32 [M, L, 2, K, B], or
      float16 [M, L, 2, K, B, G] for G groups of neighbours.
    rotated: bfloat16, or its bits, [M, L, 1, K, B, R] where vectors are keys and values at once, and kv has int8 codes
      of their H - R other numbers, with float32 scales [M, L, 1, K, B, G] of groups of neighbours. A vector is half of
      the R numbers, half of the others, and the other halves.
    """

    kv: Array
    scales: Array | None = None
    zeros: Array | None = None
    levels: Array | None = None
    rotated: Array | None = None

    def check_scales(self) -> None:
        """Raises ValueError if codes have no scales, numbers have scales, or the scales do not fit the pool."""
        if (self.kv.dtype.itemsize == 1) != (self.scales is not None):
            raise ValueError(f"a pool of {self.kv.dtype} with{'out' if self.scales is None else ''} scales")
        if (self.kv.dtype == jnp.uint8) != (self.levels is not None):
            raise ValueError(f"a pool of {self.kv.dtype} with{'out' if self.levels is None else ''} levels")
        if self.levels is not None and self.levels.shape not in ((4,), (8,), (16,)):
            raise ValueError(f"levels are {list(self.levels.shape)}, must be [4], [8] or [16]")
        if self.scales is None:
            return
        dtype, shape = jnp.dtype("float32"), self.kv.shape[:-1]
        if self.levels is not None and self.scales.ndim == self.kv.ndim:
            dtype, shape = jnp.dtype("float16"), (*shape, self.scales.shape[-1])
        if (x := self.rotated) is not None:
            shape, one_side = (*shape, self.scales.shape[-1]), (*shape[:2], 1, *shape[3:])
            if (
                x.dtype.itemsize != 2
                or x.shape[:-1] != one_side
                or x.shape[-1] % 2
                or self.kv.shape[-1] % (32 * shape[-1])
            ):
                raise ValueError(
                    f"rotated numbers are {x.dtype}{list(x.shape)}, must be an even number in 16 bits for each vector, "
                    f"next to codes {list(self.kv.shape)} with scales of a multiple of 32"
                )
        if self.kv.dtype == jnp.int4:
            dtype, shape = jnp.dtype("bfloat16"), int4.scales_shape(self.kv.shape)
        if self.scales.dtype != dtype or self.scales.shape != shape:
            raise ValueError(f"scales are {self.scales.dtype}{list(self.scales.shape)}, not {dtype}{list(shape)}")
        if self.zeros is not None and (self.zeros.dtype, self.zeros.shape) != (dtype, shape):
            raise ValueError(f"zeros are {self.zeros.dtype}{list(self.zeros.shape)}, not {dtype}{list(shape)}")


# For fields that a compiled kernel depends on: no leaves of the pytree.
STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """Options of a call beyond softmax attention with a pattern.

    q_sink: [S, Q, J, N, H], sink queries: where `pattern.repositioned`, the sink at text position j is scored with
      [:, :, min(j, J - 1)] of these instead of q. Without them no sink is repositioned. Where `pattern.sink_position`
      is 1, all J are the same.
    sinks: [N] float32 learned sink logits: one per head that joins the softmax's denominator and has no value.
    key_rope: cosines and sines [C, H / 2] float32, by which keys, which are stored unrotated, are rotated when they are
      read: the key at position j by row j, in float32, then rounded to q's dtype; i pairs with i + H / 2.
    soft_cap: scores become cap * tanh(score / cap).
    return_lse, return_mass: also give `Result.lse`, `Result.mass`.
    mass_factor: [S, Q] float32, not negative, by which the weights of each query are multiplied in the mass, so that 0
      leaves a query out; all count alike by default.
    out_dtype: of `Result.out`; q's dtype by default.
    """

    q_sink: Array | None = None
    sinks: Array | None = None
    mass_factor: Array | None = None
    key_rope: tuple[Array, Array] | None = None
    soft_cap: float | None = dataclasses.field(default=None, metadata=STATIC)
    return_lse: bool = dataclasses.field(default=False, metadata=STATIC)
    return_mass: bool = dataclasses.field(default=False, metadata=STATIC)
    out_dtype: Any = dataclasses.field(default=None, metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Attention of tiles of queries to the paged keys and values of their rows.

    q: [S, Q, N, H], rotated and already scaled by H**-0.5. A tile is Q tokens of one row; decode has Q = 1.
    pool: N is a multiple of its K. The whole pool with the index of a layer: a slice would be a copy of gigabytes.
    tables: [S, P] int32 block ids, by rising text position; any valid id where absent. Or [S, K, P], blocks that each
      kv head reads.
    starts: like tables, int32 position of each block's first slot; FAR where absent. Blocks in between may be missing.
    positions: [S, Q] int32 positions of the queries, of the text or of the tokens left in it; -1 where padded.
    layer: index in [0, L); may be traced.
    pattern: which text positions a query sees; its numbers may be traced.
    """

    q: Array
    pool: Pool
    tables: Array
    starts: Array
    positions: Array
    layer: int | Array = 0
    pattern: Pattern = FULL
    options: Options = Options()

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q.shape[2] // self.pool.kv.shape[3]

    @property
    def by_head(self) -> bool:
        """True if each kv head has a table of its own."""
        return len(self.tables.shape) == 3

    @property
    def num_sink_queries(self) -> int:
        """J of `q_sink`; 0 without."""
        return 0 if self.options.q_sink is None else self.options.q_sink.shape[2]

    @property
    def effective_pattern(self) -> Pattern:
        """The pattern of the call; without sink queries, it repositions no sinks."""
        return self.pattern if self.num_sink_queries else self.pattern._replace(sink_position=0)

    @property
    def out_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.options.out_dtype or self.q.dtype)

    def replace(self, **changes: Any) -> Call:
        """Returns a copy with other fields; fields of the options may be given by name."""
        of_options = {name: changes.pop(name) for name in list(changes) if name in OPTIONS}
        options = dataclasses.replace(changes.pop("options", self.options), **of_options)
        return dataclasses.replace(self, options=options, **changes)


OPTIONS = tuple(field.name for field in dataclasses.fields(Options))


class Result(NamedTuple):
    """The result of a call; fields that were not requested are None. Slots that no query sees have no influence.

    out: [S, Q, N, H], accumulated in float32; zeros where a query sees nothing, as padding does.
    lse: [S, Q, N] float32, natural logarithm of the softmax's denominator, for merging; -inf where a query sees
      nothing.
    mass: [S, K, P * B] float32, the weight that each slot got, summed over the tile's queries and the query heads of
      each kv head: the sums of policies such as H2O (arXiv:2306.14048, section 4). With a factor for each query, also
      of policies that only some queries observe, such as SnapKV (arXiv:2404.14469, section 4).
    """

    out: jax.Array
    lse: jax.Array | None = None
    mass: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Write:
    """Stores one layer's keys and values of a step in the pool, and prepares its queries for attention.

    Queries and keys are normed if weights are given, queries are scaled, both are rotated: all in float32, rounded
    once. Rope turns pairs of halves, element i with i + H / 2, as Hugging Face checkpoints do.

    q, k, v: [T, N, H], [T, K, H], [T, K, H], as projected.
    pool: of numbers, or of codes in int8 or float8_e4m3fn: then each key and value is stored as codes with one scale.
    slots: [T] int32, block * B + offset, each at most once; those outside of [0, M * B) are not written.
    rope: cosines and sines [T, H / 2] float32 of the tokens' positions, with the model's factor (yarn) in them.
    layer: index in [0, L); may be traced.
    q_norm, k_norm: [H] weights of an RMS norm before the rotation, with eps.
    sink_rope: tables [T, J, H / 2] by which the queries are rotated a second time, for repositioned sinks.
    q_scale: factor of the returned queries, such as H**-0.5.
    """

    q: Array
    k: Array
    v: Array
    pool: Pool
    slots: Array
    rope: tuple[Array, Array]
    layer: int | Array = 0
    q_norm: Array | None = None
    k_norm: Array | None = None
    sink_rope: tuple[Array, Array] | None = None
    eps: float = dataclasses.field(default=1e-6, metadata=STATIC)
    q_scale: float = dataclasses.field(default=1.0, metadata=STATIC)


class Written(NamedTuple):
    """The result of a write.

    q: [T, N, H] in q's dtype. pool: the one of the call, updated; slots that were not written keep their bits.
    q_sink: [T, J, N, H], the queries rotated by `Write.sink_rope` instead; None without.
    """

    q: jax.Array
    pool: Pool
    q_sink: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A product of few rows with a matrix, fused with its neighbours: residual + activation(norm(x) w + bias).

    x: [T, D]. w: [F, D], or with an activation [2F, D], first the gate and then the gated half.
    norm: [D] weight of an RMS norm of x, with eps; plus_one: multiplies with 1 + weight.
    bias: [F] or [2F]. residual: [T, F].
    activation: "silu" or "gelu_tanh" of the gate, which multiplies the other half; None without.
    ahead: matrix that a later kernel multiplies; a kernel may prefetch the first columns of all its rows into a cache,
      at most ahead_bytes.
    """

    x: Array
    w: Array
    norm: Array | None = None
    bias: Array | None = None
    residual: Array | None = None
    ahead: Array | None = None
    eps: float = dataclasses.field(default=1e-6, metadata=STATIC)
    plus_one: bool = dataclasses.field(default=False, metadata=STATIC)
    activation: str | None = dataclasses.field(default=None, metadata=STATIC)
    ahead_bytes: int = dataclasses.field(default=0, metadata=STATIC)

    @property
    def parts(self) -> int:
        """Matrices that w holds."""
        return 1 if self.activation is None else 2


AnyResult = TypeVar("AnyResult", Result, Written, jax.Array)


AnyCall: TypeAlias = Call | Write | Product


class Kernel(NamedTuple, Generic[AnyResult]):
    """An implementation of the contract: a Kernel[Result] takes a `Call`, a Kernel[Written] a `Write`, a
    Kernel[jax.Array] a `Product`.

    run: (call, work, *, tuning) -> result. `work` is the result of `schedule`, or None.
    tuning: a frozen dataclass: how the kernel runs, never its results.
    schedule: (call, *, tuning) -> work that calls can share if they differ only in q, q_sink, learned sink logits and
      layer, as do the layers of a model with one pattern. It reads only the shapes of queries. None where there is
      nothing to share.
    """

    run: Callable[..., AnyResult]
    tuning: Any
    schedule: Callable[..., Any] | None = None

    def __call__(self, call: AnyCall, work: Any = None) -> AnyResult:
        return self.run(call, work, tuning=self.tuning)

    def tuned(self, **changes: Any) -> Kernel[AnyResult]:
        return self._replace(tuning=dataclasses.replace(self.tuning, **changes))

    def work(self, call: AnyCall) -> Any:
        """Computes the work that this call can share with others, or None."""
        return None if self.schedule is None else self.schedule(call, tuning=self.tuning)

    def unsupported(self, call: AnyCall) -> str | None:
        """Returns why the kernel does not support a call, or None. Runs nothing; arrays may be jax.ShapeDtypeStruct."""
        try:
            jax.eval_shape(lambda call: self(call), call)
        except NotImplementedError as error:
            return str(error)
        return None


def check_options(call: Call, *reads: str) -> None:
    """Raises NotImplementedError if a call has options, scales, tables or a pool that a kernel does not read.

    Args:
      reads: names of fields of Options, "scales" for pools of codes, "levels" for packed ones, "rotated" for codes next
        to rotated numbers, "by_head" for tables of single kv heads, and "latents" for pools of keys and values at once.
    """
    asked = [
        field.name
        for field in dataclasses.fields(Options)
        if field.name not in reads and getattr(call.options, field.name) is not field.default
    ]
    asked += ["scales"] * (call.pool.scales is not None and "scales" not in reads)
    asked += ["packed codes"] * (call.pool.levels is not None and "levels" not in reads)
    asked += ["codes next to rotated numbers"] * (call.pool.rotated is not None and "rotated" not in reads)
    asked += ["tables of single kv heads"] * (call.by_head and "by_head" not in reads)
    asked += ["keys and values at once"] * (call.pool.kv.shape[2] == 1 and "latents" not in reads)
    if asked:
        raise NotImplementedError(f"this kernel does not support {', '.join(asked)}")

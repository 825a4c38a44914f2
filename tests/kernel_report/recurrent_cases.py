"""Cases of recurrent layers, which XLA computes on a GPU: one layer of each kind, without its norms and its MLP."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from ksana_jax.models.layers import linear
from ksana_jax.models.params import LayerParams, dtype_of
from ksana_jax.models.recurrent import mixer, recurrent_shapes
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.states import paged_recur
from ksana_jax.scheduler.step.per_token import StateArrays
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from pallas_kernels import aot
from tests.kernel_report.check import Case
from tests.kernel_report.models import HYBRID, SHAPES
from tests.kernel_report.steps import lower_step

# Width of the model and layer of Qwen3-Next-80B, Granite-4.0-H-Small and LFM2-1.2B.
KINDS: dict[str, tuple[int, RecurrentSpec]] = {
    "delta rule": (2048, DeltaRuleSpec((0,), 16, 32, 128, 128)),
    "Mamba-2": (4096, Mamba2Spec((0,), 1, 128, 128, 64)),
    "short convolution": (2048, ShortConvSpec((0,))),
}
# Decodes: on a GPU an engine computes fewer than eight rows as eight. A chunk of 512 tokens is in tiles of 64.
PARTS = {"8 rows": (8, 1), "32 rows": (32, 1), "256 rows": (256, 1), "chunk of 512": (8, 64)}
NUM_SLOTS, NUM_LAYERS = 800, 2  # three slots for each of 256 rows, and of no size that an array of a step has


def cases(target: aot.Target) -> list[Case]:
    """Returns a layer of each kind in steps of each shape, and a decode step of a model with such layers."""
    rows, of_states = SHAPES[1].parts[0].count, arrays_of("delta rule", SHAPES[1]).state_bytes
    step = functools.partial(lower_step, model=HYBRID, shape=SHAPES[1], num_blocks=4096)
    # A step reads the states of a layer, and computes the new ones, before it writes these.
    found = [Case("step of a hybrid", {"rows": rows}, step, buffer_bytes=3 * rows * of_states)]
    for kind in KINDS:
        for name, part in PARTS.items():
            layer = arrays_of(kind, StepShape((TileGroup(*part),), 1, part[0]))
            least = layer.least_bytes(rows=1 if part[1] > 1 else part[0])
            program = functools.partial(layer_program, layer=layer)
            found.append(Case(f"recurrent {kind}", {"step": name}, program, buffer_bytes=2 * least, least_bytes=least))
    return found


class Layer(NamedTuple):
    """Shapes of the arguments of a layer, in bfloat16: its weights, the pool of states, and a step's inputs [T, D]."""

    spec: RecurrentSpec
    shape: StepShape
    weights: dict[str, Any]
    states: dict[str, Any]
    x: Any

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state."""
        return sum(num_bytes(leaf) // (NUM_SLOTS * NUM_LAYERS) for leaf in self.states.values())

    def least_bytes(self, rows: int) -> int:
        """Returns the bytes of weights, of inputs and outputs, and of states of rows, which are read and written."""
        return sum(map(num_bytes, self.weights.values())) + 2 * num_bytes(self.x) + 2 * rows * self.state_bytes


def num_bytes(array: Any) -> int:
    return array.size * array.dtype.itemsize


def arrays_of(kind: str, shape: StepShape) -> Layer:
    width, spec = KINDS[kind]
    array, bf16, shapes = jax.ShapeDtypeStruct, jnp.dtype("bfloat16"), recurrent_shapes(width, spec)
    if "w_q" in shapes:  # joined, as an engine's are on a GPU
        shapes["w_qkv"] = (sum(shapes.pop(name)[0] for name in ("w_q", "w_k", "w_v")), width)
    weights = {name: array(dims, dtype_of(name, bf16)) for name, dims in shapes.items()}
    state = spec.state(width).items()
    states = {name: array((NUM_SLOTS, NUM_LAYERS, *dims), jnp.dtype(of or bf16)) for name, (dims, of) in state}
    return Layer(spec, shape, weights, states, array((shape.num_tokens, width), bf16))


def layer_program(target: aot.Target, *, layer: Layer) -> Any:
    """Lowers a layer from its normalised inputs to the product of its output; it takes over the pool."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    texts = StateArrays(ints((4, layer.shape.num_texts)), ints((2, layer.shape.num_tokens)))

    def run(states, weights, x, texts):
        p, paged = LayerParams(**weights), SimpleNamespace(at=1, batch=SimpleNamespace(states=texts))
        recur, mix = paged_recur([paged], layer.shape), mixer(p, layer.spec, linear)
        out, cache = recur(0, mix, x, KVCache({}, "bf16", states=states))
        return linear(out, p.w_o, p.b_o), cache.states

    return aot.lower(target, run, layer.states, layer.weights, layer.x, texts, donate_argnums=0)

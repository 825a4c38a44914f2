"""Steps of the engine's own Runner, lowered for one or several devices that are not attached."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.operator_settings import OperatorSettings
from ksana_jax.core.patterns import FULL
from ksana_jax.devices.capabilities import stored_as_bits
from ksana_jax.kv.engine_layout import state_layout
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.lab.trace.collectives import Collective
from ksana_jax.loading.load import abstract_params
from ksana_jax.runner.decode_loop import LoopKey, only_decodes
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepShape
from ksana_jax.sharding.absent import place_on_absent
from pallas_kernels import aot

BLOCK_SIZE = 64
NUM_STATES = 96


def runner_of(
    target: aot.Target,
    model: ModelConfig,
    *,
    num_blocks: int,
    num_devices: int = 1,
    attention: str = "auto",
    kv: str = "bf16",
    eviction: EvictionMethod | None = None,
) -> Runner:
    """Returns a runner in bfloat16 that compiles for a target. kv: how keys and values are stored."""
    as_bits = stored_as_bits(aot.device(target))
    layout = layout_of(model, dtype=kv, block_size=BLOCK_SIZE, as_bits=as_bits, eviction=eviction)
    if model.recurrent is not None:
        layout = dataclasses.replace(layout, states=state_layout(model, "bfloat16", NUM_STATES))
    return Runner(
        model,
        abstract_params(model, "bf16"),
        (FULL,) * model.num_layers,
        num_blocks=num_blocks,
        layout=layout,
        max_model_len=model.max_position,
        max_repositioned_sinks=0,
        settings=OperatorSettings(attention=attention),
        placement=place_on_absent(aot.devices(target, num_devices)),
    )


def lower_step(
    target: aot.Target, model: ModelConfig, shape: StepShape, *, num_devices: int = 1, **settings: Any
) -> Any:
    """Lowers a step, with the choice of the most probable tokens where the engine has it inside. settings: of
    `runner_of`."""
    runner = runner_of(target, model, num_devices=num_devices, **settings)
    key = LoopKey(shape, 1, False, None) if runner.chooses_in_step and only_decodes(shape) else shape
    with _described(target, num_devices):
        return runner.lower(key)


def lower_sampling(target: aot.Target, model: ModelConfig, rows: int, *, num_devices: int = 1) -> Any:
    """Lowers the choice of a token by temperature and top-p for each of `rows` hidden states."""
    runner = runner_of(target, model, num_devices=num_devices, num_blocks=1)
    with _described(target, num_devices):
        return runner.lower(("sample", rows, rows, True, False, False, None))


def _described(target: aot.Target, num_devices: int) -> contextlib.AbstractContextManager[Any]:
    """Returns a context where jax lowers for num_devices of the target; several are described by their mesh."""
    return aot.described(target) if num_devices == 1 else contextlib.nullcontext()


def collectives_of_step(model: ModelConfig, shape: StepShape, num_devices: int) -> Counter[Collective]:
    """Returns what a step must exchange: hidden states after attention and the MLP of each layer, and embeddings."""
    if num_devices == 1:
        return Counter()
    hidden = Collective("all-reduce", shape.num_tokens * model.d_model * 2)
    return Counter({hidden: 2 * model.num_layers + 1})

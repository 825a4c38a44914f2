"""Device memory before it is spent: what a model, a batch and a context take, and the largest of each that fits.

    Mem = M + alpha * BS + beta * TN,    TN = gamma * BS * TA

  M      bytes whatever is served: the weights, and what a step takes with no request in it.
  alpha  bytes per request: what a step's arrays and temporary buffers grow by with each row; measured by compiling.
  BS     requests that run at once.
  beta   bytes per token: keys and values of all layers.
  TN     tokens whose keys and values are held at once.
  TA     tokens of a request's text, prompt and output.
  gamma  part of the text that is held: below 1 where a window lets blocks go or requests share a prefix, a little above
         1 where blocks are not full.

`plan` answers for any device from a config alone; `pool_size` is what the engine asks; `check` compares with a process.
Names resolve on first use, so that reading the table of devices does not wait for jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ksana_jax.planner.devices import DEVICES, Device, find_device
    from ksana_jax.planner.engine import PoolPlan, pool_size
    from ksana_jax.planner.solve import Change, Plan, plan
    from ksana_jax.planner.step_memory import StepBytes, StepCost, measure_step, step_bytes
    from ksana_jax.planner.terms import weights_bytes

_PUBLIC = {
    "plan": "solve",
    "Plan": "solve",
    "Change": "solve",
    "DEVICES": "devices",
    "Device": "devices",
    "find_device": "devices",
    "weights_bytes": "terms",
    "measure_step": "step_memory",
    "step_bytes": "step_memory",
    "StepCost": "step_memory",
    "StepBytes": "step_memory",
    "pool_size": "engine",
    "PoolPlan": "engine",
}
__all__ = [
    "plan",
    "Plan",
    "Change",
    "DEVICES",
    "Device",
    "find_device",
    "weights_bytes",
    "measure_step",
    "step_bytes",
    "StepCost",
    "StepBytes",
    "pool_size",
    "PoolPlan",
]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(f"ksana_jax.planner.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'ksana_jax.planner' has no attribute {name!r}")

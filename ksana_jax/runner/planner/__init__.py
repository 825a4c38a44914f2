"""Predicts device memory: of a model, a batch and a context, and the largest of each that fits.

    Mem = M + alpha * BS + beta * TN,    TN = gamma * BS * TA

  M      fixed bytes: the weights, and the memory of a step without requests.
  alpha  bytes per request: growth of a step's arrays and temporary buffers with each row; measured by compiling.
  BS     concurrent requests.
  beta   bytes per token: keys and values of all layers.
  TN     tokens whose keys and values are held at once.
  TA     tokens of a request, prompt and output.
  gamma  fraction of the text that is held: below 1 if a window frees blocks or requests share a prefix, a little above
         1 if blocks are not full.

`plan` predicts for any device from a config alone; the engine calls `pool_size`; `check` compares with a process.
Names resolve on first use, so reading the table of devices does not import jax.
"""

from typing import TYPE_CHECKING

from ksana_jax.core.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.runner.planner.devices import DEVICES, Device, find_device
    from ksana_jax.runner.planner.engine import PoolPlan, pool_size
    from ksana_jax.runner.planner.solve import Plan, WhatIf, plan
    from ksana_jax.runner.planner.step_memory import StepBytes, StepCost, measure_step, step_bytes
    from ksana_jax.runner.planner.terms import weights_bytes

_PUBLIC = {
    "ksana_jax.runner.planner.solve": "plan Plan WhatIf",
    "ksana_jax.runner.planner.devices": "DEVICES Device find_device",
    "ksana_jax.runner.planner.terms": "weights_bytes",
    "ksana_jax.runner.planner.step_memory": "measure_step step_bytes StepCost StepBytes",
    "ksana_jax.runner.planner.engine": "pool_size PoolPlan",
}
__all__ = ["plan", "Plan", "WhatIf", "DEVICES", "Device", "find_device", "weights_bytes", "measure_step"]
__all__ += ["step_bytes", "StepCost", "StepBytes", "pool_size", "PoolPlan"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

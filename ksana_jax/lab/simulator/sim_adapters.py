"""The adapters of a simulated engine: each client that has a name has one. Only their slots and bytes are simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.lora import LoRARequest
from ksana_jax.lab.simulator.move_cost import TransferLink
from ksana_jax.scheduler.adapters import AdapterSlots, AdapterUse

# Settings of the simulated engine, which reads no adapters itself.
NO_ADAPTERS = {"enable_lora": False, "max_loras": 1, "max_cpu_loras": None}


class SimAdapters:
    """Takes the place of `engine.adapters.Adapters`. All adapters are in host memory from the start.

    Args:
      link: from the host, which an adapter takes on its way to a slot. occupy: lets the device do nothing else for some
        seconds.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, link: TransferLink, occupy: Callable[[float], None]):
        from ksana_jax.models.adapted import adapter_bytes  # with jax

        itemsize = 4 if config.dtype == "f32" else 2
        seconds = link.seconds(adapter_bytes(model, 1, config.max_lora_rank, itemsize))
        self.slots = AdapterSlots(config.max_loras, lambda slot, adapter: occupy(seconds))

    def use(self, request: LoRARequest) -> AdapterUse:
        """Returns the adapter of a client."""
        return AdapterUse(request.lora_name, None, self.slots)


def adapter_of(client: str) -> Any:
    """Returns the adapter that a client's requests name; None for one without a name."""
    return LoRARequest(client, 1, client) if client else None

"""Placements on devices that are not attached: arrays are shapes, and programs are compiled but not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.params import Params
from ksana_jax.sharding.placement import Placement
from ksana_jax.sharding.specs import EVERYWHERE
from ksana_jax.sharding.tensor_parallel import TensorParallel


class AbsentDevice(Placement):
    """One device that is not attached."""

    def params(self, config: ModelConfig, params: Params, embedding_device: str = "device") -> Params:
        return self.everywhere(params)

    def everywhere(self, tree: Any) -> Any:
        return _shapes(tree, jax.sharding.SingleDeviceSharding(self.device))


class AbsentDevices(TensorParallel):
    """Several devices that are not attached."""

    @staticmethod
    def of_this_process(devices: Sequence[Any]) -> Sequence[Any]:
        return devices

    def everywhere(self, tree: Any) -> Any:
        return _shapes(tree, self.shardings(EVERYWHERE))


def _shapes(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def place_on_absent(devices: Sequence[Any]) -> Placement:
    """Returns the placement on devices of a topology, as `jax.experimental.topologies` describes them."""
    return AbsentDevice(devices[0]) if len(devices) == 1 else AbsentDevices(devices)


def only_compile() -> None:
    """Lets jax use the CPU only: plugins are loaded for their compilers, and jax would look for devices, and complain
    if it found none."""
    jax.config.update("jax_platforms", "cpu")

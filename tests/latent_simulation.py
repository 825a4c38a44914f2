"""Random simulations of engines whose pool holds latents, which are keys and values at once."""

from __future__ import annotations

import dataclasses

from ksana_jax.core.layer_spec import LatentSpec
from tests.fake_network import HEAD_DIM
from tests.selecting_simulation import SelectingSimulation
from tests.storing_simulation import StoringSimulation


class LatentSimulation(StoringSimulation):
    """A `StoringSimulation` with latents, unless its method of eviction refuses them."""

    def draw_storage(self) -> None:
        super().draw_storage()
        method = self.storage.method
        if method is None or not (method.reads_outputs or method.low_codec):
            self.storage = dataclasses.replace(self.storage, latent=LatentSpec(HEAD_DIM - 2, 2, 4, 4))


class LatentSelectingSimulation(LatentSimulation, SelectingSimulation):
    """A `SelectingSimulation` with latents."""

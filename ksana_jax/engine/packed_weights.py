"""Maps packed weights from a file that an earlier process has kept, or keeps them; see `loading.packed_file`.

The environment variable KSANA_PACKED_WEIGHTS=off keeps and maps none.
"""

from __future__ import annotations

import dataclasses
import os

import jax

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.devices.capabilities import capabilities
from ksana_jax.loading.load import WeightReader
from ksana_jax.loading.packed_file import PackedFile
from ksana_jax.loading.quantised.scheme import METHODS
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.int8_matrix import QUANTISERS
from ksana_jax.models.params import Params, quantised
from ksana_jax.native.build import library
from ksana_jax.runner.program_key import sources
from ksana_jax.runner.runner import Runner
from ksana_jax.runner.value_digest import NotStored, Walk
from ksana_jax.sharding.placement import ONE_DEVICE

SWITCH = "KSANA_PACKED_WEIGHTS"
# Fewer bytes are read and packed in a tenth of a second.
LEAST_BYTES = 32 * 2**20


def kept_packed(reader: WeightReader, model: ModelConfig, config: EngineConfig, runner: Runner) -> WeightReader:
    """Returns a reader of packed weights that keeps them in a file; or the reader itself, where that does not serve.

    Args:
      config: completed. runner: of the engine, without weights.
    """
    serves = runner.products.packs and runner.placement is ONE_DEVICE and not runner.embeds_on_host
    if reader.draws or not serves or not capabilities().shares_host_memory or os.environ.get(SWITCH) == "off":
        return reader
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(runner.params))
    if num_bytes < LEAST_BYTES:
        return reader
    settings = model, model.kept, config.dtype, config.quantization, runner.products.name
    try:
        code = Walk()((FAMILIES[model.family], QUANTISERS, METHODS, sources(), library().stem, jax.__version__))
    except NotStored:  # code of a user may change without notice
        return reader

    def read() -> Params:
        file = PackedFile(runner.params, f"{(digest := reader.digest())} {settings} {code.hex()}")
        if (mapped := file.read()) is not None:
            return mapped
        params = runner.weights(quantised(reader.read(), config.quantization), consume=True)
        if reader.digest() == digest:
            file.write(params)
        return file.read() or params

    return dataclasses.replace(reader, read=read)

"""Engines that take no time, for tests of benchmarks."""

import types
from typing import NamedTuple

from ksana_jax.core.config import ModelConfig
from ksana_jax.lab.bench import command, core

MODEL = ModelConfig(
    vocab_size=100, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, tie_embeddings=False
)


class FakeParams(NamedTuple):
    head: None = None


class FakeLLM:
    runner = types.SimpleNamespace(params=FakeParams())

    def __init__(self, num_blocks, steps):
        self.num_blocks, self.block_bytes, self.model_config, self.warm = num_blocks, 1000, MODEL, None
        self.steps = steps

    def warm_up(self, max_len):
        self.warm = max_len


def rows_of(bench, repeats=1):
    made = command.report_of(bench, core.run(bench, repeats)[0])
    return {(row.label, row.point["requests"]): row for row in made.rows}, made

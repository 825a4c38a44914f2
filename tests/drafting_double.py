"""A draft model on the fake network of `tests.fakes`, with the real bookkeeping around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.engine.draft_models.proposer import DraftModelProposer
from ksana_jax.engine.draft_models.small_model import SmallModel
from ksana_jax.runner.decode_loop import Stop
from ksana_jax.scheduler.speculative.base import ProposerContext, SpeculativeMethod
from ksana_jax.scheduler.step.types import StepInput, StepOutput
from tests.fake_executor import FakeExecutor
from tests.fake_network import HEAD_DIM, VOCAB


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeDraftModel(SpeculativeMethod):
    """Drafts with the target itself, except that its layers see what the one sees that looks back farthest."""

    def proposer(self, context: ProposerContext) -> Any:
        model: Any = FakeRunner(context)
        return DraftModelProposer(SmallModel(model, context), self.num_speculative_tokens, False)


class FakeRunner(FakeExecutor):
    """As much of a `Runner` as draft models need."""

    def __init__(self, context: ProposerContext):
        config, num_layers = context.config, len(context.patterns)
        assert config.num_blocks is not None
        self.config = ModelConfig(vocab_size=VOCAB, num_layers=num_layers, num_kv_heads=1, head_dim=HEAD_DIM)
        super().__init__((FULL,) * num_layers, num_blocks=config.num_blocks, block_size=config.block_size)

    def run_loop(self, steps: Sequence[StepInput], distributions: bool, stop: Stop) -> tuple[list[StepOutput], None]:
        done = [self.submit(step) for step in steps[: 1 + int(stop.most.max())]]
        return [*done, *[StepOutput(np.zeros_like(done[0].tokens))] * (len(steps) - len(done))], None

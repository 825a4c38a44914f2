"""A smaller model drafts: it decodes a few tokens of each row, which the target then verifies at once.

Source: Leviathan et al., arXiv:2211.17192, and Chen et al., arXiv:2302.01318. Draft tokens are sampled with the random
numbers of the target, so that both choose the same token as often as their distributions allow: Daliri et al.,
arXiv:2408.07978.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, ClassVar

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import FULL
from ksana_jax.engine.draft_models.proposer import DraftModelProposer
from ksana_jax.engine.draft_models.small_model import SmallModel
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.load import open_model
from ksana_jax.runner.planner.terms import weights_bytes
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.speculative.base import ProposerContext, SpeculativeMethod
from ksana_jax.sharding.placement import ONE_DEVICE
from ksana_jax.tokenizers import Tokenizer, find_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(SpeculativeMethod):
    """Drafts with a model of the same vocabulary.

    Args:
      model: its path or name, as in `LLM`.
    """

    short_rows: ClassVar[int] = 0
    has_model: ClassVar[bool] = True

    model: str = ""

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"speculative_config: model is {self.model!r:.60}, must be the directory or name of the draft model"
            )

    def block_bytes(self, config: EngineConfig) -> int:
        return draft_layout(self.config, config).block_bytes

    def weights_bytes(self, config: EngineConfig) -> int:
        return weights_bytes(self.config, config.dtype, "device", None, packs=config.operators.linear == "packed")

    @property
    def config(self) -> ModelConfig:
        """The configuration of the draft model."""
        return load_config(self.model)

    def proposer(self, context: ProposerContext) -> DraftModelProposer:
        check(self.model, self.config, context)
        return DraftModelProposer(self.small_model(context), self.num_speculative_tokens, self.acceptance != "sampled")

    def small_model(self, context: ProposerContext) -> SmallModel:
        """Loads the draft model, with a pool of as many blocks as the target's."""
        engine = context.config
        model, read = open_model(self.model, engine.dtype)
        assert engine.max_model_len is not None and engine.num_blocks is not None
        assert engine.max_repositioned_sinks is not None
        runner = Runner(
            model,
            read(),
            (FULL,) * model.num_layers,
            layout=draft_layout(model, engine),
            num_blocks=engine.num_blocks,
            max_model_len=engine.max_model_len,
            max_repositioned_sinks=engine.max_repositioned_sinks,
            settings=engine.operators,
            consume_params=True,
            placement=ONE_DEVICE,
        )
        return SmallModel(runner, context)


def draft_layout(model: ModelConfig, config: EngineConfig) -> KVLayout:
    """Returns the layout of a draft model's pool, whose blocks have the ids of the target's."""
    return layout_of(model, (FULL,) * model.num_layers, dtype=config.dtype, block_size=config.block_size)


def check(path: str, model: ModelConfig, context: ProposerContext) -> None:
    """Checks that a draft model, of some directory or name, fits its target.

    Raises:
      ConfigError: vocabularies differ.
    """
    name = f"speculative_config: draft model {path}"
    if model.recurrent is not None:
        raise ConfigError(f"{name} has recurrent layers, whose states after rejected tokens cannot be taken back")
    if model.vocab_size != context.vocab_size:
        raise ConfigError(
            f"{name}: it has a vocabulary of {model.vocab_size:,} ids, the target one of {context.vocab_size:,}"
        )
    theirs, ours = find_tokenizer(path), context.tokenizer
    if theirs is None or ours is None:
        return
    if (a := digest(theirs, model.vocab_size)) != (b := digest(ours, model.vocab_size)):
        raise ConfigError(f"{name}: its vocabulary is not that of the target: their hashes are {a} and {b}")


def digest(tokenizer: Tokenizer, num_rows: int) -> str:
    """Returns a hash of the vocabulary; ids that the embedding has no rows for do not count."""
    found: Any = hashlib.sha256()
    for token_id in range(min(tokenizer.vocab_size, num_rows)):
        piece = tokenizer.piece(token_id).data
        found.update(len(piece).to_bytes(4, "little") + piece)
    return found.hexdigest()[:12]

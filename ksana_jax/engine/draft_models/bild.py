"""Big Little Decoder: a small model decodes while confident; a large model corrects it where they disagree.

Source: Kim et al., arXiv:2302.07863. Lossy: texts differ from the large model's, unless the rollback threshold
is 0.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import ClassVar

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.draft_models.draft_model import DraftModel, check
from ksana_jax.engine.draft_models.proposer import DraftModelProposer
from ksana_jax.engine.draft_models.small_model import SmallModel
from ksana_jax.scheduler.speculative.base import ProposerContext, Texts
from ksana_jax.scheduler.step.drafts import Drafts

logger = logging.getLogger("ksana_jax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bild(DraftModel):
    """Drafts greedily with a model of the same vocabulary, and accepts tokens that the target finds probable enough.

    Lossy: a token is the draft model's where the target finds it probable enough, so texts depend on where drafts
    begin, and thereby on the rest of the batch. With rollback_threshold 0 they are the target's. Requests with
    a temperature get no drafts, and the target's texts.

    Args:
      num_speculative_tokens: maximum tokens that are decoded before the target verifies them; the paper's 10.
      fallback_threshold: a draft ends before a token with a smaller probability by the draft model, in [0, 1].
      rollback_threshold: a draft token is rejected where the target would choose another one and the negative logarithm
        of its probability, by the target, is larger; with penalties and biases, if there are any. From 0.
      acceptance: "bild", the rule of this method.
    """

    rules: ClassVar[tuple[str, ...]] = ("bild",)
    # The longest draft of more rows is rarely short.
    short_rows: ClassVar[int] = 2

    num_speculative_tokens: int = 10
    acceptance: str = "bild"
    fallback_threshold: float | None = None
    rollback_threshold: float | None = None

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.number("speculative_config: fallback_threshold", self.fallback_threshold, 0, 1),
            checks.number("speculative_config: rollback_threshold", self.rollback_threshold, 0),
            error=ConfigError,
        )
        if self.rollback_threshold and self.adaptive == "goodput":
            raise ConfigError(
                f"speculative_config: rollback_threshold is {self.rollback_threshold}, must be 0 with adaptive "
                '"goodput": texts depend on where drafts begin, and that would depend on how fast the machine is'
            )

    def proposer(self, context: ProposerContext) -> BildProposer:
        check(self.model, self.config, context)
        assert self.fallback_threshold is not None and self.rollback_threshold is not None
        if self.rollback_threshold:
            logger.warning(
                "speculative_config: bild is lossy: greedy texts differ from the model's own; with "
                "rollback_threshold 0 they are"
            )
        model, length = self.small_model(context), self.num_speculative_tokens
        return BildProposer(model, length, self.fallback_threshold, self.rollback_threshold)


class BildProposer(DraftModelProposer):
    """Decodes until each row's draft ends; see `Bild`, whose thresholds it has.

    Args:
      length: maximum tokens of a draft.
    """

    def __init__(self, model: SmallModel, length: int, fallback_threshold: float, rollback_threshold: float):
        super().__init__(model, length, distributions=False)
        self.set_thresholds(fallback_threshold, rollback_threshold)

    def set_thresholds(self, fallback: float, rollback: float) -> None:
        """Changes the thresholds of drafts to come; nothing is compiled again."""
        self.least = np.float32(math.log(fallback) if fallback else -math.inf)
        self._rollback = np.float32(rollback)

    def warm_up(self, max_width: int, samples: bool, workers: int) -> None:
        super().warm_up(max_width, False, workers)

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        assert texts.rows is not None
        drafted = np.flatnonzero((texts.rows.settings.columns.temperature[rows] == 0) & (most > 0))
        found = super().propose(texts, rows[drafted], most[drafted])
        ids, counts = np.zeros((len(rows), found.ids.shape[1]), np.int32), np.zeros(len(rows), np.int32)
        ids[drafted], counts[drafted] = found.ids, found.counts
        return Drafts(ids, counts, rollback=self._rollback)

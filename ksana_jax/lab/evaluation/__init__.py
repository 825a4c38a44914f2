"""Scores and completes the requests of lm-evaluation-harness on this engine, under its cache policy.

Reading order: `scoring` (log-likelihoods of token ids), `generation` (sampling parameters and stop strings), `harness`
(the model class, the only file that needs the extra `eval`).
"""

from typing import TYPE_CHECKING

from ksana_jax.core.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.lab.evaluation.harness import KsanaLM

_PUBLIC = {"ksana_jax.lab.evaluation.harness": "KsanaLM"}
__all__ = ["KsanaLM"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

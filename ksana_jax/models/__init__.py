"""The network as pure functions of parameters, tokens and an `attend` function, and the model families.

`docs/jax.md` and `examples/attention_by_hand.ipynb` use them. Names resolve on first use, so that reading a config does
not wait for jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ksana_jax.models.dense import attention_weights, causal_attend, dense_logits
    from ksana_jax.models.rope import make_rope
    from ksana_jax.models.transformer import Attend, Params, forward, init_params, logits

_PUBLIC = {
    "forward": "ksana_jax.models.transformer",
    "logits": "ksana_jax.models.transformer",
    "init_params": "ksana_jax.models.transformer",
    "Params": "ksana_jax.models.transformer",
    "Attend": "ksana_jax.models.transformer",
    "dense_logits": "ksana_jax.models.dense",
    "attention_weights": "ksana_jax.models.dense",
    "causal_attend": "ksana_jax.models.dense",
    "make_rope": "ksana_jax.models.rope",
}
__all__ = ["forward", "logits", "init_params", "Params", "Attend", "dense_logits", "attention_weights",
           "causal_attend", "make_rope"]  # fmt: skip


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'ksana_jax.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

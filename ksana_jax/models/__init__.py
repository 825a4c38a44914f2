"""The network as pure functions of parameters, tokens and an `attend` function, and the model families.

`docs/use/jax.md` and `examples/attention_by_hand.ipynb` use them. Names resolve on first use, so reading a config does
not import jax.
"""

from typing import TYPE_CHECKING

from ksana_jax.core.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.models.dense import attention_weights, dense_attend, dense_logits
    from ksana_jax.models.frequencies import make_rope
    from ksana_jax.models.params import Params, init_params
    from ksana_jax.models.transformer import Attend, forward, logits

_PUBLIC = {
    "ksana_jax.models.transformer": "forward logits Attend",
    "ksana_jax.models.params": "init_params Params",
    "ksana_jax.models.dense": "dense_logits attention_weights dense_attend",
    "ksana_jax.models.frequencies": "make_rope",
}
__all__ = ["forward", "logits", "init_params", "Params", "Attend", "dense_logits", "attention_weights"]
__all__ += ["dense_attend", "make_rope"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

"""KeyDiff (Park et al., arXiv:2504.15364)."""

import dataclasses

from ksana_jax.extend import EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyDiff(EvictionMethod):
    """Keeps the tokens whose keys are least like the mean key."""

    def priority(self, cached, xp):
        keys = cached.keys.astype(xp.float32)
        keys /= xp.linalg.norm(keys, axis=-1, keepdims=True)
        used = xp.arange(keys.shape[-2]) < cached.num_tokens[:, None, None, None]
        keys = xp.where(used[..., None], keys, 0)
        return -(keys * keys.mean(axis=-2, keepdims=True)).sum(axis=-1)

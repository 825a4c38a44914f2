"""How much each kv head needs the whole text: what changes if it alone sees sinks and recent tokens (DuoAttention)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.core.shared_kv import sources as sources_of
from ksana_jax.models.dense import dense_attend
from ksana_jax.models.params import Params
from ksana_jax.models.transformer import forward

# Few tokens, so that short texts have room for passkeys outside: what is computed grows with the text.
STREAMING = AttentionPattern(window=64, num_sinks=4, sink_position="absolute")
# Passkeys in a text, and tokens of each.
NUM_PASSKEYS, PASSKEY = 4, 24


def duoattention(params: Params, config: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns scores [L, K] of the kv heads of a model: the mean squared deviation of its last hidden states, where it
    repeats passkeys, from those with all heads seeing all, if that head alone streams. Heads of layers that have a
    pattern of their own have 0. Layers that read the same keys stream together, as their engine demands.

    The paper (arXiv:2410.10819) trains a gate of each head, all together, so that the same deviation is
    small with few heads that see all; this measures each gate alone at 0, without training, and does not see what heads
    do together. Its passkeys are words in a book; these are tokens of the text in random order. The texts are computed
    1 + L * K times.

    Args:
      tokens: [n, T] ids of texts, into which passkeys are planted.

    Raises:
      ConfigError: texts are too short for passkeys outside the window.
    """
    texts, num_repeated = jnp.asarray(with_passkeys(tokens)), NUM_PASSKEYS * PASSKEY
    positions = jnp.arange(texts.shape[1])
    near = STREAMING.visible(positions[:, None], positions)

    @jax.jit
    def hidden(params: Params, streams):
        attend = dense_attend(
            params, texts.shape[1], config=config, sees=lambda layer: near | ~streams[layer][:, None, None]
        )
        found = forward(params, texts, attend, None, config=config)[0]
        return found[:, -num_repeated:].astype(jnp.float32)

    shape = config.num_layers, config.num_kv_heads
    expected, scores = hidden(params, jnp.zeros(shape, bool)), np.zeros(shape)
    sources = np.array(sources_of(config.kv_layers, config.num_layers, config.num_layers))
    for layer, head in np.ndindex(shape):
        if config.layers[layer].attention.pattern == FULL and sources[layer] == layer:
            found = hidden(params, jnp.zeros(shape, bool).at[sources == layer, head].set(True))
            scores[sources == layer, head] = jnp.mean((found - expected) ** 2)
    return {"scores": scores}


def with_passkeys(tokens: np.ndarray, seed: int = 0) -> np.ndarray:
    """Returns texts [n, T] with passkeys outside the window of the end, where they are repeated in another order.

    Raises:
      ConfigError: they have no room.
    """
    rng, found, length = np.random.default_rng(seed), np.array(tokens), tokens.shape[1]
    least = STREAMING.num_sinks + (STREAMING.window or 0) + 2 * NUM_PASSKEYS * PASSKEY
    if length < least:
        raise ConfigError(f"texts of {length:,} tokens are too short for passkeys, {least:,} are enough")
    # No query that repeats a passkey has it in its window.
    last = length - (STREAMING.window or 0) - (NUM_PASSKEYS + 1) * PASSKEY
    places = np.linspace(STREAMING.num_sinks, last, NUM_PASSKEYS).astype(int)
    for text in found:
        keys = [rng.choice(text, PASSKEY, replace=False) for _ in places]
        for place, key in zip(places, keys, strict=True):
            text[place : place + PASSKEY] = key
        text[-NUM_PASSKEYS * PASSKEY :] = np.concatenate([keys[i] for i in rng.permutation(NUM_PASSKEYS)])
    return found

"""Makes tests/golden/smollm2_eviction.json: log-likelihoods of SmolLM2 under KV eviction, without the paged engine.

  python tests/golden/make_smollm2_eviction.py                  (needs `ksana fetch smollm2`; a minute on two cores)

The first CONTEXT tokens attend to all before them; later tokens attend to what the method's definition leaves of these
in each layer and kv head. One forward pass over the whole text has all of it as a mask. The last case streams the
context with sinks at positions in the cache. On another text, a user's program in torch agreed with the engine to five
digits for these seven cases.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.lab.runs.text_files import candidates
from ksana_jax.loading import load_model
from ksana_jax.models import forward, logits, make_rope
from ksana_jax.tokenizers import load_tokenizer

CONTEXT, SCORED, RECENT, SINKS = 512, 128, 32, 4
NEW = jnp.arange(CONTEXT) >= CONTEXT - RECENT


def most(priority, count):
    """Returns which of the tokens, [K, CONTEXT], have the highest priority."""
    return jnp.argsort(jnp.argsort(-priority, axis=-1), axis=-1) < count


def cosines(k):
    unit = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    anchor = unit.mean(0)
    return jnp.einsum("ckh,kh->kc", unit, anchor) / jnp.linalg.norm(anchor, axis=-1)[:, None]


def pooled(received):
    """Averages over five tokens before the newest ones, as avg_pool1d with padding."""
    padded = jnp.pad(received[:, :-RECENT], ((0, 0), (2, 2)))
    return jnp.pad(sum(padded[:, i : padded.shape[1] - 4 + i] for i in range(5)) / 5, ((0, 0), (0, RECENT)))


# {name: function of keys [CONTEXT, K, H] and weights [K, G, CONTEXT, CONTEXT] to what stays, [K or 1, CONTEXT]}
AT = jnp.arange(CONTEXT)
STAYS = {
    "full": lambda k, w: jnp.ones((1, CONTEXT), bool),
    "tova": lambda k, w: most(w[:, :, -1].mean((0, 1))[None], 128),
    "keydiff": lambda k, w: most(-cosines(k), 128),
    "snapkv": lambda k, w: most(jnp.where(NEW, jnp.inf, pooled(w[:, :, -RECENT:].sum((1, 2)))), 64),
    "h2o": lambda k, w: most(jnp.where(NEW, jnp.inf, w.sum((1, 2))), 64),
    "streaming_llm": lambda k, w: most(jnp.where(AT < SINKS, jnp.inf, AT)[None], 128),
}


def scores(q, k):
    """Returns [K, G, T, C] of q [T, N, H] and k [C, K, H], both rotated."""
    grouped = q.reshape(len(q), k.shape[1], -1, k.shape[2]) * k.shape[2] ** -0.5
    return jnp.einsum("tkgh,ckh->kgtc", grouped, k, precision="highest")


def reduced(name):
    """Returns attention to a context that is reduced once."""

    def weights(q, k, rotate):
        at = jnp.arange(len(q))
        q, k, causal = rotate(q, at), rotate(k, at), jnp.tri(len(q), dtype=bool)
        all_of = jax.nn.softmax(jnp.where(causal, scores(q, k), -jnp.inf))
        stay = STAYS[name](k[:CONTEXT], all_of[:, :, :CONTEXT, :CONTEXT])
        stay = jnp.pad(stay, ((0, 0), (0, len(q) - CONTEXT)), constant_values=True)
        seen = causal & ((at[:, None] < CONTEXT) | stay[:, None, None])
        return jax.nn.softmax(jnp.where(seen, scores(q, k), -jnp.inf))

    return weights


def streamed(q, k, rotate):
    """Attention to SINKS and the newest 128 - SINKS tokens before each; sinks at their places in the cache."""
    at = jnp.arange(len(q))
    distance = at[:, None] - at
    near, k = distance <= 128 - SINKS, rotate(k, at)
    in_cache = rotate(q, jnp.minimum(at, 128))
    seen = jnp.where(near, scores(rotate(q, at), k), jnp.where(at < SINKS, scores(in_cache, k), -jnp.inf))
    return jax.nn.softmax(jnp.where(distance >= 0, seen, -jnp.inf))


def mean_logprob(config, params, ids, attention, first):
    """Returns the mean log-probability of the tokens from position first on."""
    rope = make_rope(config.rope, config.head_dim)

    def attend(layer, q, k, v, state):
        weights = attention(q, k, lambda x, at: rope.rotate(x, rope.angles(at)))
        return jnp.einsum("kgtc,ckh->tkgh", weights, v, precision="highest").reshape(q.shape), state

    hidden, _ = forward(params, jnp.array(ids), attend, (), config=config)
    found = np.asarray(jax.nn.log_softmax(logits(params, hidden, config=config)), np.float64)
    return round(float(found[np.arange(first - 1, len(ids) - 1), ids[first:]].mean()), 6)


def main() -> None:
    tokenizer, (config, params) = load_tokenizer("smollm2"), load_model("smollm2")
    text = "".join(text for _, text in candidates(["python-docs"]))
    ids = [tokenizer.bos_id, *map(int, tokenizer.encode(text)[: CONTEXT + SCORED - 1])]
    found = {name: mean_logprob(config, params, ids, reduced(name), CONTEXT) for name in STAYS}
    found["streaming_llm, streamed"] = mean_logprob(config, params, ids[:CONTEXT], streamed, 128)
    path = Path(__file__).with_name("smollm2_eviction.json")
    path.write_text(json.dumps({"token_ids": ids, "mean_logprob": found}) + "\n")


if __name__ == "__main__":
    main()

"""Latents from grouped queries: what is kept, against float64 definitions; training computes what the engine does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.optimizer import loss_fn
from experiments.training.settings import LatentShape, ModelShape, TrainConfig
from experiments.training.start import first_params
from experiments.training.to_latents import to_latents
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.loading import load_model
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.params import init_params
from tests.training.test_step import reference_loss

pytestmark = pytest.mark.usefixtures("quick_compiles")

D, HEADS, H, PLAIN, ROTATED = 32, 4, 16, 8, 8
TEXTS = np.random.default_rng(0).integers(0, 300, (4, 64)).astype(np.int32)


def grouped(num_kv_heads):
    config = ModelConfig(
        vocab_size=300, d_model=D, num_layers=1, num_heads=HEADS, num_kv_heads=num_kv_heads, head_dim=H, d_ff=40
    )
    return config, init_params(dataclasses.replace(config, tie_embeddings=True), seed=2, std=0.3)


def of_latents(rank, theta=100.0):
    """A model that heads of 16 with a theta of 10,000 give: its 4 pairs are the fast ones of their 8."""
    latent = LatentShape(rank, ROTATED, PLAIN, H)
    shape = ModelShape(d_model=D, num_layers=1, num_heads=HEADS, d_ff=40, rope_theta=theta, latent=latent)
    return TrainConfig(model=shape, vocab_size=300).model_config()


def converted(num_kv_heads, rank):
    """Weights of the one layer before and after, float64, and the normed hidden states that it reads [tokens, D]."""
    config, params = grouped(num_kv_heads)
    after = to_latents(params, config, of_latents(rank), jnp.asarray(TEXTS)).layers[0]
    x = np.asarray(params.embed, np.float64)[TEXTS.reshape(-1)]
    x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps)
    before, after = (
        {f.name: np.asarray(w, np.float64) for f in dataclasses.fields(p) if (w := getattr(p, f.name)) is not None}
        for p in (params.layers[0], after)
    )
    return before, after, x


def scores(w, x, rank):
    """Scores [N, queries, keys] of tokens at one position, from weights of latents."""
    q = (x @ w["w_q_plain"].T).reshape(len(x), HEADS, PLAIN + ROTATED)
    a = x @ w["w_kv_a"].T
    keys = np.einsum("tr,npr->tnp", a[:, :rank], w["w_uk"].reshape(HEADS, PLAIN, rank))
    plain = np.einsum("qnp,knp->nqk", q[..., :PLAIN], keys)
    return plain + np.einsum("qnp,kp->nqk", q[..., PLAIN:], a[:, rank:])


def test_one_head_and_a_whole_rank_keep_scores_at_equal_positions_and_values():
    before, after, x = converted(1, rank := PLAIN + H)
    q, k = (x @ before[name].T for name in ("w_q", "w_k"))
    wanted = np.einsum("qnh,kh->nqk", q.reshape(len(x), HEADS, H), k)
    np.testing.assert_allclose(scores(after, x, rank), wanted, atol=1e-4 * np.abs(wanted).max())
    values = np.einsum("tr,nvr->tnv", x @ after["w_kv_a"][:rank].T, after["w_uv"].reshape(HEADS, H, rank))
    wanted = np.repeat((x @ before["w_v"].T)[:, None], HEADS, axis=1)
    np.testing.assert_allclose(values, wanted, atol=1e-4 * np.abs(wanted).max())


def test_two_heads_share_the_component_of_most_energy_and_a_rank_keeps_the_best():
    before, after, x = converted(2, rank := 12)
    k = (x @ before["w_k"].T).reshape(len(x), 2, 2, H // 2)  # [tokens, K, halves, pairs]
    shared = (x @ after["w_kv_a"][rank:].T).reshape(len(x), ROTATED // 2, 2)
    for pair in range(ROTATED // 2):
        singular = np.linalg.svd(k[..., pair].transpose(0, 2, 1).reshape(-1, 2), compute_uv=False)
        assert np.linalg.norm(shared[:, pair]) == pytest.approx(singular[0], rel=1e-4)
    # Of each group of queries, the first head: keys that are not rotated, and values.
    rows = [after[name].reshape(2, 2, -1, rank)[:, 0].reshape(-1, rank) for name in ("w_uk", "w_uv")]
    kept = x @ after["w_kv_a"][:rank].T @ np.concatenate(rows).T
    wanted = np.concatenate([k[..., ROTATED // 2 :].reshape(len(x), -1), x @ before["w_v"].T], axis=1)
    lost = np.linalg.svd(wanted, compute_uv=False)[rank:]
    assert np.linalg.norm(wanted - kept) == pytest.approx(np.linalg.norm(lost), rel=1e-3)
    latents = x @ after["w_kv_a"][:rank].T
    np.testing.assert_allclose(latents.T @ latents / len(x), np.eye(rank), atol=1e-3)


def test_loss_and_gradients_of_latents_are_those_of_the_model():
    config = of_latents(12)
    params = init_params(config, seed=1, std=0.2)
    targets = np.roll(TEXTS, -1, axis=1)
    expected, expected_grads = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, TEXTS, targets, config)))(params)
    ours = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, TEXTS, targets, config=config, dtype=jnp.float32)))
    loss, grads = ours(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for mine, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert float(jnp.linalg.norm(mine - theirs) / jnp.linalg.norm(theirs)) < 1e-4


def test_more_kv_heads_start_as_copies_that_compute_the_same():
    config = TrainConfig(init_from="ksana-tiny", model=ModelShape(num_kv_heads=4))
    params, wanted = first_params(config), config.model_config()
    found, base = load_model("ksana-tiny")
    ours, theirs = (dense_logits(p, jnp.asarray(TEXTS[:1]), config=c) for p, c in ((params, wanted), (base, found)))
    assert wanted.num_kv_heads == 2 * found.num_kv_heads
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_sizes_of_latents_that_do_not_divide_heads_are_one_error():
    config, params = grouped(2)
    message = "latents of heads of 16 need plain . rotated 16, value 16 and rope_theta 100, not 16, 16 and 10000"
    with pytest.raises(ConfigError, match=message):
        to_latents(params, config, of_latents(12, theta=10_000.0), jnp.asarray(TEXTS))

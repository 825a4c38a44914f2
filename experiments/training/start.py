"""Start of a training run: random weights and a new tokenizer, or another model's."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.training.adapted_model import adapted_tokenizer
from experiments.training.batches import Batches
from experiments.training.settings import TrainConfig
from experiments.training.to_hybrid import to_hybrid, with_decays
from experiments.training.to_latents import to_latents
from experiments.training.tokenizer import BOS_ID, load_tokenizer, train_tokenizer
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.files import read_bytes
from ksana_jax.core.sources import model_path
from ksana_jax.loading import load_model
from ksana_jax.models.params import Params, init_params

logger = logging.getLogger(__name__)
# Fields of a model that may differ from the weights' config: none changes the computation.
_MAY_DIFFER = {"max_position", "bos_id", "eos_ids"}
CONVERTED_WITH = 4  # batches whose hidden states weigh what latents keep, and norms of a hybrid
# What conversion to another kind of layers changes.
_OF_LATENTS = ("family", "latent", "head_dim", "num_kv_heads", "attention_scale", "rope")
_OF_HYBRIDS = ("family", "recurrent", "norm", "qk_norm", "out_gate")


def first_params(config: TrainConfig, batches: Batches | None = None) -> Params:
    """Returns the weights before the first step. A model of fewer heads of keys and values than `init_from` starts from
    the means of heads that become one, as GQA's uptraining does (Ainslie et al., arXiv:2305.13245, section 2.1), one of
    more heads from copies, one of latents or a hybrid from `to_latents` or `to_hybrid`, which need batches.

    Raises:
      ConfigError: the model of `init_from` has another shape, or its heads cannot be divided so.
      LoadError: it cannot be read.
    """
    wanted = config.model_config()
    if config.init_from is None:
        params = init_params(wanted, config.seed)
        return params if wanted.recurrent is None else with_decays(params, wanted)
    found, params = load_model(config.init_from)
    to_hybrids = wanted.recurrent is not None and found.recurrent is None
    if batches is not None and (to_hybrids or (wanted.latent is not None and found.latent is None)):
        texts = jnp.asarray(np.concatenate([batches[step][0] for step in range(CONVERTED_WITH)]))
        if to_hybrids:
            params, same = to_hybrid(params, found, wanted, texts, config.seed), _OF_HYBRIDS
        else:
            params, same = to_latents(params, found, wanted, texts), _OF_LATENTS
        found = dataclasses.replace(found, **{name: getattr(wanted, name) for name in same})
    heads, asked = found.num_kv_heads, wanted.num_kv_heads
    if changes := heads != asked and max(heads, asked) % min(heads, asked) == 0:
        found = dataclasses.replace(found, num_kv_heads=asked)
    names = sorted({field.name for field in dataclasses.fields(wanted)} - _MAY_DIFFER)
    values = [(name, getattr(found, name), getattr(wanted, name)) for name in names]
    if different := [f"{name} {has!r}, not {asked!r}" for name, has, asked in values if has != asked]:
        raise ConfigError(f"init_from: {config.init_from} has {'; '.join(different)}")
    return _change_heads(params, found) if changes else params


def _change_heads(params: Params, config: ModelConfig) -> Params:
    """Returns weights with `config.num_kv_heads` heads of keys, and of values: means of neighbours, or copies."""

    def changed(matrix):  # [K*H, D]
        heads = jnp.asarray(matrix).reshape(-1, config.head_dim, config.d_model)
        if (copies := config.num_kv_heads // len(heads)) > 1:
            return jnp.repeat(heads, copies, axis=0).reshape(-1, config.d_model)
        pooled = heads.reshape(config.num_kv_heads, -1, config.head_dim, config.d_model).mean(axis=1)
        return pooled.reshape(-1, config.d_model)

    layers = tuple(
        w if w.w_k is None else dataclasses.replace(w, w_k=changed(w.w_k), w_v=changed(w.w_v)) for w in params.layers
    )
    return dataclasses.replace(params, layers=layers)


def encoder(config: TrainConfig) -> Callable[[str], list[int]]:
    """Returns a function from text to ids, without special tokens: of the run's tokenizer.model, or of the tokenizer of
    the model that an adapter is trained for."""
    if config.lora is None:
        return load_tokenizer(Path(config.out_dir) / "tokenizer.model").encode
    assert config.init_from is not None
    return functools.partial(adapted_tokenizer(config.init_from).encode, add_special_tokens=False)


def ends_of(config: TrainConfig) -> tuple[int, int]:
    """Returns the ids of the beginning-of-text and the end-of-text token."""
    model = config.model_config()
    return model.bos_id or BOS_ID, model.eos_ids[0]


def tokenizer_model(config: TrainConfig, texts: list[str]) -> bytes:
    """Returns the tokenizer.model of a run; one that is trained learns from a sample of these texts.

    Raises:
      LoadError: there is no model directory `init_from`.
    """
    if config.init_from is not None:
        return read_bytes(model_path(config.init_from, weights=False) / "tokenizer.model")
    logger.info("training a tokenizer of %d pieces on %d files", config.vocab_size, len(texts))
    return train_tokenizer(texts, config.vocab_size, config.tokenizer_sample_bytes, config.seed)

"""Draft models for the tiny model of `tests.engine.small`, from the target itself to an unrelated model."""

import dataclasses
import functools

import jax
import pytest

from ksana_jax.loading.export import export_hf
from ksana_jax.models.params import init_params
from tests.engine.small import VOCAB, model

NAMES = ("itself", "first", "near", "other", "larger")


@functools.cache
def draft_model(name: str):
    """Configuration and weights: the target itself, its first layer, one near it, another one, and one of more ids."""
    config, params = model()
    other = init_params(config, seed=9, std=0.5)
    if name == "first":
        first = params.replace(layers=params.layers[:1])  # pyright: ignore[reportAttributeAccessIssue]  flax adds it
        return config.first_layers(1), first
    if name == "near":
        return config, jax.tree.map(lambda x, y: x + 0.08 * y, params, other)
    if name == "larger":
        larger = dataclasses.replace(config, vocab_size=VOCAB + 64)
        return larger, init_params(larger, seed=1)
    return config, {"itself": params, "other": other}[name]


@pytest.fixture(scope="session")
def drafters(tmp_path_factory):
    """Their directories by name."""
    found = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, path in found.items():
        export_hf(path, *draft_model(name))
    return {name: str(path) for name, path in found.items()}

"""Digests that distinguish engines whose keys and values differ though their weights are the same."""

import dataclasses

import pytest

from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.engine.fingerprint import fingerprint
from ksana_jax.models.params import init_params
from tests.loading.models_on_disk import TINY

LONGROPE = RopeConfig("longrope", factor=2.0, original_max_len=16, factors=(1.0,) * 4, short_factors=(1.0,) * 4)


@pytest.mark.parametrize(
    ("rope", "differ"),
    [(RopeConfig(), False), (RopeConfig("dynamic", factor=2.0, original_max_len=16), True), (LONGROPE, True)],
    ids=lambda value: value.kind if isinstance(value, RopeConfig) else "",
)
def test_max_model_len_counts_where_it_decides_the_frequencies(rope, differ):
    config, params = dataclasses.replace(TINY, rope=rope), init_params(TINY)
    digests = {fingerprint(config, params, dtype="f32", kv_dtype="f32", max_model_len=n) for n in (16, 32)}
    assert len(digests) == 1 + differ

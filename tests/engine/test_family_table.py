"""The table of families says what settings do; `tests/test_docs.py` compares it with the page."""

import pytest

from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.patterns import per_layer
from ksana_jax.engine import family_table
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.params import check_quantises
from ksana_jax.ops.invariant import check_invariant
from ksana_jax.ops.requirements import Requirements
from ksana_jax.sharding.shares import local_model
from tests.machine import compiled


@compiled
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_numerics_are_refused_as_the_table_says(family):
    cells = dict(zip(family_table.COLUMNS, family_table.row(family), strict=True))
    config = family_table.example(family)
    sides, alibi = 2 if config.latent is None else 1, config.alibi is not None
    needs = Requirements("cpu", None, "float32", 4, 4, 16, 16, codec="f32", alibi=alibi, sides=sides)
    if cells["invariant"] == "no":
        with pytest.raises(ConfigError, match=r"norms are layer|ALiBi|latents|lightning_indexer"):
            make_layout(config, per_layer(config.pattern, config.num_layers), EngineConfig(numerics="invariant"))
            check_invariant(config, needs, "float32")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_is_divided_and_quantised_as_the_page_says(family):
    config = family_table.example(family)
    if config.recurrent is None:  # `core.refusals`
        local_model(config, 2)
    check_quantises(config, "int8")

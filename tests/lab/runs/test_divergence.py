"""Two engines that decode the same tokens, on the real engine with a model of one layer."""

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.tasks.divergence import divergences
from tests.lab.runs.runs import Engines, reported

pytestmark = pytest.mark.usefixtures("few_shapes")

ENGINE = {"block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 2}
SETTINGS = {"num_texts": 3, "prompt_tokens": 24, "output_tokens": 12}
H2O = {"method": "h2o", "budget": 0.25, "interval": 1, "prompts": "whole"}


def given(model, **more):
    return {
        "task": "divergence",
        "model": model,
        "load_format": "dummy",
        "engine": ENGINE,
        "settings": SETTINGS,
        **more,
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    """Folder and report of one seed, and the engines built."""
    variants = [
        {"name": "full", "settings.continuation": "greedy"},
        {"name": "H2O", "engine.kv_eviction": H2O},
        {"name": "window", "pattern": {"window": 6}, "settings.save_tokens": True},
    ]
    folder, engines = tmp_path_factory.mktemp("out"), Engines()
    return folder, reported(plan(given(one_layer, variants=variants, seeds=[0])), folder, make_llm=engines), engines


def test_an_engine_does_not_diverge_from_itself(measured):
    folder, made, _ = measured
    row = made.rows[0]
    assert row.mean("kl") == pytest.approx(0, abs=1e-9) and row.mean("js") == pytest.approx(0, abs=1e-9)
    assert row.mean("top1") == 1 and (folder / "figure.png").stat().st_size > 0
    assert len(row.values["kl"]) == 3 and row.weights["kl"] == [12, 12, 12]


def test_rows_that_lose_tokens_diverge_and_read_what_they_decode(measured):
    _, made, engines = measured
    for row in made.rows[1:]:
        assert row.mean("kl") > 1e-6 and 0 < row.mean("js") < np.log(2)
        # In chunks of other sizes; float32 adds in another order.
        assert row.mean("apart") < 1e-4 and row.mean("nll") == pytest.approx(row.mean("read_nll"), abs=1e-5)
    assert [llm.config.kv_eviction is None for llm in engines] == [True, False]


def test_saved_tokens_average_to_the_row(measured):
    folder, made, _ = measured
    [saved] = map(np.load, folder.glob("*.tokens.npz"))
    assert saved["position"].tolist() == [*range(24, 36)] * 3 and len(set(saved["text_digest"])) == 3
    assert saved["kl"].mean() == pytest.approx(made.rows[2].mean("kl"))
    assert -saved["logprob"].mean() == pytest.approx(made.rows[2].mean("nll"))
    assert not np.array_equal(saved["logprob"], saved["reference_logprob"])


def test_divergences_are_those_of_scipy():
    rng = np.random.default_rng(3)
    p, q = (np.log(rng.dirichlet(np.full(50, 0.3), 7)) for _ in range(2))
    p[:, 4] = -np.inf  # an id that cannot be
    p -= np.logaddexp.reduce(p, axis=1)[:, None]
    kl, js = divergences(p.astype(np.float32), q.astype(np.float32))
    np.testing.assert_allclose(kl, rel_entr(np.exp(p), np.exp(q)).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(js, jensenshannon(np.exp(p), np.exp(q), axis=1) ** 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"settings": {"against": {"numeric": "fast"}}}, "settings.against.numeric: .*nearest is 'numerics'"),
        ({"settings": {"continuation": "own"}}, "settings.continuation"),
        ({"engine": {"kv_eviction": {"method": "oracle", "budget": 0.5}}}, "must know the text beforehand"),
    ],
)
def test_settings_that_cannot_be_are_named(one_layer, more, message):
    with pytest.raises(ConfigError, match=message):
        plan(given(one_layer, **more))

"""Every pair of settings serves requests with the tokens that each promises, or is refused for a listed reason."""

import itertools
import random

import numpy as np
import pytest

from ksana_jax.core.refusals import REFUSALS
from tests import mappings
from tests.combinations.settings import SETTINGS, Engines, Setting
from tests.soak import soak_unless

# On several devices: tests/sharding/on_devices/test_pairs.py.
ONE_DEVICE = [setting for setting in SETTINGS.values() if setting.kind != "devices"]
# The one layer that stores keys and values would be in full precision.
NOT_BOTH = {("kv_full_precision_layers", other) for other in ("kv_layers", "recurrent layers")}
PAIRS = [
    (a, b) for a, b in itertools.combinations(ONE_DEVICE, 2) if a.kind != b.kind and (a.name, b.name) not in NOT_BOTH
]
# One that ended in ZeroDivisionError, and some drawn by a seed; `make soak` has all.
SAMPLE = {("kv_eviction h2o", "preempt auto")} | {
    (a.name, b.name) for a, b in random.Random(35).sample([pair for pair in PAIRS if pair[1].kind != "grammar"], 20)
}
# Grammars with what else drafts, runs ahead or moves.
SAMPLE |= {
    (name, "structured_outputs") for name in ("speculative_config jacobi", "num_scheduler_steps", "preempt swap")
}
SAMPLE |= {("recurrent layers", name) for name in ("host tier", "preempt swap", "n", "numerics invariant")}
SAMPLE |= {("recurrent layers", f"speculative_config {name}") for name in ("grammar", "draft_model", "rejection")}
SAMPLE |= {(name, "recurrent layers") for name in ("kv_eviction h2o", "kv_cache_dtype gear4")}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(autouse=True)
def few_mappings_in_this_module(engines):
    yield
    if mappings.are_many():
        engines.forget_programs()


def lacks(engines: Engines, setting: Setting) -> str | None:
    """Returns why this machine does not have a setting: invariant numerics need native kernels."""
    try:
        engines.serve(setting)
    except ValueError as error:
        return str(error)
    return None


def check_pair(engines: Engines, a: Setting, b: Setting) -> None:
    try:
        found = engines.serve(a, b)
    except ValueError as error:
        is_listed = any(r.reason in str(error) for r in REFUSALS)
        assert "\n" not in str(error) and (is_listed or str(error) in (lacks(engines, a), lacks(engines, b))), error
        return
    if a.repeats and b.repeats:
        assert found.again == found.tokens
    for one, other in ((a, b), (b, a)):
        if one.keeps and other.repeats:
            expected = engines.serve(other, layers=max(a.layers, b.layers))
            assert found.tokens == expected.tokens, f"{one.name} changes the tokens of {other.name}"
            if found.logprobs and expected.logprobs:
                # float32 sums in another order, through one or two layers.
                np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("a", "b"),
    soak_unless(lambda pair: (pair[0].name, pair[1].name) in SAMPLE, PAIRS),
    ids=lambda setting: setting.name,
)
def test_two_settings_keep_their_promises_or_are_refused(a, b, engines):
    check_pair(engines, a, b)


@pytest.mark.parametrize("how", ["preempt swap", "preempt recompute", "preempt auto"])
def test_the_pool_does_not_hold_all_requests(how, engines):
    assert engines.serve(SETTINGS[how]).num_preemptions

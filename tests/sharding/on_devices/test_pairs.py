"""Tensor parallelism with every other setting; see `tests.combinations`."""

import pytest

from tests.combinations.settings import SETTINGS, Engines
from tests.combinations.test_pairs import ONE_DEVICE, check_pair

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("quick_compiles")]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return Engines(tmp_path_factory.mktemp("engines"))


# Generated tokens repeat, and keys of equal tokens have equal norms in the first layer: rounding decides which go.
OTHERS = [setting for setting in ONE_DEVICE if setting.name != "kv_eviction knorm"]


@pytest.mark.parametrize("other", OTHERS, ids=lambda setting: setting.name)
def test_two_devices_keep_the_tokens_of_one_or_are_refused(other, engines):
    check_pair(engines, SETTINGS["tensor_parallel_size"], other)

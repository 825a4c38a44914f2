"""Tensor parallelism with every other setting; see `tests.combinations`."""

import pytest

from tests.combinations.settings import SETTINGS, Engines
from tests.combinations.test_pairs import ONE_DEVICE, check_pair

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("quick_compiles")]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("other", ONE_DEVICE, ids=lambda setting: setting.name)
def test_two_devices_keep_the_tokens_of_one_or_are_refused(other, engines):
    check_pair(engines, SETTINGS["tensor_parallel_size"], other)

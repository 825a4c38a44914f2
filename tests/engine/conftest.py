"""One small engine for each file of tests of the public API; a file that needs another defines its own."""

import pytest

from tests.engine.drafters import drafters  # noqa: F401  a fixture
from tests.engine.small import Letters, assert_idle, make_llm


@pytest.fixture(scope="module")
def engine():
    return make_llm(Letters())


@pytest.fixture
def llm(engine):
    yield engine
    assert_idle(engine)

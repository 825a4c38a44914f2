"""One server for all tests of a module that only ask."""

import pytest

from tests.serve.server.serving import serving


@pytest.fixture(scope="module")
def served():
    with serving() as server:
        yield server

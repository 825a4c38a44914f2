"""Plugins are built with another XLA: see `tests.compiling`."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def default_for_plugins(default_compiler):
    """Every test here may start a process with a plugin."""

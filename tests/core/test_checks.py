"""One wording for all settings that cannot be."""

import math

import numpy as np
import pytest

from ksana_jax.core import checks, units
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import path_problem


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (checks.integer("n", 0), "n is 0, must be an integer from 1"),
        (checks.integer("n", True), "n is True, must be an integer from 1"),
        (checks.integer("n", 5.0, -2, 5000), "n is 5.0, must be an integer from -2 to 5,000"),
        (checks.integer("n", None, 0), "n is None, must be an integer from 0"),
        (checks.integer("n", 40_000, 0, 5, optional=True), "n is 40,000, must be an integer from 0 to 5 or None"),
        (checks.integer("n", 10**5000, 0, 5), "n is an integer of 16,610 bits, must be an integer from 0 to 5"),
        (checks.number("x", math.nan, 0, 1), "x is nan, must be a number from 0 to 1"),
        (checks.number("x", math.inf, above=0), "x is inf, must be a finite number above 0"),
        (checks.number("x", 1, 0, below=1), "x is 1, must be a number from 0 and below 1"),
        (checks.number("x", 0, above=0, high=1), "x is 0, must be a number above 0 and at most 1"),
        (
            checks.number("x", 5.5e7, 1, 1e7, optional=True),
            "x is 55,000,000.0, must be a number from 1 to 10,000,000 or None",
        ),
        (checks.number("x", "1", 0), "x is '1', must be a finite number from 0"),
        (checks.number("x", math.nan), "x is nan, must be a finite number"),
        (checks.one_of("kind", ["a"], {"a": 1, "b": 2}), "kind is ['a'], must be one of a, b"),
        (checks.one_of("kind", "c", ("a", "b")), "kind is 'c', must be one of a, b"),
        (path_problem("folder", "a\0b"), "folder is 'a\\x00b', must be a path without NUL characters"),
        (path_problem("folder", 3), "folder is 3, must be a path without NUL characters"),
        (checks.boolean("on", 1), "on is 1, must be True or False"),
        (checks.boolean("on", "x" * 100), f"on is '{'x' * 76}..., must be True or False"),
    ],
    ids=str,
)
def test_a_problem_names_the_setting_the_value_and_the_limits(problem, says):
    assert problem == says


@pytest.mark.parametrize(
    "problem",
    [
        checks.integer("n", 1),
        checks.integer("n", 2**70),
        checks.integer("n", 5, 5, 5),
        checks.integer("n", None, optional=True),
        checks.number("x", 0, 0, 1),
        checks.number("x", 1.0, above=0, high=1),
        checks.number("x", np.float64(0.5), 0),
        checks.number("x", None, 0, optional=True),
        checks.one_of("kind", "a", ("a", "b")),
        checks.boolean("on", False),
    ],
)
def test_values_at_the_edge_of_a_range_are_no_problem(problem):
    assert problem is None


def test_the_first_problem_is_raised_as_the_error_asked_for():
    checks.require(None, None)
    with pytest.raises(ConfigError, match=r"^first$"):
        checks.require(None, "first", "second", error=ConfigError)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**40, "1,024.00 GiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_suits_them(num_bytes, text):
    assert units.byte_size(num_bytes) == text

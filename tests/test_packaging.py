"""What comes with the package besides its code."""

import importlib
from pathlib import Path

import pytest
import yaml

import ksana_jax

ROOT = Path(__file__).parents[1]
# Of version 1.2.0 of the Citation File Format (schema.json): required, and those that we use besides.
REQUIRED = {"cff-version", "message", "title", "authors"}
ALLOWED = REQUIRED | {"type", "version", "license", "abstract", "keywords", "repository-code", "date-released", "doi"}


def test_the_citation_has_the_fields_of_its_format_and_our_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= REQUIRED and citation.keys() <= ALLOWED
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    # A group is an entity with a name; people have family-names and given-names.
    assert all(author.keys() <= {"name", "website"} and author["name"] for author in citation["authors"])
    assert citation["version"] == ksana_jax.__version__
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text() and citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("package", ["ksana_jax", "pallas_kernels"])
def test_type_checkers_are_told_that_packages_carry_types(package):
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in (ROOT / "pyproject.toml").read_text().split(f"{package} = [")[1].split("]")[0]


@pytest.mark.parametrize("module", ["ksana_jax", "ksana_jax.models", "ksana_jax.loading", "ksana_jax.planner"])
def test_public_names_are_those_that_resolve(module):
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(" ".join(package._PUBLIC.values()).split())
    assert set(package.__all__) <= set(dir(package))  # for completion in a notebook
    assert all(getattr(package, name).__doc__ or name == "Attend" for name in package.__all__)

"""What comes with the package besides its code."""

import importlib
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import ksana_jax

ROOT = Path(__file__).parents[1]
# Of version 1.2.0 of the Citation File Format (schema.json): required, and those that we use besides.
REQUIRED = {"cff-version", "message", "title", "authors"}
ALLOWED = REQUIRED | {"type", "version", "license", "abstract", "keywords", "repository-code", "date-released", "doi"}

# The newest advisory of each package that has one, and the version that fixes it. To add one: raise the bound too.
ADVISORIES = {
    "aiohttp": ("3.14.3", "CVE-2026-69244"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "pytest": ("9.0.3", "CVE-2025-71176"),
    "ray": ("2.55.0", "CVE-2026-41486"),
    "sentencepiece": ("0.2.1", "CVE-2026-1260"),
    "setuptools": ("83.0.0", "PYSEC-2026-3447"),
    "starlette": ("1.3.1", "CVE-2026-54283"),
    "torch": ("2.10.0", "CVE-2026-24747"),
    "transformers": ("5.5.0", "CVE-2026-5241"),
}


def requirements() -> list[Requirement]:
    """All that pyproject.toml asks for, extras and the build included, but the package itself."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = file["project"]
    lists = [file["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    return [found for one in lists for text in one if (found := Requirement(text)).name != "ksana-jax"]


def lower_bound(requirement: Requirement) -> Version:
    [bound] = [part.version for part in requirement.specifier if part.operator == ">="]
    return Version(bound)


def test_no_lower_bound_admits_a_version_with_a_known_advisory():
    admitted = [
        f"{found}: {advisory} is fixed in {fixed}"
        for found in requirements()
        for fixed, advisory in [ADVISORIES.get(found.name, ("0", ""))]
        if lower_bound(found) < Version(fixed)
    ]
    assert not admitted, "\n".join(admitted)
    assert ADVISORIES.keys() <= {found.name for found in requirements()}


def test_the_versions_that_tests_run_on_are_within_the_bounds():
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in "#"]
    bounds = {found.name: found.specifier for found in requirements()}
    outside = [
        str(pin) for pin in pinned for part in pin.specifier if part.version not in bounds.get(pin.name, pin.specifier)
    ]
    assert not outside and len(bounds.keys() & {pin.name for pin in pinned}) > 20


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


@pytest.mark.parametrize("module", ["ksana_jax", "ksana_jax.models", "ksana_jax.loading", "ksana_jax.runner.planner"])
def test_public_names_are_those_that_resolve(module):
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(" ".join(package._PUBLIC.values()).split())
    assert set(package.__all__) <= set(dir(package))  # for completion in a notebook
    assert all(getattr(package, name).__doc__ or name == "Attend" for name in package.__all__)

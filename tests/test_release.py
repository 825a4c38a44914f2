"""Moving the version: its places, the changelog's section, and the notes of a tag."""

import datetime
from pathlib import Path

import make_release as release
import pytest

from ksana_jax import __version__

TODAY = datetime.date(2026, 12, 1)
CHANGELOG = """# Changelog

## 0.2.0 (unreleased)

### Added

- Fly.

## 0.1.0 (2026-11-01)

- Walk.
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "ksana_jax").mkdir()
    (tmp_path / "ksana_jax/__init__.py").write_text('x = 1\n__version__ = "0.1.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def read(checkout: Path) -> list[str]:
    return [(checkout / name).read_text() for name in ("ksana_jax/__init__.py", "CITATION.cff", "CHANGELOG.md")]


def test_a_release_dates_its_section_and_returns_it_as_notes(checkout):
    assert release.move(checkout, "0.2.0", TODAY) == "### Added\n\n- Fly.\n"
    assert read(checkout) == [
        'x = 1\n__version__ = "0.2.0"\n',
        "cff-version: 1.2.0\nversion: 0.2.0\n",
        CHANGELOG.replace("0.2.0 (unreleased)", "0.2.0 (2026-12-01)"),
    ]


def test_the_next_version_begins_a_section(checkout):
    release.move(checkout, "0.2.0", TODAY)
    assert release.move(checkout, "0.3.0", TODAY) == ""
    assert "# Changelog\n\n## 0.3.0 (unreleased)\n\n## 0.2.0 (2026-12-01)\n" in read(checkout)[2]
    assert '"0.3.0"' in read(checkout)[0]


@pytest.mark.parametrize(
    "version, message",
    [
        ("", "VERSION is '', must be three numbers, such as 0.2.0"),
        ("v1.0.0", "VERSION is 'v1.0.0', must be three numbers"),
        ("0.3.0", "VERSION is 0.3.0, and CHANGELOG.md has 0.2.0 as unreleased: release that first"),
    ],
)
def test_a_version_that_cannot_follow_changes_nothing(checkout, version, message):
    before = read(checkout)
    with pytest.raises(ValueError, match=message):
        release.move(checkout, version, TODAY)
    assert read(checkout) == before


def test_a_version_is_released_once(checkout):
    release.move(checkout, "0.2.0", TODAY)
    with pytest.raises(ValueError, match=r"0\.2\.0, which CHANGELOG.md has as released"):
        release.move(checkout, "0.2.0", TODAY)


def test_this_checkout_states_its_version_as_the_tool_expects():
    for name, stated in release.STATED.items():
        assert f"\n{stated.format(__version__)}\n" in (release.ROOT / name).read_text()
    assert release.section((release.ROOT / "CHANGELOG.md").read_text(), __version__).startswith("### Added")

"""Moves the version number: `make release VERSION=0.2.0`.

    python .ci/make_release.py VERSION

For the version that CHANGELOG.md has as unreleased, dates its section and prints it: the notes of the tag. For a later
one, begins its section. Both write the version where it is stated.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Files that state the version, and how.
STATED = {"ksana_jax/__init__.py": '__version__ = "{}"', "CITATION.cff": "version: {}"}
UNRELEASED = re.compile(r"^## (\S+) \(unreleased\)$", re.MULTILINE)


def move(root: Path, version: str, today: datetime.date) -> str:
    """Moves the version of a checkout; returns the notes of the release, or "" where a section begins.

    Raises:
      ValueError: it is not a version, or its section is neither the unreleased one nor a new one.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"VERSION is {version!r}, must be three numbers, such as 0.2.0")
    path = root / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    found = UNRELEASED.search(text)
    if found is not None and found[1] == version:
        text, notes = text.replace(found[0], f"## {version} ({today})", 1), section(text, version)
    elif found is not None:
        raise ValueError(f"VERSION is {version}, and CHANGELOG.md has {found[1]} as unreleased: release that first")
    elif f"## {version} (" in text:
        raise ValueError(f"VERSION is {version}, which CHANGELOG.md has as released")
    else:
        text, notes = text.replace("\n## ", f"\n## {version} (unreleased)\n\n## ", 1), ""
    for name, stated in STATED.items():
        file = root / name
        pattern = re.escape(stated).replace(r"\{\}", r"[\d.]+")
        changed = re.sub(f"^{pattern}$", stated.format(version), file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        file.write_text(changed, encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    return notes


def section(changelog: str, version: str) -> str:
    """Returns a version's section of a changelog, without its heading."""
    _, _, rest = changelog.partition(f"\n## {version} (")
    _, _, body = rest.partition("\n")
    return body.partition("\n## ")[0].strip() + "\n"


if __name__ == "__main__":
    try:
        print(move(ROOT, sys.argv[1], datetime.date.today()), end="")
    except ValueError as error:
        sys.exit(str(error))

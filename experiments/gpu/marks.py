"""Marks on disk of a section's running work: after a signal the driver reads which case ended it. No jax."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_numbers = itertools.count()


@contextlib.contextmanager
def mark(folder: Path, what: str, who: str, case: str) -> Iterator[None]:
    """Keeps a file in `folder` during the work that `what` names: an abort leaves it there."""
    path = folder / f"mark-{next(_numbers)}.json"
    path.write_text(json.dumps({"what": what, "who": who, "case": case}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def take(folder: Path) -> list[dict[str, Any]]:
    """Returns and removes the marks of all threads of a dead process."""
    found = []
    for path in sorted(folder.glob("mark-*.json")):
        with contextlib.suppress(ValueError):
            found.append(json.loads(path.read_text()))
        path.unlink(missing_ok=True)
    return found

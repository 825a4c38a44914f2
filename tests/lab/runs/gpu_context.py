"""A section's context for tests of `experiments.gpu`."""

import time
from pathlib import Path

from experiments.gpu.context import Context


def make_context(tmp_path: Path, section: str = "decode") -> Context:
    return Context(section, tmp_path / "records.jsonl", time.monotonic() + 300, tiny=True, folder=tmp_path)

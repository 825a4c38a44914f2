"""Writes train_log.jsonl, one line per measurement, and drops lines of steps that a resumed run repeats."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ksana_jax.core.files import open_to_update, read_bytes, write_atomic


class TrainLog:
    """Appends records to a file, after dropping its lines of steps beyond `step` and any incomplete line."""

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists():
            for line in read_bytes(path).decode().splitlines():
                try:
                    at = json.loads(line)["step"]
                except (ValueError, KeyError, TypeError):
                    break
                if at <= step:
                    kept.append(line + "\n")
        write_atomic(path, "".join(kept))
        self._path = path

    def write(self, record: dict) -> None:
        """Appends one line."""
        with open(open_to_update(self._path, os.O_APPEND), "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

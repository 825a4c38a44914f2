"""train_log.jsonl: one line per measurement, flushed, without lines of steps that a resumed run takes again."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ksana_jax.files import open_to_update, read_bytes, write_atomic


class TrainLog:
    """Appends records to a file whose lines of later steps than `step` are dropped first, as is a half-written line."""

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists():
            for line in read_bytes(path).decode().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    break
                if record["step"] <= step:
                    kept.append(line + "\n")
        write_atomic(path, "".join(kept))
        self._file = open(open_to_update(path, os.O_APPEND), "a", encoding="utf-8")

    def write(self, record: dict) -> None:
        """Appends one line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

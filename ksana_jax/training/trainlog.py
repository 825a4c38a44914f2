"""train_log.jsonl: one line per measurement, flushed, without lines of steps that a resumed run takes again."""

from __future__ import annotations

import json
import os
from pathlib import Path


class TrainLog:
    """Appends records to a file whose lines of later steps than `step` are dropped first, as is a half-written line."""

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    break
                if record["step"] <= step:
                    kept.append(line + "\n")
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")

    def write(self, record: dict) -> None:
        """Appends one line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

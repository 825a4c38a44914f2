"""The GPU's clock, power and temperature while something is timed, from nvidia-smi where there is one. No jax."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

# Names in nvidia-smi, and in records.
FIELDS = {"clocks.sm": "sm_mhz", "power.draw": "watts", "temperature.gpu": "celsius"}
EVERY_MS = 200


class Gauges:
    """Readings of one GPU, a few in a second, from the first `watch` on."""

    def __init__(self):
        self._readings: list[tuple[float, tuple[float, ...]]] = []
        self._started, self._process = False, None

    def _start(self) -> None:
        self._started = True
        program = shutil.which("nvidia-smi")
        if program is None:
            return
        command = [
            program,
            f"--query-gpu={','.join(FIELDS)}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={EVERY_MS}",
            "--id=0",
        ]
        with contextlib.suppress(OSError):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._process = process
            self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            self._reader.start()

    def close(self) -> None:
        """Ends nvidia-smi; otherwise it ends with the section's processes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()

    def _read(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # "[N/A]"
                    self._readings.append((time.monotonic(), tuple(float(x) for x in line.split(","))))

    @contextlib.contextmanager
    def watch(self) -> Iterator[dict[str, Any]]:
        """Lowest and highest readings meanwhile, {"sm_mhz": (1965, 1980), ...}; empty where there are none."""
        if not self._started:
            self._start()
        began, found = time.monotonic(), {}
        yield found
        readings = [values for when, values in self._readings if when >= began]
        if readings:
            found |= {name: (min(v), max(v)) for name, v in zip(FIELDS.values(), zip(*readings))}

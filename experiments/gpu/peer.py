"""Torch in a process of its own, driven line by line: what it takes or breaks does not touch jax. No torch here."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from typing import Any

from experiments.gpu.context import Context


class PeerError(RuntimeError):
    """The peer said why it cannot; or it died, or did not answer in time."""


class PeerLacks(PeerError, NotImplementedError):
    """The requested implementation is not installed there, or does not exist."""


class TorchPeer:
    """Asks `torch_peer.py`, one JSON line each way. A peer that hangs is ended and started again for the next ask."""

    def __init__(self, context: Context):
        self._context, self._process = context, None
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._answered, self._gone = False, ""
        self.absent: set[str] = set()  # kinds whose package is not installed

    def start(self) -> None:
        """Starts it without waiting, so that its imports overlap with other work."""
        self._answers = answers = queue.SimpleQueue()
        self._process = process = subprocess.Popen(
            [self._context.peer_python, "-m", "experiments.gpu.torch_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                answers.put(line)
            answers.put("")

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def ask(self, op: str, *, timeout_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """The peer's answer.

        Raises:
          PeerError: it cannot, died, or did not answer within `timeout_s`.
        """
        if self._gone:
            raise PeerLacks(self._gone)
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=max(min(timeout_s, self._context.left()), 1.0))
            answer = json.loads(line)
            self._answered = True
        except queue.Empty:
            self.close()
            raise PeerError(f"torch did not answer {op} within {timeout_s:.0f} s") from None
        except (OSError, ValueError):
            self.close()
            if not self._answered:
                self._gone = f"no torch: {self._context.peer_python} -m experiments.gpu.torch_peer dies (see the log)"
                raise PeerLacks(self._gone) from None
            raise PeerError(f"the process with torch died at {op}") from None
        if "error" in answer:
            if answer.get("dead"):
                self.close()
            if answer.get("absent"):
                self.absent.add(arguments.get("kind", op))
            raise (PeerLacks if answer.get("lacks") else PeerError)(answer["error"])
        return answer

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join(2)
            # Processes of torch's compiler may still hold the pipe.
            for pipe in (self._process.stdin, None if self._reader.is_alive() else self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None

"""A peer in a process of its environment, asked over pipes; see `peers.worker`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from experiments.benches.peers import PeerSpec
from ksana_jax.lab.bench.core import Unavailable

_FOLDER = Path(__file__).parent / "peers"


class PeerProcess:
    """Starts a peer, with the arguments of its class; see `peers.worker`.

    Raises:
      Unavailable: its environment or package is missing, or it does not start; the message says how to get it.
    """

    def __init__(self, spec: PeerSpec, environment: Path, **arguments: Any):
        python = environment / "bin" / "python"
        if not python.exists():
            raise Unavailable(f"absent, there is no environment {environment}: `make peers` makes it")
        installed = [python, "-c", f"from importlib.util import find_spec; assert find_spec({spec.package!r})"]
        if subprocess.run(installed, capture_output=True).returncode:
            raise Unavailable(f"absent, {environment} has no {spec.package}: `make peers` installs it")
        self._said = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, "-u", _FOLDER / "worker.py", spec.script, spec.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self.pid = self._process.pid
        try:
            self.versions = str(self._ask("", arguments)["result"])
        except Unavailable:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[list[int]]]:
        """Returns the seconds that greedy decoding of `lengths` tokens took, and the tokens.

        Raises:
          Unavailable: it failed, with its message.
        """
        answer = self._ask("generate", {"prompts": prompts, "lengths": lengths})
        return answer["seconds"], answer["result"]

    def ask(self, call: str, **arguments: Any) -> Any:
        """Calls a method of the peer; returns its result. Raises Unavailable as `generate` does."""
        return self._ask(call, arguments)["result"]

    def _ask(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._said.seek(0)
            last = ([text.strip() for text in self._said if text.strip()] or ["it said nothing"])[-1]
            raise Unavailable(f"failed, its process ended: {last:.200}")
        answer = json.loads(line)
        if "error" in answer:
            raise Unavailable(f"failed: {' '.join(answer['error'].split()):.200}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

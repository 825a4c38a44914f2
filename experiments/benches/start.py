"""Measures CPU seconds and memory of starts, each in its own process; `make speed` compares two commits.

    python experiments/benches/start.py [MODEL]     smollm2 by default

Prints one line of JSON. Run it twice: the first start compiles. The package is the one on the Python path.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 600
POLL_S = 0.5
OFFLINE = """
import json, os, sys
def cpu_s():
    return sum(os.times()[:2])
from ksana_jax import LLM, SamplingParams
imported = cpu_s()
llm = LLM(sys.argv[1])
loaded = cpu_s()
memory = open("/proc/self/status").read().split("VmRSS:")[1].split()[0]
llm.generate(["The capital of France is"], SamplingParams(max_tokens=1, temperature=0))
print(json.dumps([imported, loaded - imported, cpu_s(), int(memory) / 1024]))
"""


def offline(model: str) -> dict[str, float]:
    """Measures an LLM up to its first token."""
    done = subprocess.run([sys.executable, "-c", OFFLINE, model], stdout=subprocess.PIPE, text=True, check=True)
    names = "import, CPU s", "LLM(), CPU s", "import to first token, CPU s", "LLM at ready, MiB"
    return dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))


def serve(model: str) -> dict[str, float]:
    """Measures a server until it is ready.

    Raises:
      SystemExit: it ends before, or takes too long.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, deadline = (
        [sys.executable, "-m", "ksana_jax", "serve", model, "--port", str(port)],
        time.time() + TIMEOUT_S,
    )
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(port):
            if process.poll() is not None or time.time() > deadline:
                raise SystemExit(f"ksana serve {model} did not get ready")
            time.sleep(POLL_S)
        proc = Path(f"/proc/{process.pid}")
        ticks = sum(map(int, proc.joinpath("stat").read_text().rpartition(")")[2].split()[11:15]))
        memory = proc.joinpath("status").read_text().split("VmRSS:")[1].split()[0]
        return {"serve to /ready, CPU s": ticks / os.sysconf("SC_CLK_TCK"), "serve at /ready, MiB": int(memory) / 1024}
    finally:
        process.kill()
        process.wait()


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=POLL_S).status == 200
    return False


if __name__ == "__main__":
    chosen = sys.argv[1] if sys.argv[1:] else "smollm2"
    print(json.dumps({"results": [offline(chosen) | serve(chosen)]}))

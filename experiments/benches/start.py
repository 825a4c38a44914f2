"""Measures CPU seconds and memory of starts, each in its own process; `make speed` compares two commits.

    python experiments/benches/start.py [MODEL] [--cold] [--llama PYTHON]     smollm2 by default

Prints one line of JSON. Run it twice: the first start compiles. The package is the one on the Python path. --cold adds
starts with empty caches; --llama llama.cpp's, by a Python that has llama_cpp. To alternate with another commit:

    .ci/speed 5 COMMIT "experiments/benches/start.py --cold --llama $PWD/.venv-peers/bin/python"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
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
LLAMA = """
import os, sys
from llama_cpp import Llama
Llama(sys.argv[1], verbose=False, n_threads=os.cpu_count())("The capital of France is", max_tokens=1)
print(sum(os.times()[:2]))
"""
JSON = {"Content-Type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 16}


def offline(model: str) -> dict[str, float]:
    """Measures an LLM up to its first token."""
    names = "import, CPU s", "LLM(), CPU s", "import to first token, CPU s", "LLM at ready, MiB"
    return dict(zip(names, json.loads(_printed(sys.executable, OFFLINE, model)), strict=True))


def serve(model: str) -> dict[str, float]:
    """Measures a server until it is ready, and until it has answered a chat.

    Raises:
      SystemExit: it ends before, or takes too long.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, deadline, began = f"http://127.0.0.1:{port}", time.time() + TIMEOUT_S, time.time()
    command = [sys.executable, "-m", "ksana_jax", "serve", model, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    proc = Path(f"/proc/{process.pid}")
    try:
        while not _is_ready(url):
            if process.poll() is not None or time.time() > deadline:
                raise SystemExit(f"ksana serve {model} did not get ready")
            time.sleep(POLL_S)
        ready_s, cpu_s = time.time(), _cpu_s(proc)
        memory = proc.joinpath("status").read_text().split("VmRSS:")[1].split()[0]
        chat = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), JSON)
        urllib.request.urlopen(chat, timeout=TIMEOUT_S).read()
        found = {
            "serve to /ready, CPU s": cpu_s,
            "serve to /ready, s": ready_s - began,
            "serve at /ready, MiB": int(memory) / 1024,
            "first chat, s": time.time() - ready_s,
            "serve to first chat's end, CPU s": _cpu_s(proc),
        }
        while b"progress" in urllib.request.urlopen(f"{url}/ready", timeout=TIMEOUT_S).read():
            time.sleep(POLL_S)  # the next start finds all programs
        return found
    finally:
        process.kill()
        process.wait()


def cold(model: str) -> dict[str, float]:
    """Measures both with empty caches, but for the model and the C++ library."""
    found: dict[str, float] = {}
    for measure in (offline, serve):
        with tempfile.TemporaryDirectory() as folder:
            caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ksana_jax")
            Path(folder, "ksana_jax").mkdir()
            for name in ("fetched", "native"):
                Path(folder, "ksana_jax", name).symlink_to(caches / name)
            before, os.environ["XDG_CACHE_HOME"] = dict(os.environ), folder
            found |= {f"cold {name}": number for name, number in measure(model).items()}
            os.environ.clear()
            os.environ.update(before)
    return found


def llama(model: str, python: str) -> dict[str, float]:
    """Measures llama.cpp up to the first token of the same file."""
    path = "import sys; from ksana_jax.core.sources import model_path; print(model_path(sys.argv[1], weights=True))"
    return {"llama.cpp to first token, CPU s": float(_printed(python, LLAMA, _printed(sys.executable, path, model)))}


def _printed(python: str, script: str, model: str) -> str:
    done = subprocess.run([python, "-c", script, model], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def _cpu_s(proc: Path) -> float:
    ticks = sum(map(int, proc.joinpath("stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError):
        return urllib.request.urlopen(f"{url}/ready", timeout=POLL_S).status == 200
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--llama")
    given = parser.parse_args()
    results = offline(given.model) | serve(given.model) | (cold(given.model) if given.cold else {})
    print(json.dumps({"results": [results | (llama(given.model, given.llama) if given.llama else {})]}))

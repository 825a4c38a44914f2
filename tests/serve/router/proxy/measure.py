"""Cost of the proxy: `python -m tests.serve.router.proxy.measure`. Fakes and load share a core, the proxy has another.

Prints for each load: requests and events a second, the share of its core that the proxy used, and the time to the first
byte with the proxy and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.serve.router.proxy.load import closed_loop, open_loop

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def process(core: int, *command: str) -> Iterator[subprocess.Popen]:
    command = (sys.executable, *command)
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        command = ("taskset", "-c", str(core), *command)
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield running
    finally:
        running.terminate()
        running.wait()
        assert running.stdout is not None
        running.stdout.close()


@contextlib.contextmanager
def fakes(count: int, token_s: float) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(count):
            args = (str(HERE / "fake_server.py"), "--token-s", str(token_s))
            out = stack.enter_context(process(1, *args)).stdout
            assert out is not None
            urls.append(out.readline().strip())
        yield urls


@contextlib.contextmanager
def proxy(urls: list[str], *options: str) -> Iterator[tuple[str, int]]:
    from ksana_jax.serve.router.proxy.spawning import free_port

    port = free_port()
    command = ("-m", "ksana_jax", "route", "--servers", ",".join(urls), "--port", str(port), *options)
    with process(0, *command) as running:
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready") as answer:
                if answer.status == 200:
                    break
            time.sleep(0.1)
        yield url, running.pid


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def measure(name: str, seconds: float, stream: bool, connections: int, max_tokens: int, token_s: float, prompt: str):
    """Prints one line; returns requests and events a second."""
    with fakes(2, token_s) as urls, proxy(urls, "--tokenizer", "ksana-tiny") as (url, pid):
        asyncio.run(closed_loop(url, connections, 0.5, stream, max_tokens, prompt))
        used, began = cpu_s(pid), time.perf_counter()
        clients = asyncio.run(closed_loop(url, connections, seconds, stream, max_tokens, prompt))
        wall = time.perf_counter() - began
        used = cpu_s(pid) - used
    done, events = sum(c.num_done for c in clients), sum(c.num_events for c in clients)
    failed = sum(c.num_failed for c in clients)
    per = used / (events if stream else done) * 1e6
    print(
        f"{name:32} {done / wall:7,.0f} requests/s {events / wall:8,.0f} events/s; the proxy used {used / wall:4.0%} "
        f"of a core, {per:5.1f} us per {'event' if stream else 'request'}; {failed} failed",
        flush=True,
    )
    return done / wall, events / wall


def added_ttft(seconds: float, rate: float) -> float:
    """Prints the time to the first byte with the proxy and without; returns what it adds at p99, in seconds."""
    with fakes(2, 0.01) as urls, proxy(urls, "--tokenizer", "ksana-tiny") as (url, _):
        asyncio.run(open_loop(url, rate, 1.0))
        times = {"with": [], "without": []}
        for _ in range(3):  # by turns: a changing load of the machine affects both
            times["with"] += asyncio.run(open_loop(url, rate, seconds / 6))
            times["without"] += asyncio.run(open_loop(urls[0], rate, seconds / 6))
    found = {name: [percentile(values, share) * 1e3 for share in (0.5, 0.99)] for name, values in times.items()}
    (p50, p99), (p50_0, p99_0) = found["with"], found["without"]
    print(
        f"ttft at {rate:g} streams/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms; without the proxy {p50_0:.2f} and "
        f"{p99_0:.2f}; added at p99 {p99 - p99_0:.2f} ms",
        flush=True,
    )
    return (p99 - p99_0) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.router.proxy.measure")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=200.0)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {1})
    short, long = "hi there, how are you?", "word " * 400
    measure("short requests", args.seconds, False, 32, 4, 0.0, short)
    measure("short requests, 2 kB of prompt", args.seconds, False, 32, 4, 0.0, long)
    measure("64 streams", args.seconds, True, 64, 200, 0.002, short)
    added_ttft(args.seconds, args.rate)


if __name__ == "__main__":
    main()

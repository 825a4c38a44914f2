"""Measures speed on this machine: `ksana bench NAME` for each entry of BENCHES."""

from __future__ import annotations

# A benchmark is a file with a subclass of `bench.core.Bench`: an entry here, or named as "package.module:Class".
BENCHES: dict[str, str] = {
    "throughput": "ksana_jax.lab.bench.throughput:Throughput",
    "latency": "ksana_jax.lab.bench.latency:Latency",
    "serving": "ksana_jax.lab.bench.serving:ServingBench",
}

"""Measures speed on this machine: `ksana bench NAME` for each entry of BENCHES. `peak_memory` compares memory."""

from __future__ import annotations

# A benchmark is a file with a subclass of `bench.core.Bench`, and an entry here.
BENCHES: dict[str, str] = {
    "host": "ksana_jax.lab.bench.host:Host",
    "throughput": "ksana_jax.lab.bench.throughput:Throughput",
    "latency": "ksana_jax.lab.bench.latency:Latency",
    "lora": "ksana_jax.lab.bench.lora:Lora",
    "tokens-in-forward": "ksana_jax.lab.bench.tokens_in_forward:TokensInForward",
    "scheduling": "ksana_jax.lab.bench.scheduling:Scheduling",
    "serving": "ksana_jax.lab.bench.serving:Serving",
}

"""Other engines, which benchmarks of throughput and the host loop measure in a separate environment (`make peers`).

Each is a class of a script in this folder, which a process of that environment runs (`worker`): they import nothing of
ksana_jax, and this package imports none of them.
"""

from __future__ import annotations

from typing import NamedTuple


class PeerSpec(NamedTuple):
    """A peer. script, name: its class. package: what must be installed. of_gguf: whether it is given a GGUF file."""

    script: str
    name: str
    package: str
    of_gguf: bool = False


# Measured by `ksana bench experiments.benches.host:Host`.
SCHEDULER = PeerSpec("of_vllm_scheduler", "Scheduler", "vllm")

PEERS: dict[str, PeerSpec] = {
    "transformers, static batch": PeerSpec("of_transformers", "Static", "transformers"),
    "transformers, continuous": PeerSpec("of_transformers", "Continuous", "transformers"),
    "vLLM": PeerSpec("of_vllm", "Engine", "vllm"),
    "llama.cpp, benchmark's loop": PeerSpec("of_llama_cpp", "Engine", "llama_cpp", of_gguf=True),
}

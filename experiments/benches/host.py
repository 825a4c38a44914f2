"""CPU time of the host loop per decode step and per new request."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.benches.host_engine import (
    BLOCK_SIZE,
    PARTS,
    PREFILL_TOKENS,
    VOCAB_SIZE,
    WARM_UP,
    TimedEngine,
    admission,
    decoding_engine,
)
from experiments.benches.peer_process import PeerProcess
from experiments.benches.peers import SCHEDULER
from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.lab.bench.core import Bench, Case, option
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow

OURS, EVICTING, VLLM = "ksana_jax", "ksana_jax, evicting", "vLLM"


@dataclasses.dataclass
class Host(Bench):
    """Measures the host loop: CPU time per decode step and per new request, with a device that takes no time.

    With --kv-eviction, the same steps alternately with and without evictions. With --peers, vLLM's scheduler too, if
    the environment has vLLM."""

    REPEATS = 1
    WARM_TURN = False

    rows: tuple[int, ...] = option((256, 1024), "numbers of running sequences")
    steps: int = option(200, "steps to time; the median is reported")
    context: int = option(1024, "tokens per sequence")
    prefix_cache: str = option("off", "off, on, or both")
    kv_eviction: dict[str, Any] | None = option(None, "KV eviction as in YAML, such as '{method: h2o, budget: 0.2}'")
    peers: str | None = option(None, "environment of other engines, as `make peers` makes it: .venv-peers")

    def title(self) -> str:
        context = f"contexts of {self.context:,} tokens, block size {BLOCK_SIZE}"
        return f"Host loop, decode steps, median of {self.steps}: {context}"

    def cases(self) -> list[Case]:
        counts = [*(("rows", count) for count in self.rows), ("steps", self.steps), ("context", self.context)]
        checks.require(
            *(checks.integer(name, value) for name, value in counts),
            checks.one_of("prefix_cache", self.prefix_cache, ("off", "on", "both")),
            error=ConfigError,
        )
        read_eviction(self.kv_eviction)
        caches = ("off", "on") if self.prefix_cache == "both" else (self.prefix_cache,)
        return [
            Case(label, {"rows": rows, "prefix_cache": cache})
            for rows in self.rows
            for cache in caches
            for label in (OURS, EVICTING, VLLM)
            if (label != EVICTING or (self.kv_eviction and cache == "off")) and (label != VLLM or self.peers)
        ]

    def start(self) -> None:
        self.folder, self.vllm = tempfile.TemporaryDirectory(), None

    def turn(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Measurement]]:
        """Steps of this engine's cases with as many rows take turns, so that a changing load affects all alike."""
        for rows in dict.fromkeys(case.point["rows"] for case in cases):
            alike = [case for case in cases if case.point["rows"] == rows]
            ours = [case for case in alike if case.label != VLLM]
            found = dict(zip(map(id, ours), self._decode_steps(rows, ours), strict=True))
            for case in alike:
                yield case, found[id(case)] if case.label != VLLM else self._vllm_steps(case)

    def _decode_steps(self, rows: int, cases: Sequence[Case]) -> list[Measurement]:
        # Rows that were prefilled first have already decoded some steps when the last one joins.
        most = rows * self.context // PREFILL_TOKENS + 2 + 2 * (WARM_UP + self.steps)
        engines = [
            TimedEngine(
                decoding_engine(
                    rows,
                    self.context,
                    most,
                    case.point["prefix_cache"] == "on",
                    self.kv_eviction if case.label == EVICTING else None,
                )
            )
            for case in cases
        ]
        for _ in range(WARM_UP + self.steps):
            for engine in engines:
                engine.step()
        for engine in engines:
            engine.watch_parts()
        for _ in range(WARM_UP + self.steps):
            for engine in engines:
                engine.step_parts()
        added = [
            admission(self.context, case.point["prefix_cache"] == "on") if case.label == OURS else {} for case in cases
        ]
        return [engine.medians() | more for engine, more in zip(engines, added, strict=True)]

    def _vllm_steps(self, case: Case) -> Measurement:
        assert self.peers is not None
        if self.vllm is None:
            # Nothing is loaded: vLLM asks for a configuration all the same.
            folder = Path(self.folder.name)
            (folder / "config.json").write_text(json.dumps(_CONFIG))
            self.vllm = PeerProcess(SCHEDULER, Path(self.peers), model=str(folder))
        found = self.vllm.ask(
            "measure",
            rows=case.point["rows"],
            prefix_cache=case.point["prefix_cache"] == "on",
            steps=self.steps,
            context=self.context,
        )
        return {**found, "versions": self.vllm.versions}

    def processes(self) -> list[int]:
        return [] if self.vllm is None else [self.vllm.pid]

    def close(self) -> None:
        if self.vllm is not None:
            self.vllm.close()
        self.folder.cleanup()

    # ------------------------------------------------------------------ results

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        keys = {key for row in rows for key in row.values}
        titles = {"step_us": "step, µs", **{f"{part}_us": f"{part}, µs" for part in PARTS}}
        titles |= {"add_us": "add a request, µs", "admit_us": "admit it, µs"}
        return [Column(key, title, lambda value: f"{value:,.1f}") for key, title in titles.items() if key in keys]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Compares steps with and without eviction, and vLLM's steps with this engine's."""
        found = {(row.label, *row.point.values()): us for row in rows if (us := row.mean("step_us"))}
        times: dict[tuple[str, str], list[str]] = {}
        for (label, count, cache), us in found.items():
            if label != OURS and (ours := found.get((OURS, count, cache))):
                times.setdefault((label, cache), []).append(f"{us / ours:.2f}")
        said = (
            f"Prefix cache {cache}: {label} takes {', '.join(t)} times as long." for (label, cache), t in times.items()
        )
        return " ".join(said)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        turns = [m for row in rows for t in row.trials for m in t if "versions" in m]
        said = [
            "Step: CPU time of a step without the device's. Add: to check and queue a request "
            "as long as the context; admit: to give it a row and blocks, and with a prefix cache to hash them."
        ]
        if turns:
            said.append(
                f"{turns[0]['versions']}: schedule and update of its synchronous scheduler, which prepare no arrays. "
                "Adding a request hashes its blocks."
            )
        return [*said, *super().notes(rows)]


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1_000_000,
}

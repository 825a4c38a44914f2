"""Output tokens per second of this and other engines on one checkpoint:
`ksana bench experiments.benches.throughput:PeerThroughput --peers .venv-peers`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benches.peer_process import PeerProcess
from experiments.benches.peers import PEERS
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.gguf_file import SUFFIX, gguf_of
from ksana_jax.core.processor import num_cores
from ksana_jax.core.sources import model_path
from ksana_jax.lab.bench import throughput
from ksana_jax.lab.bench.core import Unavailable, option
from ksana_jax.lab.bench.throughput import OWN, rates_by_count
from ksana_jax.lab.runs.tasks.results import Measurement, ResultRow
from ksana_jax.loading.gguf_export import export_gguf


@dataclasses.dataclass
class PeerThroughput(throughput.Throughput):
    """Measures output tokens per second as `ksana bench throughput`, and those of other engines in turn.

    They serve the same requests with the same weights, dtype and threads. With --quantization, llama.cpp alone is given
    a GGUF file, as stored; without it, all are given the numbers of the file in --dtype."""

    peers: str = option(".venv-peers", "environment of the other engines, as `make peers` makes it")
    only: tuple[str, ...] = option((), "first words of the peers to measure, such as vLLM,llama.cpp; all if not given")

    def labels(self) -> list[str]:
        for name in self.only:
            if not any(label.startswith(name) for label in PEERS):
                raise ConfigError(f"only is {name!r}, must begin the name of a peer: {'; '.join(PEERS)}")
        return super().labels() + [label for label in PEERS if label.startswith(self.only or "")]

    def checkpoint(self) -> str:
        from ksana_jax.loading.tensor_files import has_weights

        self.processes_of: dict[str, PeerProcess] = {}
        self.folder = tempfile.TemporaryDirectory()
        model = model_path(self.model)
        is_random = not has_weights(model)
        if is_random or (gguf_of(model) and self.quantization is None):
            _export(model, Path(self.folder.name), self.dtype, "dummy" if is_random else "auto", self.seed)
            model = Path(self.folder.name)
        self.model_files = gguf_of(model) or model
        return str(model)

    def serve(
        self, label: str, prompts: list[list[int]], lengths: list[int]
    ) -> tuple[float, list[list[int]], Measurement]:
        if label not in PEERS:
            return super().serve(label, prompts, lengths)
        peer = self._peer(label)
        seconds, token_ids = peer.generate(prompts, lengths)
        return seconds, token_ids, {"versions": peer.versions}

    def _peer(self, label: str) -> PeerProcess:
        if label not in self.processes_of:
            self.processes_of[label] = PeerProcess(
                PEERS[label],
                Path(self.peers),
                model=str(self._files(PEERS[label].of_gguf).resolve()),
                dtype=self.dtype,
                threads=num_cores(),
                rows=max(self.requests),
                max_model_len=self.max_model_len,
            )
        return self.processes_of[label]

    def _files(self, of_gguf: bool) -> Path:
        """Returns the model's GGUF file, made if there is none, or else its directory."""
        if (self.model_files.suffix == SUFFIX) == of_gguf:
            return self.model_files
        if not of_gguf:
            raise Unavailable(f"absent, it is given no GGUF files, such as {self.model}")
        made = Path(self.folder.name) / f"model{SUFFIX}"
        if not made.exists():
            try:
                export_gguf(self.model_files, made, self.dtype.upper())
            except ValueError as error:
                raise Unavailable(f"absent: {error}") from error
        return made

    def processes(self) -> list[int]:
        return [process.pid for process in self.processes_of.values()]

    def close(self) -> None:
        for process in self.processes_of.values():
            process.close()
        self.folder.cleanup()

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Compares with the fastest peer, and evictions with none."""
        said = []
        for what, rates in rates_by_count(rows).items():
            peers = {label: rate for label, rate in rates.items() if label in PEERS}
            own = [label for label in OWN if label in rates]
            if own and peers:
                best = max(peers, key=lambda label: peers[label])
                first, *second = (f"{rates[label] / peers[best]:.2f}" for label in own)
                together = f", {second[0]} with {self.num_scheduler_steps} steps together" if second else ""
                said.append(f"{what}: {first} times the output tokens/s of {best}{together}.")
        return " ".join([*said, super().conclusion(rows)]).strip()

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        turns = [m for row in rows for trial in row.trials for m in trial if m["metric"] == "repetition"]
        versions = dict.fromkeys(m["versions"] for m in turns if "versions" in m)
        said = [f"Peers: {'; '.join(versions)}."] * bool(versions)
        labels = {row.label for row in rows}
        if left_out := [label for label in PEERS if label not in labels]:
            said.append(f"Peers left out: {'; '.join(left_out)}.")
        return [*said, *super().notes(rows)]


def _export(source: Path, out: Path, dtype: str, load_format: Any, seed: int) -> None:
    """Writes a model's weights in dtype as a Hugging Face directory; "dummy": random ones."""
    from ksana_jax.loading import export_hf, load_model

    config, params = load_model(source, dtype=dtype, load_format=load_format, seed=seed)
    export_hf(out, config, params)

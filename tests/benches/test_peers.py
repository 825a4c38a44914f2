"""The benchmark of throughput with other engines: what is measured of engines and peers that are fakes."""

import dataclasses
import os
import sys

import pytest

from experiments.benches import throughput
from experiments.benches.peer_process import PeerProcess
from experiments.benches.peers import PEERS, PeerSpec
from experiments.benches.throughput import PeerThroughput
from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.lab.bench.core import Unavailable, run
from ksana_jax.lab.bench.throughput import BOUND, OURS, STEPS
from tests.benches.fakes import rows_of


def test_a_missing_environment_of_peers_gives_rows_that_say_so(engines, tmp_path):
    rows, made = rows_of(PeerThroughput(num_blocks=10, requests=(2,), peers=str(tmp_path / "none")))
    assert all(rows[label, 2].mean("run_s") is None for label in PEERS)
    absent = f"absent, there is no environment {tmp_path / 'none'}: `make peers`"
    [note] = [note for note in made.notes if absent in note]
    assert all(label in note for label in PEERS)
    assert rows[OURS, 2].mean("run_s") == 2.0


@dataclasses.dataclass
class FakePeer:
    spec: PeerSpec
    environment: object
    model: str
    dtype: str
    threads: int
    rows: int
    max_model_len: int
    pid: int = 0
    versions: str = "peer 1"

    def generate(self, prompts, lengths):
        if self.spec.script == "of_vllm":
            raise Unavailable("failed: no")
        return 4.0, [[1], [2]]

    def close(self):
        pass


def test_peers_serve_in_turn_and_their_tokens_are_compared(engines, monkeypatch, tmp_path):
    monkeypatch.setattr(throughput, "PeerProcess", FakePeer)
    monkeypatch.setattr(throughput, "_export", lambda *_: None)
    monkeypatch.setattr(throughput, "export_gguf", _refuse)
    rows, made = rows_of(PeerThroughput(num_blocks=10, requests=(2,), peers=str(tmp_path)), repeats=2)
    found = rows["transformers, static batch", 2]
    assert (found.mean("same_tokens"), found.mean("of_bound")) == (1.0, 0.125)
    assert made.conclusion == (
        "2 requests: 2.00 times the output tokens/s of transformers, static batch, 2.50 with 8 steps together."
    )
    assert "Peers: peer 1." in made.notes
    assert rows["vLLM", 2].mean("run_s") is None and "vLLM: failed: no." in made.notes
    assert "llama.cpp, benchmark's loop: absent: no such architecture." in made.notes


def test_a_model_that_is_not_there_is_the_error(tmp_path):
    with pytest.raises(LoadError, match="there is no model 'nowhere'"):
        run(PeerThroughput("nowhere", num_blocks=10, peers=str(tmp_path)))


def _refuse(source, out, kind):
    raise ConfigError("no such architecture")


def test_llama_cpp_alone_is_given_a_gguf_file(engines, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(
        throughput, "PeerProcess", lambda *a, **b: given.append((a[0].script, b["model"])) or FakePeer(*a, **b)
    )
    path = tmp_path / "model.gguf"
    path.touch()
    bench = PeerThroughput(str(path), quantization="stored", num_blocks=10, requests=(2,), peers=str(tmp_path))
    rows, made = rows_of(bench)
    assert given == [("of_llama_cpp", str(path))]
    assert {label for label in PEERS if rows[label, 2].mean("run_s") is not None} == {"llama.cpp, benchmark's loop"}
    assert any(f"vLLM: absent, it is given no GGUF files, such as {path}" in note for note in made.notes)


def test_all_peers_are_given_the_numbers_of_a_gguf_file_that_is_dequantised(engines, monkeypatch, tmp_path):
    given, exported, written = set(), [], []
    monkeypatch.setattr(
        throughput, "PeerProcess", lambda *a, **b: given.add((a[0].script, b["model"])) or FakePeer(*a, **b)
    )
    monkeypatch.setattr(throughput, "_export", lambda *asked: exported.append(asked))
    monkeypatch.setattr(throughput, "export_gguf", lambda *asked: written.append(asked))
    path = tmp_path / "model.gguf"
    path.touch()
    rows_of(PeerThroughput(str(path), dtype="bf16", num_blocks=10, requests=(2,), peers=str(tmp_path)))
    [(source, folder, *how)] = exported
    assert (source, how) == (path, ["bf16", "auto", 0])
    assert written == [(folder, folder / "model.gguf", "BF16")]
    files = {spec.script: folder / "model.gguf" if spec.of_gguf else folder for spec in PEERS.values()}
    assert given == {(script, str(path)) for script, path in files.items()}


def test_the_repetition_that_warms_up_asks_for_an_eighth_of_the_tokens_of_the_peers_that_are_named(
    engines, monkeypatch, tmp_path
):
    asked = []

    class Peer(FakePeer):
        def generate(self, prompts, lengths):
            asked.append((self.spec.name, lengths))
            return 4.0, [[1]]

    monkeypatch.setattr(throughput, "PeerProcess", Peer)
    monkeypatch.setattr(throughput, "_export", lambda *_: None)
    rows, made = rows_of(PeerThroughput(num_blocks=10, requests=(1,), peers=str(tmp_path), only=("transformers",)))
    assert asked == [("Static", [16]), ("Continuous", [16]), ("Static", [128]), ("Continuous", [128])]
    labels = [BOUND, OURS, STEPS, "transformers, static batch", "transformers, continuous"]
    assert [label for label, _ in rows] == labels
    assert "Peers left out: vLLM; llama.cpp, benchmark's loop." in made.notes
    with pytest.raises(ConfigError, match="only is 'vllm', must begin the name of a peer: transformers, static"):
        PeerThroughput(only=("vllm",)).cases()


PEER = """
class Toy:
    def __init__(self, model, rows):
        print("noise")
        if model == "bad":
            raise ValueError("no such model")
        self.rows = rows
    def versions(self):
        return f"toy {self.rows}"
    def prepare(self):
        self.prepared = True
    def generate(self, prompts, lengths):
        assert self.prepared
        print("more noise")
        if len(prompts) > self.rows:
            raise SystemExit("too many")
        return [p[-1:] * n for p, n in zip(prompts, lengths)]
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    (tmp_path / "toy_peer.py").write_text(PEER)
    (tmp_path / "bin").mkdir()
    os.symlink(sys.executable, tmp_path / "bin" / "python")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_peer_answers_over_pipes_and_its_failures_are_told(environment):
    spec = PeerSpec("toy_peer", "Toy", "json")
    peer = PeerProcess(spec, environment, model="m", rows=2)
    seconds, tokens = peer.generate([[1, 2], [3]], [2, 3])
    assert (peer.versions, tokens) == ("toy 2", [[2, 2], [3, 3, 3]]) and 0 <= seconds < 10
    with pytest.raises(Unavailable, match="failed, its process ended: too many"):
        peer.generate([[1]] * 3, [1] * 3)
    peer.close()
    with pytest.raises(Unavailable, match="failed: ValueError: no such model"):
        PeerProcess(spec, environment, model="bad", rows=2)
    with pytest.raises(Unavailable, match="has no no_such_package: `make peers` installs it"):
        PeerProcess(spec._replace(package="no_such_package"), environment, model="m", rows=2)

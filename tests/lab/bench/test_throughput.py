"""`ksana bench throughput`: what is measured of engines and peers that are fakes."""

import dataclasses
import os
import sys
import types
from typing import NamedTuple

import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec
from ksana_jax.lab.bench import bounds, command, core, peer_process, throughput
from ksana_jax.lab.bench.bounds import Rates, Work, work_of
from ksana_jax.lab.bench.core import Absent
from ksana_jax.lab.bench.peer_process import PeerProcess
from ksana_jax.lab.bench.peers import PEERS, PeerSpec
from ksana_jax.lab.bench.throughput import BOUND, EVICTING, OURS, STEPS, Throughput
from ksana_jax.lab.experiments.tasks.results import ResultRow
from ksana_jax.ops.linear import LinearImplementation
from ksana_jax.ops.packed import PackedMatrix

MODEL = ModelConfig(
    vocab_size=100, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, tie_embeddings=False
)


class FakeParams(NamedTuple):
    head: None = None


class FakeLLM:
    runner = types.SimpleNamespace(params=FakeParams())

    def __init__(self, num_blocks, steps):
        self.num_blocks, self.block_bytes, self.model_config, self.warm = num_blocks, 1000, MODEL, None
        self.steps = steps

    def warm_up(self, max_len):
        self.warm = max_len


@pytest.fixture
def engines(monkeypatch):
    """Engines that are asked for, whose runs take 2 s, or 1 s with evictions and 1.6 s with steps together, and bounds
    of 1/4 s a request."""
    made = []

    def make_llm(model, **settings):
        made.append(settings)
        return FakeLLM(settings.get("num_blocks") or 8, settings.get("num_scheduler_steps", 1))

    def run(llm, prompts, lengths):
        evicts = llm.num_blocks == 8
        found = {"num_blocks": llm.num_blocks, "running": 6.0 if evicts else 1.5, "steps": 40}
        return 1.0 if evicts else 1.6 if llm.steps > 1 else 2.0, [[1]] * len(prompts), found

    monkeypatch.setattr("ksana_jax.lab.bench.latency.make_llm", make_llm)
    monkeypatch.setattr(throughput, "run", run)
    monkeypatch.setattr(bounds, "measure_rates", lambda dtype: Rates(1.0, 1.0))
    monkeypatch.setattr(
        bounds, "work_of", lambda model, dtype, prompts, outputs, weights_bytes: Work(len(prompts) / 4, 0.25)
    )
    return made


def rows_of(bench, repeats=1):
    made = command.report_of(bench, core.run(bench, repeats)[0])
    return {(row.label, row.point["requests"]): row for row in made.rows}, made


def test_evictions_are_compared_in_a_pool_of_as_many_bytes(engines):
    setting = {"method": "h2o", "budget": 0.2}
    rows, made = rows_of(Throughput(num_blocks=10, kv_eviction=setting, requests=(2,)))
    assert [s.get("num_blocks") for s in engines] == [10, 10, None]
    assert engines[2]["memory_bytes"] == 10_000 and engines[2]["kv_eviction"] == setting
    assert rows[OURS, 2].mean("running") == 1.5 and rows[EVICTING, 2].mean("running") == 6.0
    assert "evicting gives 2.00 times the output tokens/s" in made.conclusion
    with pytest.raises(ConfigError, match="kv_eviction method is 'h20'"):
        Throughput(kv_eviction={"method": "h20"}).cases()


def test_steps_that_share_a_call_have_a_row_of_their_own(engines):
    rows, made = rows_of(Throughput(num_blocks=10, requests=(2,), num_scheduler_steps=4))
    assert [s.get("num_scheduler_steps") for s in engines] == [None, 4]
    assert (rows[OURS, 2].mean("run_s"), rows[STEPS, 2].mean("run_s")) == (2.0, 1.6)
    assert rows[STEPS, 2].mean("same_tokens") == 2
    assert "Steps together: num_scheduler_steps=4, decode steps in one call." in made.notes
    engines.clear()
    rows, _ = rows_of(Throughput(num_blocks=10, requests=(2,), num_scheduler_steps=1))
    assert len(engines) == 1 and (STEPS, 2) not in rows
    with pytest.raises(ConfigError, match="num_scheduler_steps is 0, must be"):
        Throughput(num_scheduler_steps=0).cases()


def test_every_engine_is_told_its_share_of_the_bound(engines):
    rows, _ = rows_of(Throughput(num_blocks=10, requests=(2, 1)), repeats=2)  # the second one backwards
    assert rows[OURS, 2].mean("of_bound") == 0.25 and rows[OURS, 1].mean("of_bound") == 0.125
    assert rows[BOUND, 2].mean("of_bound") is None
    assert rows[OURS, 1].mean("output_tokens_per_s") == 64.0  # 128 tokens of one request in 2 s


def test_a_model_with_experts_has_no_bound_that_counts_all_of_them(engines, monkeypatch):
    experts = dataclasses.replace(MODEL, mlp="swiglu_experts", experts=ExpertsSpec(4, 2))
    monkeypatch.setattr(
        FakeLLM,
        "__init__",
        lambda self, num_blocks, steps: vars(self).update(
            num_blocks=num_blocks, block_bytes=1000, model_config=experts, steps=steps
        ),
    )
    rows, made = rows_of(Throughput(num_blocks=10, requests=(2,), num_scheduler_steps=1))
    assert rows[OURS, 2].mean("run_s") == 2.0 and rows[OURS, 2].mean("of_bound") is None
    assert rows[BOUND, 2].mean("run_s") is None
    assert any("bound: absent, a step reads only the experts that its tokens choose" in note for note in made.notes)


def test_a_missing_environment_of_peers_gives_rows_that_say_so(engines, tmp_path):
    rows, made = rows_of(Throughput(num_blocks=10, requests=(2,), peers=str(tmp_path / "none")))
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
            raise Absent("failed: no")
        return 4.0, [[1], [2]]

    def close(self):
        pass


def test_peers_serve_in_turn_and_their_tokens_are_compared(engines, monkeypatch, tmp_path):
    monkeypatch.setattr(peer_process, "PeerProcess", FakePeer)
    monkeypatch.setattr(throughput, "_export", lambda *_: None)
    rows, made = rows_of(Throughput(num_blocks=10, requests=(2,), peers=str(tmp_path)), repeats=2)
    found = rows["transformers, static batch", 2]
    assert (found.mean("same_tokens"), found.mean("of_bound")) == (1.0, 0.125)
    assert made.conclusion == (
        "2 requests: 2.00 and 2.50 times the output tokens/s of transformers, static batch, the second with 8 steps "
        "together."
    )
    assert "Peers: peer 1." in made.notes
    assert rows["vLLM", 2].mean("run_s") is None and "vLLM: failed: no." in made.notes


def test_llama_cpp_alone_is_given_a_gguf_file(engines, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(
        peer_process, "PeerProcess", lambda *a, **b: given.append((a[0].script, b["model"])) or FakePeer(*a, **b)
    )
    path = tmp_path / "model.gguf"
    path.touch()
    bench = Throughput(str(path), quantization="stored", num_blocks=10, requests=(2,), peers=str(tmp_path))
    rows, made = rows_of(bench)
    assert given == [("of_llama_cpp", str(path))]
    assert {label for label in PEERS if rows[label, 2].mean("run_s") is not None} == {"llama.cpp, benchmark's loop"}
    assert any(f"vLLM: absent, it is given no GGUF files, such as {path}" in note for note in made.notes)


def test_all_peers_are_given_the_numbers_of_a_gguf_file_that_is_dequantised(engines, monkeypatch, tmp_path):
    given, exported = set(), []
    monkeypatch.setattr(
        peer_process, "PeerProcess", lambda *a, **b: given.add((a[0].script, b["model"])) or FakePeer(*a, **b)
    )
    monkeypatch.setattr(throughput, "_export", lambda *asked: exported.append(asked))
    path = tmp_path / "model.gguf"
    path.touch()
    rows_of(Throughput(str(path), dtype="bf16", num_blocks=10, requests=(2,), peers=str(tmp_path)))
    [(source, folder, *how)] = exported
    assert (source, how) == (path, ["bf16", "auto", 0])
    assert given == {(spec.script, str(folder)) for spec in PEERS.values()}


def test_numbers_of_tokens_may_be_given(engines, monkeypatch):
    asked = []

    def run(llm, prompts, lengths):
        asked.append(([len(p) for p in prompts], lengths))
        return 1.0, [[1]] * len(prompts), {"steps": 1, "num_blocks": 10, "running": None}

    monkeypatch.setattr(throughput, "run", run)
    rows_of(Throughput(requests=(1, 2), num_scheduler_steps=1, prompt_tokens=600, output_tokens=1))
    assert asked[-2:] == [([600], [1]), ([600, 600], [1, 1])]
    assert [settings["max_model_len"] for settings in engines] == [601]
    with pytest.raises(ConfigError, match="prompt_tokens is 0, must be"):
        Throughput(prompt_tokens=0).cases()


def test_the_repetition_that_warms_up_asks_for_an_eighth_of_the_tokens_of_the_peers_that_are_named(
    engines, monkeypatch, tmp_path
):
    asked = []

    class Peer(FakePeer):
        def generate(self, prompts, lengths):
            asked.append((self.spec.name, lengths))
            return 4.0, [[1]]

    monkeypatch.setattr(peer_process, "PeerProcess", Peer)
    monkeypatch.setattr(throughput, "_export", lambda *_: None)
    rows, made = rows_of(Throughput(num_blocks=10, requests=(1,), peers=str(tmp_path), only=("transformers",)))
    assert asked == [("Static", [16]), ("Continuous", [16]), ("Static", [128]), ("Continuous", [128])]
    labels = [BOUND, OURS, STEPS, "transformers, static batch", "transformers, continuous"]
    assert [label for label, _ in rows] == labels
    assert "Peers left out: vLLM; llama.cpp, benchmark's loop." in made.notes
    with pytest.raises(ConfigError, match="only is 'vllm', must begin the name of a peer: transformers, static"):
        Throughput(only=("vllm",)).cases()


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
    with pytest.raises(Absent, match="failed, its process ended: too many"):
        peer.generate([[1]] * 3, [1] * 3)
    peer.close()
    with pytest.raises(Absent, match="failed: ValueError: no such model"):
        PeerProcess(spec, environment, model="bad", rows=2)
    with pytest.raises(Absent, match="has no no_such_package: `make peers` installs it"):
        PeerProcess(spec._replace(package="no_such_package"), environment, model="m", rows=2)


def test_the_bound_counts_every_weight_key_and_product_once():
    # One request of three prompt tokens and two of output: the prompt, then one step that reads four keys.
    work = work_of(MODEL, "bf16", [3], [2])
    body, head = 2 * (2 * (2 * 64 + 2 * 32 + 3 * 128 + 2 * 8) + 8), 2 * 800
    weight_bytes = (body + head) // 2 * 2
    kv_token = 2 * 2 * 1 * 4 * 2
    assert work.num_bytes == 2 * weight_bytes + 4 * kv_token
    assert work_of(MODEL, "bf16", [3], [2], weights_bytes=7).num_bytes == 2 * 7 + 4 * kv_token
    assert work.flop == 4 * body + 2 * head + (1 + 2 + 3 + 4) * 4 * 2 * 2 * 4
    assert Work(6.0, 8.0).seconds(Rates(2.0, 4.0)) == 3.0


def test_the_notes_have_the_rates_of_the_bound():
    m = {"metric": "repetition", "turn": 0, "compilations": 0, "load": 0.0, "seconds": 1.0}
    row = ResultRow(BOUND, {"requests": 2}, 1, [[m | {"bytes_per_s": 2e9, "flop_per_s": 3e9}]], {})
    assert "at 2.0 GB/s" in Throughput().notes([row])[0] and "at 3 GFLOP/s" in Throughput().notes([row])[0]


def test_the_bound_multiplies_weights_as_each_implementation_takes_them(monkeypatch):
    given = []

    def note(x, w):
        given.append(type(w))
        return x

    fakes = [LinearImplementation(str(packs), note, lambda *_: None, packs=packs) for packs in (True, False)]
    monkeypatch.setattr("ksana_jax.ops.linear.LINEAR_IMPLEMENTATIONS", fakes)
    assert bounds._matrix_rate("f32") > 0
    assert given[0] is PackedMatrix and given[1] is not PackedMatrix

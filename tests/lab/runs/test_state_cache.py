"""What a chat finds by the policy of snapshots, against a definition by lengths alone; bytes that the study tells."""

import itertools
import re
from pathlib import Path

import pytest

from experiments.training.settings import HybridShape, LatentShape, ModelShape, TrainConfig
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.loading.config_json import load_config
from ksana_jax.runner.planner.formula import Memory
from ksana_jax.runner.planner.request import PlanRequest
from ksana_jax.runner.planner.step_memory import NO_STEP
from ksana_jax.serve.workload import read_workload
from tests.lab.runs.runs import reported

ROOT = Path(__file__).parents[3]
README = ROOT / "experiments/hybrid/README.md"
CHAT = {"kind": "sessions", "num_requests": 8, "turns": 10_000, "think_s": 1, "num_systems": 1, "system": 100}
CHAT |= {"user": [20, 200], "output": [1, 90]}
SIZE = 16
ENGINE = {"block_size": SIZE, "num_blocks": 400, "max_model_len": 4096, "max_num_seqs": 4}
ENGINE |= {"enable_prefix_caching": True}
GIVEN = {
    "task": "experiments.state_cache.task:StateCache",
    "model": str(ROOT / "configs/models/qwen3-next-80b"),
    "load_format": "dummy",
    "engine": ENGINE,
    "settings": {"workload": CHAT, "warm_up": 0},
}


def whole(num_tokens: int, size: int = SIZE) -> int:
    return num_tokens // size * size


# The tokens at whose end states of a turn of p prompt and o output tokens are; the last token is not computed.
ENDS = {
    "prompt_end": lambda p, o: whole(p - 1),
    "request_end": lambda p, o: whole(p + o - 1),
    "marconi": lambda p, o: whole(p + o - 1),
    "every": lambda p, o: max(whole(p - 1), whole(p + o - 1, 3 * SIZE)),
    "experiments.state_cache.published:Multiples": lambda p, o: whole(p + o - 1, 5 * SIZE),
}
BLOCKS = {"every": 3, "experiments.state_cache.published:Multiples": 5}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    variants = []
    for method in ENDS:
        more = {"blocks": BLOCKS[method]} if method in BLOCKS else {}
        variants.append({"name": method, "engine.state_snapshots": {"method": method, "num_slots": 300, **more}})
    found = reported(plan(GIVEN | {"variants": variants}), tmp_path_factory.mktemp("out"))
    return {row.label: row for row in found.rows}


@pytest.mark.parametrize("method", ENDS)
def test_a_turn_of_a_chat_finds_the_last_state_of_the_one_before(measured, method):
    items = read_workload(CHAT, seed=0).make(151_936).items
    lengths, row = [(item.num_prompt, item.num_output) for item in items], measured[method]
    found = [min(ENDS[method](*before), whole(prompt - 1)) for before, (prompt, _) in itertools.pairwise(lengths)]
    prompts = sum(prompt for prompt, _ in lengths)
    assert row.mean("computed_tokens") == prompts - sum(found) < prompts
    keys = [whole(sum(before) - 1) for before in lengths[:-1]]
    assert row.mean("found_keys") == pytest.approx(sum(keys) / prompts)
    assert row.mean("found") <= row.mean("found_keys")


def test_other_models_and_engines_are_refused():
    for given, message in (
        ({"model": "llama-2-7b"}, "model llama-2-7b has no recurrent layers"),
        ({"engine": ENGINE | {"enable_prefix_caching": False}}, "engine.enable_prefix_caching is false"),
        ({"settings": GIVEN["settings"] | {"servers": 2}}, "settings.servers 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            plan(GIVEN | given)


def test_bytes_of_contexts_are_the_planners():
    latent = {"rope_theta": 1000.0, "latent": LatentShape(80, 48, 16, 64)}
    shapes = {"attention, 2 KV heads": {}, "latents, 80 + 48": latent, "hybrid": {"hybrid": HybridShape()}}
    models = {n: (TrainConfig(model=ModelShape(**s)).model_config(), "f32") for n, s in shapes.items()}
    real = {"Qwen3-8B": "qwen3-8b", "Qwen3-Next-80B, hybrid": "qwen3-next-80b"}
    models |= {name: (load_config(ROOT / "configs/models" / folder), "bf16") for name, folder in real.items()}
    rows = re.findall(r"^\| (.+?) \| ([\d.,]+) \| ([\d.,]+) \| ([\d.,]+) \|$", README.read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == list(models)
    for name, *cells in rows:
        model, dtype = models[name]
        memory = Memory.of(model, PlanRequest(dtype=dtype), 2**45, NO_STEP)
        sizes = [(memory.state + memory.beta * memory.tokens_held(1, n)) / 2**20 for n in (1024, 4096, 32768)]
        assert [float(cell.replace(",", "")) for cell in cells] == [round(size, 1) for size in sizes]

"""docs/extend.md by copy and paste: every block in an engine, a router or an experiment."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.lab.experiments.config import plan
from ksana_jax.lab.experiments.report import report
from ksana_jax.lab.experiments.run import run
from ksana_jax.serve.routing.policies import read_policy

PAGE = Path(__file__).parents[2] / "docs/extend.md"
TEXT = "def main(x):\n    return x\n\n" * 3


@pytest.fixture
def mine(tmp_path, monkeypatch):
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "mine.py").write_text("\n\n".join(code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


def generate(**settings):
    sizes = {"max_model_len": 128, "num_blocks": 64, "block_size": 4, "query_tile": 4, "max_num_seqs": 2}
    llm = LLM("ksana-tiny", **{**sizes, "max_num_batched_tokens": 16, **settings})
    outputs = llm.generate([TEXT, TEXT[5:]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    stats = llm.engine.memory.counters
    llm.close()
    return [list(output.outputs[0].token_ids) for output in outputs], stats


@pytest.fixture(scope="module")
def plain():
    return generate()[0]


@pytest.mark.parametrize("name", ["KeyDiff", "Steep"])
def test_eviction_methods_serve(mine, name):
    tokens, _ = generate(kv_eviction={"method": f"mine:{name}", "budget": 32})
    assert [len(ids) for ids in tokens] == [12, 12]


@pytest.mark.parametrize("dtype", ["mine:Nibbles", {"k": "mine:Channels", "v": "kivi4", "residual": 8}], ids=str)
def test_codecs_serve(mine, dtype):
    tokens, _ = generate(kv_cache_dtype=dtype)
    assert [len(ids) for ids in tokens] == [12, 12]


def test_policies_serve_with_the_same_tokens(mine, plain):
    tokens, stats = generate(
        policy="mine:longest_first", prefix_replacement="mine:most_recent", enable_prefix_caching=True
    )
    assert tokens == plain and stats.queried_tokens


def test_drafts_change_no_token(mine, plain):
    assert generate(speculative_config={"method": "mine:Echo", "num_speculative_tokens": 2})[0] == plain


def test_a_routing_policy_chooses(mine):
    class View:
        ready = np.array([2, 5])

    assert read_policy({"name": "mine:First"}).choose(None, View) == 2  # pyright: ignore[reportArgumentType]


def test_a_task_is_an_experiment_with_all_of_them(mine):
    engine = {"block_size": 4, "num_blocks": 64, "query_tile": 4, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    made = plan(
        {
            "task": "mine:Copying",
            "model": "ksana-tiny",
            "engine": engine,
            "variants": [
                {"name": "full"},
                {
                    "name": "all",
                    "engine.kv_eviction": {"method": "mine:KeyDiff", "budget": 32},
                    "engine.kv_cache_dtype": "mine:Nibbles",
                },
            ],
        }
    )
    assert run(made, mine / "out").num_done == 2
    assert [row.label for row in report(mine / "out").rows] == ["full", "all"]

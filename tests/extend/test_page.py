"""docs/extend/ by copy and paste: every block in an engine, an experiment or a benchmark."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run
from ksana_jax.loading import export_hf, load_model
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.mlp import MLPS
from tests.golden.cases import golden_case

PAGES = Path(__file__).parents[2] / "docs/extend"
MINE = ("eviction", "selection", "codec", "scheduling", "replacement", "proposer", "routing", "task", "bench")
MINE += ("state-snapshots",)
TEXT = "def main(x):\n    return x\n\n" * 3


def code(name):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("\n\n".join(map(code, MINE)))
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


def test_snapshots_of_states_of_one_s_own_decide_the_hits(mine):
    sizes = {"max_model_len": 64, "num_blocks": 64, "block_size": 4, "query_tile": 4, "max_num_seqs": 2}
    sizes |= {"enable_prefix_caching": True, "state_snapshots": {"method": "mine:Doubling"}}
    llm = LLM(str(golden_case("lfm2-gqa-conv-tied").model_dir), **sizes, max_num_batched_tokens=16)
    for cached in (0, 4 * 8):
        [output] = llm.generate([list(range(2, 42))], SamplingParams(max_tokens=1, detokenize=False))
        assert output.num_cached_tokens == cached


@pytest.mark.parametrize(
    "setting",
    [
        {"method": "mine:KeyDiff"},
        {"method": "mine:Merging"},
        {"method": "mine:SmallKeys"},
        {"method": "mine:Steep", "of": {"method": "mine:Merging"}},
        {"method": "mine:Highest", "of": {"method": "mine:KeyDiff"}, "prompts": "once"},
    ],
)
def test_eviction_methods_serve(mine, setting):
    tokens, _ = generate(kv_eviction=setting | {"budget": 32})
    assert [len(ids) for ids in tokens] == [12, 12]


def test_a_selection_method_serves(mine, plain):
    tokens, _ = generate(kv_selection={"method": "mine:MeanKey", "budget": 32})
    assert [len(ids) for ids in tokens] == [12, 12]
    assert generate(kv_selection={"method": "mine:MeanKey", "budget": 512})[0] == plain


CODECS = ["mine:Nibbles", {"k": "mine:Channels", "v": "kivi4", "residual": 8}]
CODECS += [pytest.param({"k": "mine:Nibbles", "v": "int4"}, marks=pytest.mark.soak)]


@pytest.mark.parametrize("dtype", CODECS, ids=str)
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


def test_a_benchmark_runs(mine, capsys):
    import mine as module  # pyright: ignore[reportMissingImports]

    module.main(mine / "out")
    assert "Time to encode a text" in capsys.readouterr().out
    assert "encode, µs" in (mine / "out/table.md").read_text()


def test_patterns_serve():
    exec(compile(code("pattern"), "pattern.md", "exec"), {})


def test_a_family_is_loaded_by_its_model_type(tmp_path, monkeypatch):
    for registry in (FAMILIES, MLPS):
        monkeypatch.setitem(registry, "pair", None)  # restores the registry in the end
    exec(compile(code("model-family"), "model-family.md", "exec"), {})
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    kind = {"model_type": "pair", "architectures": ["PairForCausalLM"], "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**kind, **sizes, **heads}))
    config, params = load_model(tmp_path, load_format="dummy")
    export_hf(tmp_path, config, params)
    _, loaded = load_model(tmp_path)
    gate = loaded.layers[0].w_gate
    assert gate is not None and gate.shape == (2, 24, 32)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), loaded, params)))


def test_every_page_is_tested_or_has_its_own_test():
    elsewhere = {"README", "new-accelerator"}  # links alone; tests/devices
    assert {page.stem for page in PAGES.glob("*.md")} == {*MINE, "pattern", "model-family", *elsewhere}

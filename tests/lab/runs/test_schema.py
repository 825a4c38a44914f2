"""The JSON Schema of experiment files: shipped files pass, and it refuses the keys that `ksana run` refuses."""

from pathlib import Path

import jsonschema_rs
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.shipped import experiments
from ksana_jax.lab.runs import dotted, schema
from ksana_jax.lab.runs.config import plan

ROOT = Path(__file__).parents[3]
FILE = ROOT / "configs" / "experiment.schema.json"
SHIPPED = [*experiments().values(), *(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples/keydiff").glob("*.yaml")]


@pytest.fixture(scope="module")
def validator():
    made = schema.schema()
    jsonschema_rs.meta.validate(made)
    return jsonschema_rs.validator_for(made)


def test_the_file_in_configs_is_what_the_command_prints(run_ksana):
    code, printed, _ = run_ksana("schema")
    assert code == 0
    assert FILE.read_text(encoding="utf-8") == printed, "write it again: ksana schema > configs/experiment.schema.json"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_names_the_schema_and_passes(path, validator):
    text = path.read_text(encoding="utf-8")
    key, _, place = text.splitlines()[0].partition("=")
    assert key == "# yaml-language-server: $schema" and (path.parent / place).resolve() == FILE
    assert [str(error) for error in validator.iter_errors(dotted.from_yaml(text))] == []


WRONG = [
    "titel: x",
    "task: perplexty",
    "task: perplexity\nsettings: {num_text: 1}",
    "settings: {num_text: 1}",
    "task: recall\nsettings: {bos: true}",
    "engine: {blok_size: 8}",
    "engine: {operators: {atention: xla}}",
    "task: generate\nengine: {kv_eviction: {method: h3o, budget: 8}}",
    "task: generate\nengine: {kv_eviction: {method: h2o, kernel: 7, budget: 8}}",
    "task: generate\nengine: {kv_eviction: {method: adakv, of: {method: snapkv, kernal: 7}, memory: simulated}}",
    "engine: {kv_selection: {method: quest, budgt: 64}}",
    "engine: {kv_cache_dtype: int5}",
    "engine: {kv_cache_dtype: {k: kivi4, v: kivi4, grup: 32}}",
    "engine: {policy: fcsf}",
    "engine: {preempt: swop}",
    "engine: {block_size: large}",
    "settings: {num_texts: 0}",
    "pattern: streamin_llm",
    "pattern: {windw: 8}",
    "pattern: {preset: streaming_llm, full_heads: {shares: 0.5}}",
    "pattern: {0-1: {windw: 8}}",
    "layer_patterns: [{windw: 8}, full, full, full]",
    "variants: [{engine.block_size: 8}]",
    "variants: [{name: a, engine.blok_size: 8}]",
    "variants: [{name: a, engine.kv_eviction.budgt: 8}]",
    "variants: [{name: a, settings.num_text: 1}]",
    "variants: [{name: a, title: b}]",
    "variants: [{name: a, engine: {operators.atention: xla}}]",
    "variants: [{name: a, pattern: {windw: 8, preset: full}}]",
    "variants: [{name: a, settings: {num_text.x: 1}}]",
    "variants: [{name: a, patern.window: 8}]",
    "grid: {engine.blok_size: [8]}",
    "grid: {engine.block_size: 8}",
    "grid: {engine.block_size: [large]}",
    "grid: {settings.num_text: [1]}",
    "grid: {seeds: [[1]]}",
]


@pytest.mark.parametrize("text", WRONG)
def test_what_the_schema_refuses_is_no_experiment(text, validator):
    given = dotted.from_yaml(text)
    assert not validator.is_valid(given)
    with pytest.raises(ConfigError):
        plan(given)


RIGHT = [
    "title: x",
    "settings: {num_texts: 1, num_tokens: '${context:2}', bos: null}",
    "task: recall\nsettings: {kind: needle}",
    "engine: {policy: shortest_first, num_blocks: null, operators: {attention: xla}}",
    "task: generate\nengine: {kv_eviction: {method: snapkv, kernel: 7, budget: 0.5}}",
    "task: generate\nengine: {kv_eviction: {method: adakv, of: {method: snapkv, kernel: 7}, memory: simulated}}",
    "engine: {kv_cache_dtype: {k: kivi4, v: int4, group: 16}}",
    "engine: {kv_cache_dtype: float16}",
    "pattern: {preset: streaming_llm, window: 8}",
    "pattern: null",
    "pattern: {0-1: streaming_llm, '3': {window: 8}}",
    "layer_patterns: [full, {window: 8}, full, full]",
    "task: generate\nengine: {kv_eviction: {method: h2o}}\nvariants: [{name: a, engine.kv_eviction.budget: 8}]",
    "variants: [{name: a, engine: {block_size: 8}, pattern.window: 8}, {name: b, pattern: {window: 16}}]",
    "task: generate\nvariants: [{name: a, engine: {operators.attention: xla, kv_eviction.method: h2o}}]",
    "variants: [{name: a, pattern: {window: 8, full_heads.statistics: null}}]",
    "grid: {engine: [{operators.attention: xla}, {block_size: 8}]}",
    "grid: {pattern: [streaming_llm, {window: 8}], engine.dtype: [f32, bf16]}",
    "grid: {engine: {block_size: [8, 16]}}",
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_the_schema_accepts_is_an_experiment(text, validator):
    given = dotted.from_yaml(text)
    assert [str(error) for error in validator.iter_errors(given)] == []
    assert plan(given).trials


def test_own_tasks_and_methods_have_any_settings(validator):
    own = "task: mine:Task\nsettings: {x: 1}\nengine: {kv_eviction: {method: 'mine:Method', y: 2}, policy: mine:order}"
    assert validator.is_valid(dotted.from_yaml(f"{own}\nvariants: [{{name: a, settings.x: 2}}]"))

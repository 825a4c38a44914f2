"""A YAML file becomes typed trials: what is refused, what makes an id."""

import json
import re
import types
from pathlib import Path

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.core.patterns import FULL
from ksana_jax.core.sources import model_path
from ksana_jax.core.statistics import Statistics
from ksana_jax.lab.runs.config import load, plan
from ksana_jax.lab.runs.patterns import layer_groups, patterns_of
from ksana_jax.lab.runs.trials import EnginePool
from ksana_jax.loading.digest import digest_of_files

pytestmark = pytest.mark.usefixtures("fake")


def small(model, **fields):
    return {"task": "fake", "model": model, **fields}


def test_variants_grid_and_seeds_multiply_in_the_order_written(model):
    made = plan(
        small(
            model,
            variants=[{"name": "a"}, {"name": "b", "engine.block_size": 8}],
            grid={"settings.x": [1, 2], "pattern": {"window": [4, 8]}},
            seeds=[0, 1],
        )
    )
    assert [(r.label, *r.point.values()) for r in made.rows] == [
        (name, x, window) for name in "ab" for x in (1, 2) for window in (4, 8)
    ]
    assert len(made.trials) == 16
    last = made.rows[-1].trials[1]
    assert (last.config["engine"]["block_size"], last.config["settings"]["x"], last.seed) == (8, 2, 1)
    assert last.config["pattern"]["window"] == 8
    assert last.label == "b, x=2, window=8"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engin": {}}, "unknown key 'engin'; the nearest is 'engine'"),
        ({"engine": {"block_sise": 8}}, "unknown key 'engine.block_sise'; the nearest is 'block_size'"),
        ({"pattern": {"windw": 8}}, "pattern has no field 'windw'; the nearest is 'window'"),
        ({"settings": {"xx": 8}}, "unknown key 'settings.xx' of task 'fake'; the nearest is 'x'"),
        ({"engine": {"policy": "fcsf"}}, "longest_prefix, or 'package.module:name'; the nearest is 'fcfs'"),
        ({"task": "perplexitty"}, "unknown task 'perplexitty'; the nearest is 'perplexity'"),
        ({"variants": [{"name": "a", "patern.window": 1}]}, "unknown key 'patern' in variant 'a'; the nearest is 'pat"),
        ({"grid": {"pattern.windows": [1]}}, "pattern has no field 'windows'; the nearest is 'window'"),
        ({"engine": {"block_size": "many"}}, "engine.block_size: "),
        ({"engine": {"block_size": 0}}, "block_size is 0, must be an integer from 1"),
        ({"engine": {"dtype": "f64"}}, "dtype is 'f64', must be one of f32, bf16, f16, auto"),
        ({"pattern": {"num_sinks": -1}}, "AttentionPattern.num_sinks is -1"),
        ({"grid": {"settings.x": 3}}, "grid.settings.x is 3, must be a list of values"),
        ({"variants": [{"pattern.window": 1}]}, "each of variants needs a name"),
        ({"variants": [{"name": "a"}, {"name": "a"}]}, "variants have the same name: a"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": 3}, "seeds is 3, must be a list, such as [3]"),
        ({"variants": "a"}, "variants is 'a', must be a list, such as [a]"),
        ({"variants": [{"name": 8}]}, "each of variants needs a name that is text"),
        ({"seeds": [0, -1]}, "seeds has -1, must be integers from 0"),
        ({"seeds": [3, 3]}, "seeds is [3, 3], must be distinct"),
        ({"settings": None}, "settings is null, must be a mapping"),
        ({"seeds": {"0": 1}}, "seeds is a list whose items cannot be set separately"),
        ({"grid": [1]}, "grid is [1], must be a mapping"),
        ({"engine": {"policy": "zzz"}}, "policy is 'zzz', must be one of fcfs"),
        ({"engine": {"prefix_replacement": "zzz"}}, "prefix_replacement is 'zzz', must be one of lru"),
        ({"engine": {"operators": "xla"}}, "engine.operators is 'xla', must be a mapping of keys to values"),
        ({"engine": {"operators": {"attention": "zzz"}}}, "operators.attention is 'zzz', must be one of auto"),
        ({"engine": {"disk_cache_dir": ""}}, "disk_cache_dir is '', must be the path of a folder or None"),
        ({"model": "ksana-tiny", "layer_patterns": [{}]}, "layer_patterns has 1 patterns, ksana-tiny has 4 layers"),
        (
            {"grid": {"settings.x": list(range(2000)), "engine.num_blocks": list(range(2000))}},
            "4,000,000 trials (1 variants x 2,000 of settings.x x 2,000 of engine.num_blocks x 1 seeds); supported: at",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model, fields, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        plan({**small(model), **fields})
    assert "\n" not in str(raised.value)


def test_a_missing_model_is_named():
    with pytest.raises(LoadError, match="there is no model 'nowhere'"):
        plan(small("nowhere"))


def test_an_override_wins_over_the_file(model):
    made = plan(small(model, settings={"x": 1}), ["settings.x=5", "seeds=[3]", "engine.num_blocks=null"])
    (trial,) = made.trials
    assert (trial.config["settings"]["x"], trial.seed) == (5, 3)


@pytest.mark.parametrize("name", ["/abs", "../up", "..", ".", ".hidden", "a/b", "a\\b", "two\nlines", "a\0", "x" * 201])
def test_a_name_is_one_path_component(model, name):
    with pytest.raises(ConfigError, match=r"name (is|has) .*") as raised:
        plan(small(model, name=name))
    assert "\n" not in str(raised.value)
    assert plan(small(model, name="fine, one-part_4.2")).name == "fine, one-part_4.2"


@pytest.mark.parametrize("override", ["seeds[0]=1", "seeds.0=1", "variants[0].name=x"])
def test_an_item_of_a_list_cannot_be_overridden(model, override):
    given = small(model, seeds=[0, 1], variants=[{"name": "a"}])
    with pytest.raises(ConfigError, match="is a list whose items cannot be set separately: set the whole list"):
        plan(given, [override])


def test_settings_are_refused_by_their_own_name():
    with pytest.raises(ConfigError, match=r"settings\.num_tokens is -5, must be an integer from 2"):
        plan({"task": "perplexity"}, ["settings.num_tokens=-5"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("settings: " + "{a: " * 1500 + "1" + "}" * 1500, "nested too deeply"),
        ("variants: " + "[" * 1500 + "]" * 1500, "nested too deeply"),
        ("null: 1", "Incompatible key type 'NoneType': a key is text, in quotes"),
        ("engine: {null: 1}", "engine: Incompatible key type"),
    ],
)
def test_what_yaml_reads_and_nobody_can_use_is_one_line_with_the_file(tmp_path, content, said):
    path = tmp_path / "odd.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"odd\.yaml: .*{said}") as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_an_override_nested_without_end_is_one_line(model):
    with pytest.raises(ConfigError, match="nested too deeply"):
        plan(small(model), ["a." * 2000 + "b=1"])


@pytest.mark.parametrize("override", ["settings.x", "=3", ""])
def test_an_override_without_key_and_value_is_refused(model, override):
    with pytest.raises(ConfigError, match="is not an override"):
        plan(small(model), [override])


def test_overriding_what_a_variant_or_the_grid_sets_is_refused(model):
    with pytest.raises(ConfigError, match=r"settings\.x is set by the grid.*; give grid\.settings\.x=\[\.\.\.\]"):
        plan(small(model, grid={"settings.x": [1, 2]}), ["settings.x=5"])
    assert [row.point for row in plan(small(model, grid={"settings.x": [1, 2]}), ["grid.settings.x=[5]"]).rows] == [
        {"settings.x": 5}
    ]
    with pytest.raises(ConfigError, match=r"settings\.x is set by b"):
        plan(small(model, variants=[{"name": "a"}, {"name": "b", "settings": {"x": 2}}]), ["settings.x=5"])


@pytest.mark.parametrize(
    ("variant", "grid", "said"),
    [
        ({"settings.x": 1}, {"settings.x": [1, 2]}, "settings.x is set by variant 'b' and by the grid"),
        ({"settings": {"x": 1}}, {"settings.x": [1]}, "settings.x is set by variant 'b' and by the grid"),
        ({"pattern": "full"}, {"pattern": ["streaming_llm"]}, "pattern.preset is set by variant 'b' and pattern by"),
        ({"pattern.window": 8}, {"pattern": [{"window": 4}]}, "pattern.window is set by variant 'b' and pattern by"),
        (
            {"engine.kv_eviction": None},
            {"engine.kv_eviction.budget": [0.5]},
            "engine.kv_eviction is set by variant 'b' and engine.kv_eviction.budget by the grid",
        ),
        (
            {"engine.kv_cache_dtype": {"k": "kivi2", "v": "kivi2"}},
            {"engine.kv_cache_dtype": ["int8"]},
            "engine.kv_cache_dtype.k is set by variant 'b' and engine.kv_cache_dtype by the grid",
        ),
    ],
)
def test_a_key_that_a_variant_and_the_grid_set_is_refused_with_both(model, variant, grid, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        plan(small(model, variants=[{"name": "a"}, {"name": "b", **variant}], grid=grid))
    assert "\n" not in str(raised.value)


def test_a_grid_sets_other_fields_of_what_a_variant_sets(model):
    variants = [{"name": "sinks", "pattern": "streaming_llm"}, {"name": "plain", "pattern.num_sinks": 0}]
    made = plan(small(model, variants=variants, grid={"pattern.window": [8, 16]}))
    assert [(r.label, r.point["pattern.window"]) for r in made.rows] == [
        (name, window) for name in ("sinks", "plain") for window in (8, 16)
    ]


@pytest.mark.parametrize(
    ("grid", "points"),
    [
        ({"settings.y": [1, 1.0, 0.25]}, [1.0, 0.25]),
        ({"settings.x": [2, 3, 2]}, [2, 3]),
        ({"engine.dtype": ["f32", "bf16", "float32", "bfloat16"]}, ["f32", "bf16"]),
        ({"pattern": ["full", {"window": None}, "streaming_llm"]}, ["full", "streaming_llm"]),
    ],
)
def test_equal_values_of_the_grid_are_one_row(model, grid, points):
    made = plan(small(model, grid=grid, seeds=[0, 1]))
    assert [list(row.point.values()) for row in made.rows] == [[point] for point in points]
    assert len(made.trials) == 2 * len(points)


def test_equal_variants_are_one_row_with_all_their_names(model):
    variants = [{"name": "a", "pattern.window": 8}, {"name": "b"}, {"name": "c", "pattern": {"window": 8}}]
    assert [row.label for row in plan(small(model, variants=variants)).rows] == ["a = c", "b"]


def test_the_id_of_a_trial_is_the_same_whatever_it_is_called_and_however_it_is_written(model):
    (plain,) = plan(small(model, pattern={"window": 8})).trials
    (renamed,) = plan(small(model, name="other", title="t", variants=[{"name": "w", "pattern.window": 8}])).trials
    gridded = plan(small(model, grid={"pattern.window": [4, 8]})).trials
    relative = plan(small(model, pattern={"window": "${context:1/2}"})).trials
    assert plain.id == renamed.id == gridded[1].id == relative[0].id != gridded[0].id


def test_the_id_changes_with_a_setting_a_seed_and_the_weights(model):
    def trial_id(*overrides):
        return plan(small(model), overrides).trials[0].id

    ids = {trial_id(), trial_id("settings.y=0.25"), trial_id("seeds=[1]"), trial_id("engine.block_size=8")}
    assert len(ids) == 4
    assert trial_id("settings.y=0.5") == trial_id()
    Path(model, "model.safetensors").write_bytes(b"weights")
    assert trial_id() not in ids


def test_numbers_can_be_given_in_multiples_of_the_training_context(model):
    (trial,) = plan(small(model, pattern={"window": "${context:1/4}"}, settings={"x": "${context:3}"})).trials
    assert (trial.config["pattern"]["window"], trial.config["settings"]["x"]) == (4, 48)
    with pytest.raises(ConfigError, match=r"\$\{context:1/3\} is 5.33333 tokens of"):
        plan(small(model, pattern={"window": "${context:1/3}"}))
    with pytest.raises(ConfigError, match=r"\$\{context:half\} is not a multiple"):
        plan(small(model, pattern={"window": "${context:half}"}))
    (trial,) = plan(small(model), ["settings.x=${context:3}"]).trials
    assert trial.config["settings"]["x"] == 48
    with pytest.raises(LoadError, match=r"^there is no model 'ksana-tny' \(nearest: ksana-tiny\)"):
        plan(small("ksana-tny", pattern={"window": "${context:1/2}"}))


def test_trials_share_an_engine_when_only_pattern_settings_or_seed_differ(model):
    variants = [
        {"name": "a", "pattern.window": 8},
        {"name": "b", "pattern": {"window": 4, "num_sinks": 3, "sink_position": "cache"}},
        {"name": "c", "engine.block_size": 8},
        {"name": "d", "settings.x": 9},
    ]
    made = plan(small(model, seeds=[0, 1], variants=variants))
    keys = [row.trials[0].engine_key for row in made.rows]
    assert keys[0] == keys[1] == keys[3] != keys[2]
    assert [made.max_repositioned_sinks(row.trials[0]) for row in made.rows] == [3, 3, 0, 3]


def test_a_budget_needs_an_engine_of_its_own_where_it_sizes_the_pool(model):
    asked = [("streamed", 8), ("streamed", 12), ("streamed", 0.5), ("streamed", 0.2), ("whole", 8), ("whole", 12)]
    variants = [
        {"name": str(at), "engine.kv_eviction": {"method": "h2o", "prompts": prompts, "budget": budget}}
        for at, (prompts, budget) in enumerate(asked)
    ]
    made = plan(small(model, variants=variants))
    first, second, *others = (row.trials[0].engine_key for row in made.rows)
    assert first != second and len({second, *others}) == 2


def test_layers_can_have_patterns_of_their_own(model):
    path = Path(model, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    (trial,) = plan(small(model, layer_patterns=[{"window": 4}, {}])).trials
    from ksana_jax.lab.runs.config import patterns_of

    assert [str(p) for p in patterns_of(trial.config)] == ["window=4", "full"]


def test_layers_in_several_groups_need_an_engine_of_their_own(model):
    path = Path(model, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    layers = ([{"window": 4}, {"window": 8}], [{}, {"window": 4}], [{"window": 4}, {"window": 4}])
    variants = [{"name": str(i), "layer_patterns": given} for i, given in enumerate(layers)]
    made = plan(small(model, variants=[*variants, {"name": "one", "pattern.window": 4}]))
    two, also_two, one, uniform = (row.trials[0] for row in made.rows)
    assert two.engine_key == also_two.engine_key != one.engine_key == uniform.engine_key
    assert layer_groups(two.config) == [[0], [1]] and layer_groups(one.config) == []


def test_heads_are_chosen_by_a_file_of_the_model_and_need_an_engine_of_their_own(tmp_path):
    scores = np.array([[0.1, 0.9], [0.2, 0.8], [0.9, 0.1], [0.3, 0.2]])
    digest = digest_of_files(model_path("ksana-tiny"))
    for name, of, sha in (("heads", digest, "a" * 20), ("same", digest, "a" * 20), ("other", "another", "b" * 20)):
        Statistics("duoattention", of, "a text", sha, 0, {}, {"scores": scores}).write(tmp_path / f"{name}.npz")
    near = {"preset": "duo_attention", "window": 8, "num_sinks": 2}
    names = {"file": {"statistics": "heads.npz"}, "same": {"statistics": "same.npz"}, "list": [[1], [1], [0], [0]]}
    names |= {"draw": {"seed": 1}, "all": {"share": 1}}
    variants = [{"name": name, "pattern": near | {"full_heads": heads}} for name, heads in names.items()]
    made = plan(small("ksana-tiny", variants=[*variants, {"name": "window", "pattern": near}]), folder=tmp_path)
    assert [row.label for row in made.rows] == ["file = same", "list", "draw", "all", "window"]
    chosen, listed, drawn, whole, window = (row.trials[0] for row in made.rows)
    assert chosen.config["inputs"]["duoattention_text"] == "a" * 16
    assert [p.window for p in patterns_of(chosen.config)] == [8, None, 8, None, None, 8, None, 8]
    assert chosen.engine_key == listed.engine_key != drawn.engine_key != whole.engine_key == window.engine_key
    assert layer_groups(chosen.config) == [[0, 2, 5, 7], [1, 3, 4, 6]]
    with pytest.raises(ConfigError, match="are of a model with the digest another"):
        plan(small("ksana-tiny", pattern=near | {"full_heads": {"statistics": "other.npz"}}), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"pattern\.full_heads does not go with layer_patterns"):
        plan(small("ksana-tiny", pattern=near | {"full_heads": names["list"]}, layer_patterns=[{}] * 4))


def test_one_pattern_in_place_of_a_models_own_groups_needs_an_engine_of_its_own():
    model = str(Path(__file__).parents[2] / "golden" / "gemma3-gqa-window-tied")
    variants = [{"name": "own"}, {"name": "full", "pattern": {}}, {"name": "window", "pattern": {"window": 4}}]
    own, full, window = (row.trials[0] for row in plan(small(model, variants=variants)).rows)
    assert own.engine_key != full.engine_key == window.engine_key
    assert layer_groups(own.config) == [] and len(layer_groups(full.config)) == 1
    made = []

    def make(name, **settings):
        made.append(settings.get("pattern"))
        return types.SimpleNamespace(set_pattern=lambda pattern: None, clear_records=lambda: None)

    pool = EnginePool(lambda trial: 0, make)
    for trial in (own, window, full):
        pool.get(trial)
    assert made == [None, FULL], "a pool for full attention has room for a window"


def test_a_file_that_is_no_experiment_is_refused_with_its_name(tmp_path, model):
    for content in ("- 1\n", "a: [\n", "just text\n", "\x00", "", "# a comment\n", "{}"):
        path = tmp_path / "bad.yaml"
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"bad\.yaml") as raised:
            load(path)
        assert "\n" not in str(raised.value)
    with pytest.raises(FileNotFoundError, match="no such experiment file"):
        load(tmp_path / "missing.yaml")


def test_an_empty_file_says_so(tmp_path):
    (path := tmp_path / "empty.yaml").write_text("# settings.x: 3\n")
    with pytest.raises(ConfigError, match=r"empty\.yaml: the file is empty: it needs a task at least"):
        load(path)


@pytest.mark.parametrize("name", ["off", "Yes", "010", "0x10", "1e3", "1_000", "2024", "3.0"])
def test_a_name_is_the_text_that_was_written(tmp_path, model, name):
    given = json.dumps(small(model))[:-1]
    (path := tmp_path / "e.yaml").write_text(f"{given}, name: {name}, title: {name}, variants: [{{name: {name}}}]}}")
    made = load(path)
    assert (made.name, made.title, made.rows[0].label) == (name, name, name)
    made = load(path, [f"name={name}x", f"title={name}"])
    assert (made.name, made.title) == (f"{name}x", name)
    assert load(path, ["name=plain"]).name == "plain"


def test_input_files_may_be_in_the_home_folder(tmp_path, model, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text " * 30_000)
    (path := tmp_path / "e.yaml").write_text("task: perplexity\nmodel: ksana-tiny\nsettings: {texts: [~/a.txt]}\n")
    for made in (load(path), load(path, ["settings.texts=[~/a.txt]"])):
        assert made.trials[0].config["settings"]["texts"] == [str(tmp_path / "a.txt")]


def test_the_name_of_a_file_names_the_run(tmp_path, model):
    path = tmp_path / "windows.yaml"
    path.write_text(json.dumps(small(model)))
    assert load(path).name == "windows"

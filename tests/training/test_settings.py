"""Training configs, and errors of invalid ones."""

from pathlib import Path

import pytest

from experiments.training.__main__ import main
from experiments.training.settings import TrainConfig, load_config
from ksana_jax.core.config import ConfigError
from ksana_jax.models.params import num_params

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "train.yaml"
        path.write_text(text)
        return path

    return write


def test_overrides_win_over_the_file(yaml_file):
    text = "out_dir: runs/mine\nnum_steps: 3\nbatch_size: 8\nmodel: {d_model: 64}\n"
    config = load_config(yaml_file(text), ["batch_size=2", "model.d_ff=96"])
    assert (config.batch_size, config.model.d_model, config.model.d_ff) == (2, 64, 96)
    assert config.context == TrainConfig().context


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("", [], "train.yaml: out_dir and num_steps or budget_s must be set; configs/train/ksana_tiny.yaml is an exam"),
        ("# nothing\n", ["seed=1"], "out_dir and num_steps or budget_s must be set"),
        ("out_dir: runs/mine", [], "num_steps or budget_s must be set"),
        ("num_steps: 3", ["batch_size=8"], "out_dir must be set"),
    ],
)
def test_a_configuration_that_says_neither_where_nor_how_long_is_refused(yaml_file, text, overrides, says):
    with pytest.raises(ConfigError) as caught:
        load_config(yaml_file(text), overrides)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_file_is_enough_when_the_overrides_say_where_and_how_long(yaml_file):
    assert load_config(yaml_file(""), ["out_dir=runs/mine", "budget_s=60"]).budget_s == 60


def test_the_config_of_the_embedded_model_is_sound():
    config = load_config(REPOSITORY / "configs" / "train" / "ksana_tiny.yaml", [])
    assert config.model_config().num_kv_heads < config.model_config().num_heads
    assert 4 * num_params(config.model_config()) < 16e6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchsize: 8", "unknown key 'batchsize', did you mean 'batch_size'"),
        ("model: {d_modell: 8}", "unknown key 'model.d_modell', did you mean 'model.d_model'"),
        ("batch_size: many", "batch_size"),
        ("batch_size: 0", "batch_size is 0"),
        ("learning_rate: .nan", "learning_rate is nan"),
        ("model: {num_heads: 3, num_kv_heads: 2}", "num_heads 3 is not a multiple of num_kv_heads 2"),
        ("model: {cla_share_factor: 0}", "cla_share_factor is 0, must be an integer from 1 to 4"),
        ("model: {cla_share_factor: 5}", "cla_share_factor is 5, must be an integer from 1 to 4"),
        (
            "model: {cla_share_factor: 2, sinks: zero}",
            "cla_share_factor 2 does not go with sinks 'zero': no family has",
        ),
        ("model: {latent: {rank: 0}}", "latent rank is 0, must be an integer from 1"),
        ("model: {latent: {rotated: 7}}", "latent rotated is 7, must be even"),
        ("model: {latent: {}, sinks: zero}", "latent does not go with sinks: no family has both"),
        ("model: {latent: {}, hybrid: {}}", "hybrid does not go with latent: no family has both"),
        ("model: {hybrid: {interval: 1}}", "hybrid interval is 1, must be an integer from 2"),
        ("model: {hybrid: {num_heads: 0}}", "num_key_heads of recurrent layers is 0, must be an integer from 1"),
        ("budget_s: null", "neither num_steps nor budget_s"),
        ("compute_dtype: f16", "compute_dtype is 'f16'"),
        ("vocab_size: 200", "vocab_size is 200"),
        ("context: 32", "context is 32"),
        ("log_every: 50\ncheckpoint_every: 75", "checkpoint_every 75 is not a multiple of log_every 50"),
        ("beta2: 1.0", "beta2 is 1.0"),
        ("a: [", "train.yaml: while parsing"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(yaml_file, text, says):
    with pytest.raises(ConfigError) as caught:
        load_config(yaml_file(text), [])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_in_base_8_or_60_is_refused(yaml_file):
    said = r"has 0?1:?00, which YAML reads as 6[04]"
    with pytest.raises(ConfigError, match=f"batch_size {said}"):
        load_config(yaml_file("batch_size: 0100\n"), ["out_dir=x"])
    with pytest.raises(ConfigError, match=rf"model\.d_ff {said}"):
        load_config(yaml_file(""), ["out_dir=x", "model.d_ff=1:00"])


def test_a_missing_file_and_a_malformed_override_are_named(yaml_file, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        load_config(tmp_path / "nothing.yaml", [])
    with pytest.raises(ConfigError, match="'batch_size' is not of the form key=value"):
        load_config(yaml_file(""), ["batch_size"])


def test_the_command_ends_with_the_one_line(yaml_file, capsys):
    assert main([str(yaml_file("bach_size: 1"))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "batch_size" in error and len(error.splitlines()) == 1

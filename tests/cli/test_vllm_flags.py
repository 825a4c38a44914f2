"""Flags of `vllm serve`: each line of the page's table, and what other arguments of `ksana serve` become."""

import re

import pytest

from ksana_jax import cli
from ksana_jax.cli.vllm_flags import as_settings
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.settings import engine_config
from ksana_jax.lab.experiments.dotted import dotlist
from tests.core.test_vllm_names import rows


@pytest.mark.parametrize(("flag", "here", "sentence"), rows("vllm serve"))
def test_every_line_of_flags(flag, here, sentence):
    words = flag.split()
    if here == "refused":
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            list(as_settings(words, ()))
    elif here == "no effect":
        assert list(as_settings([*words, "seed=1"], ())) == ["seed=1"]
    else:
        assert list(as_settings([*words, "seed=1"], ())) == [here.strip("`"), "seed=1"]
        settings = dotlist([here.strip("`")])
        if not settings.keys() & {"load_format", "tokenizer"}:  # of a model's folder
            engine_config(settings)


def test_the_page_has_flags():
    assert len(rows("vllm serve")) > 30


def test_own_options_unknown_flags_and_settings_stay_as_they_are():
    own = ["--port", "1", "--dtype", "block_size=8", "--client-timeot", "-h", "ksana-tiny"]
    assert list(as_settings(own, {"--port", "--dtype"})) == own
    assert list(as_settings(["--enforce-eager", "ksana-tiny"], ())) == ["enforce_eager=true", "ksana-tiny"]
    with pytest.raises(ConfigError, match="--max-model-len needs a value"):
        list(as_settings(["--max-model-len"], ()))


@pytest.fixture
def started(monkeypatch):
    """What `ksana serve ARGUMENTS` would serve: settings of the server and of the engine."""
    from ksana_jax.cli import serving
    from ksana_jax.serve.server import running

    def start(*arguments: str):
        found = []
        monkeypatch.setattr(running, "listen", lambda given: None)
        monkeypatch.setattr(running, "serve", lambda load, given, listener: found.extend([given, load()]) or 0)
        monkeypatch.setattr(serving, "_load", lambda model, settings, *others: settings)
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", "ksana-tiny", *arguments])
        assert not ended.value.code
        return found

    return start


def test_ksana_serve_takes_flags_and_settings_together(started):
    server, engine = started("--max-model-len", "512", "--enable-prefix-caching", "--port", "7", "block_size=8")
    assert server.port == 7
    assert engine == {"max_model_len": 512, "enable_prefix_caching": True, "block_size": 8}


def test_keys_come_from_an_option_the_environment_and_a_file(started, monkeypatch, tmp_path):
    (tmp_path / "keys").write_text("three\n")
    assert started("--api-key", "one")[0].api_keys == ("one",)
    monkeypatch.setenv("KSANA_API_KEY", "two")
    assert started()[0].api_keys == ("two",)
    assert started("--api-key-file", str(tmp_path / "keys"))[0].api_keys == ("two", "three")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-model-lenn", "5"], "No such option: --max-model-lenn"),
        (["--root-path", "/api"], "ksana serve does not support root_path='/api': paths are fixed"),
        (["--api-key", "a b"], "--api-key: the key in line 1 must be printable ASCII without spaces"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "ksana-tiny", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err

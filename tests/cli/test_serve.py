"""`ksana serve`: settings of the engine, keys, and what it says of flags of `vllm serve`."""

import pytest


@pytest.fixture
def started(run_ksana, monkeypatch):
    """What `ksana serve ARGUMENTS` would serve: settings of the server and of the engine."""
    from ksana_jax.cli import serving
    from ksana_jax.serve.server import running

    def start(*arguments: str):
        found = []
        monkeypatch.setattr(running, "listen", lambda given: None)
        monkeypatch.setattr(running, "serve", lambda load, given, listener: found.extend([given, load()]) or 0)
        monkeypatch.setattr(serving, "_load", lambda model, settings, *others: settings)
        assert run_ksana("serve", "ksana-tiny", *arguments)[0] == 0
        return found

    return start


def test_ksana_serve_takes_options_and_settings_together(started):
    server, engine = started("swap_space=4", "--port", "7", "block_size=8")
    defaults = {"enable_prefix_caching": True, "prefix_report_blocks": 4096}
    assert server.port == 7 and engine == defaults | {"swap_space": 4, "block_size": 8}


def test_keys_come_from_an_option_the_environment_and_a_file(started, monkeypatch, tmp_path):
    (tmp_path / "keys").write_text("three\n")
    assert started("--api-key", "one")[0].api_keys == ("one",)
    monkeypatch.setenv("KSANA_API_KEY", "two")
    assert started()[0].api_keys == ("two",)
    assert started("--api-key-file", str(tmp_path / "keys"))[0].api_keys == ("two", "three")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-model-len", "5"], "the nearest setting is max_model_len=VALUE"),
        (["--enable-prefix-cachin"], "the nearest setting is enable_prefix_caching=VALUE"),
        (["--gpu-memory-utilization=0.9"], "the nearest setting is gpu_memory_utilization=VALUE"),
        (["--zzzz"], "No such option: --zzzz; see docs/use/coming-from-vllm.md"),
        (["--api-key", "a b"], "--api-key: the key in line 1 must be printable ASCII without spaces"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(run_ksana, arguments, said):
    code, _, error = run_ksana("serve", "ksana-tiny", *arguments)
    assert code == 2 and said in " ".join(error.replace("│", " ").split())

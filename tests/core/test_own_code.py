"""Digests of own code: what changes what it does counts, in any file it imports, and nothing else does."""

import importlib
import sys
from pathlib import Path

import pytest

from ksana_jax.core import own_code
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import resolve, trusting

FILES = {
    "own/__init__.py": "",
    "own/method.py": "import json, helper\nfrom . import near\nfrom own.deep.far import VALUE\nclass M:\n    pass\n",
    "own/near.py": "def near():\n    return 1\n",
    "own/deep/__init__.py": "",
    "own/deep/far.py": "VALUE = 1\n",
    "own/unused.py": "x = 1\n",
    "helper.py": "def helper():\n    return 1\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_code, "_first", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("own", "helper")]:
        del sys.modules[name]


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_change_counts_in_every_file_that_the_class_imports(name, imported, folder, monkeypatch):
    if imported:
        monkeypatch.syspath_prepend(folder)
        importlib.import_module("own.method")
    before = own_code.digest_of("own.method:M")
    assert before is not None and ("own" in sys.modules) == imported
    (folder / name).write_text("# A comment.\n" + FILES[name].replace("    pass", '    "A docstring."\n    pass'))
    assert own_code.digest_of("own.method:M") == before
    (folder / name).write_text(FILES[name] + "added = 1\n")
    if imported and name != "own/unused.py":
        with pytest.raises(ConfigError, match=r"own\.method:M: its source was edited after this process"):
            own_code.digest_of("own.method:M")
        importlib.reload(sys.modules["own.method"])
        assert own_code.digest_of("own.method:M") != before
    else:
        monkeypatch.setattr(own_code, "_first", {})
        assert (own_code.digest_of("own.method:M") == before) == (name == "own/unused.py")


def test_names_are_found_anywhere_in_settings_and_other_texts_are_left_alone(folder):
    settings = {"a": [{"method": "own.method:M", "of": {"method": "helper:helper"}}], "b": "question:answer", "c": 1}
    assert own_code.digests_of(settings).keys() == {"own.method:M", "helper:helper"}
    for text in ("json:loads", "sys:exit", "cuda:0", "http://x", "ksana_jax.core.own_code:texts", "a:b:c", "none:x"):
        assert own_code.digests_of(text) == {}


def test_code_without_a_file_differs_each_time(monkeypatch):
    monkeypatch.setitem(sys.modules, "typed_in_a_notebook", type(sys)("typed_in_a_notebook"))
    digest = own_code.digest_of("typed_in_a_notebook:M")
    assert digest is not None and digest != own_code.digest_of("typed_in_a_notebook:M")


def test_source_that_python_cannot_parse_counts_by_its_bytes(folder):
    found = set()
    for text in ("x = (", "x = ((", "x = " + "(" * 500 + ")" * 500):
        Path("helper.py").write_text(text)
        own_code._first.clear()
        found.add(own_code.digest_of("own.method:M"))
    assert len(found) == 3


def test_code_that_is_not_trusted_is_not_imported(folder):
    with (
        trusting(()),
        pytest.raises(ConfigError, match=r"policy is 'helper:helper': code .* runs only with --own-code"),
    ):
        resolve("helper:helper", {}, "policy")
    assert "helper" not in sys.modules
    for names in (("helper:helper",), None):
        with trusting(()), trusting(names):
            assert resolve("helper:helper", {}, "policy")() == 1

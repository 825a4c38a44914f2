"""Settings may name a function of the user's own, and say in one sentence what is wrong with a name."""

import dataclasses
import functools
import re
import sys

import pytest

from ksana_jax.core import plugins
from ksana_jax.core.config import ConfigError
from ksana_jax.core.plugins import name_of, nearest, own_folders, read_method, resolve, search_in

REGISTRY = {"first": min, "later": "tests.core.test_plugins:later"}


def later(seq):
    return seq


class Rule:
    def method(self):
        return self

    def __call__(self, seq):
        return seq


@dataclasses.dataclass(frozen=True)
class Method:
    count: int = 1
    share: float = 0.5
    either: float | int | None = None
    flag: bool = False
    pairs: tuple[int, ...] = ()

    def __post_init__(self):
        self.count % 2


def read_fields(**fields):
    return read_method({"method": "own", **fields}, {"own": Method}, Method, "kv_method", "{...}")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"count": "x"}, "kv_method 'own': count is 'x', must be an integer"),
        ({"count": None}, "count is None, must be an integer"),
        ({"count": True}, "count is True, must be an integer"),
        ({"count": 2.0}, "count is 2.0, must be an integer"),
        ({"share": "0.5"}, "share is '0.5', must be a finite number"),
        ({"either": [1]}, r"either is \[1\], must be a finite number or an integer or None"),
        ({"flag": 1}, "flag is 1, must be True or False"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(fields, said):
    with pytest.raises(ConfigError, match=said):
        read_fields(**fields)


def test_fields_of_the_right_type_are_taken():
    assert read_fields(count=3, share=1, either=2, flag=True, pairs=[1]) == Method(3, 1, 2, True, [1])
    assert read_fields(either=0.5).either == 0.5 and read_fields(either=None).either is None


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in the working directory that is not on the Python path."""
    package = tmp_path / "plugin_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rules.py").write_text("number = 3\ndef mine(seq):\n    return -seq\nclass Group:\n    inner = mine\n")
    (package / "broken.py").write_text("1 / 0\n")
    (package / "needy.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(plugins, "_folders", [])
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("plugin_project")]:
        del sys.modules[name]


def test_a_registered_name_gives_its_entry_and_a_string_in_the_registry_is_imported():
    assert resolve("first", REGISTRY, "rule") is min
    assert resolve("later", REGISTRY, "rule") is later


def test_a_callable_is_what_it_is():
    assert resolve(later, REGISTRY, "rule") is later


def test_a_function_of_a_project_in_the_working_directory_is_found(project):
    assert resolve("plugin_project.rules:mine", REGISTRY, "rule")(2) == -2
    assert resolve("plugin_project.rules:Group.inner", REGISTRY, "rule")(2) == -2


def test_the_working_directory_hides_no_installed_package(project):
    (project / "numpy.py").write_text("def array(): ...\n")
    (project / "plugin_project" / "uses.py").write_text("import numpy\ndef mine(seq): return numpy.float32\n")
    assert resolve("plugin_project.uses:mine", REGISTRY, "rule")(0) is __import__("numpy").float32


def test_a_project_next_to_an_experiment_is_found_from_anywhere(project, monkeypatch):
    monkeypatch.chdir("/")
    search_in(project / "elsewhere")
    search_in(project)
    assert own_folders() == (str(project), str(project / "elsewhere"), "/")
    assert resolve("plugin_project.rules:mine", REGISTRY, "rule")(2) == -2


def test_a_module_of_the_same_name_as_another_is_not_taken_for_it(project):
    assert resolve("plugin_project.rules:mine", REGISTRY, "rule")(2) == -2
    other = project / "other" / "plugin_project.py"
    other.parent.mkdir()
    other.write_text("def mine(seq): return seq\n")
    search_in(other.parent)
    hidden = f"{other} is hidden by {project / 'plugin_project' / '__init__.py'}: rename it"
    with pytest.raises(ConfigError, match=re.escape(hidden)):
        resolve("plugin_project.rules:mine", REGISTRY, "rule")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fist", "rule is 'fist', must be one of first, later, or 'package.module:name'"),
        (5, "rule is 5, must be one of first, later, or 'package.module:name'"),
        ([], "rule is [], must be one of first, later, or 'package.module:name'"),
        (None, "rule is None, must be one of"),
        (":mine", "rule is ':mine', must be 'package.module:name'"),
        ("plugin_project.rules:", "rule is 'plugin_project.rules:', must be 'package.module:name'"),
        ("plugin_project.rulez:mine", "there is no module 'plugin_project.rulez' on the Python path, next to"),
        ("no_such_project:mine", "there is no module 'no_such_project' on the Python path, next to the experiment's"),
        ("plugin_project.rules:mini", "but plugin_project.rules has no 'mini'; the nearest is 'mine'"),
        ("plugin_project.rules:number", "which is of type int, not a function or class"),
        ("plugin_project.broken:mine", "importing 'plugin_project.broken' failed: ZeroDivisionError: division by zero"),
        ("plugin_project.needy:mine", "failed: ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
    ],
)
def test_what_cannot_be_found_is_one_sentence(project, spec, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(spec, REGISTRY, "rule")


def test_names_for_records_are_the_same_in_every_process():
    assert name_of("first") == "first"
    assert name_of(later) == "tests.core.test_plugins:later"
    assert name_of(Rule) == "tests.core.test_plugins:Rule" == name_of(Rule())
    assert name_of(Rule().method) == "tests.core.test_plugins:Rule.method"
    assert name_of(functools.partial(later)) == "functools:partial"
    assert "0x" not in name_of(lambda seq: seq)


def test_nearest_names():
    assert nearest("frist", REGISTRY) == "first"
    assert nearest("zzzz", REGISTRY) is None
    assert nearest("zzzz", REGISTRY, cutoff=0.0) in REGISTRY

"""Options that are made of the fields of a dataclass."""

import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ksana_jax.cli.fields import takes_fields
from ksana_jax.cli.groups import Command


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a toy.

    Args:
      wait_s: seconds to wait.
      most: requests at once; None takes twice the
        number of cores.
      names: names of clients; empty takes all.
      sizes: bytes of each part.
      loud: print more.
      where: a place as in YAML; null is here.
      secret: not an option.
    """

    wait_s: float = 1.5
    most: int | None = None
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    loud: bool = False
    where: Any = "here"
    secret: str = ""


DEFAULTS = {"wait_s": 1.5, "most": None, "names": (), "sizes": (1, 2), "loud": False, "where": "here"}


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    app, found = typer.Typer(), []

    @app.command(cls=Command)
    @takes_fields(Settings, "wait_s=wait most names sizes loud where")
    def toy(first: str, *, options: dict[str, Any], last: int = 3) -> None:
        found.append((first, options, last))

    return lambda *given: (CliRunner().invoke(app, ["x", *given]), found)


def test_a_command_gets_the_values_of_fields_besides_its_own(run):
    _, [found] = run()
    assert found == ("x", DEFAULTS, 3)


def test_values_are_read_by_the_types_of_fields(run):
    given = "--wait 2 --most 5 --names a,b, --sizes 3,4 --loud --last 7".split()
    _, [(_, options, last)] = run(*given, "--where", "{a: 1}")
    assert options == {"wait_s": 2.0, "most": 5, "names": ("a", "b"), "sizes": (3, 4), "loud": True, "where": {"a": 1}}
    assert last == 7


def test_help_has_descriptions_and_defaults_of_the_docstring(run):
    shown = " ".join(run("--help")[0].output.replace("│", " ").split())
    for text in (
        "seconds to wait [default: 1.5]",
        "requests at once [default: (twice the number of cores)]",
        "NAME,... names of clients [default: (all)]",
        "NUMBER,... bytes of each part [default: 1,2]",
        "--loud print more",
        "YAML a place as in YAML; null is here [default: here]",
    ):
        assert text in shown, shown
    assert "secret" not in shown and "--no-loud" not in shown


def test_a_field_without_a_description_is_no_option():
    with pytest.raises(KeyError, match="unknown"):
        takes_fields(Settings, "wait_s unknown")


def test_numbers_that_are_none_are_told_with_an_example(run):
    error = run("--sizes", "3,many")[0].exception
    assert str(error) == "--sizes is '3,many', must be comma-separated numbers such as 256,1024"

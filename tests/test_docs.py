"""Pages in docs/ are right: their Python runs, their drawings are what patterns do, and their links lead somewhere."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from ksana_jax import AttentionPattern
from tests.reference import literal

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted((*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_python_of_the_page_for_jax_users_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, code in enumerate(blocks(DOCS / "jax.md", "python")):
        exec(compile(code, f"jax.md, block {number}", "exec"), names)
    assert "FLOPs" in capsys.readouterr().out
    assert [*tmp_path.glob("profile/**/*.xplane.pb")]
    assert float(np.abs(names["logits"](names["params"], names["hidden"]) - names["scores"]).max()) == 0
    assert jax.tree.structure(names["edited"]) == jax.tree.structure(names["params"])


def test_drawings_of_patterns_are_what_the_patterns_do():
    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^`AttentionPattern\((.*?)\)`.*?```\n(.*?)^```$", text, re.M | re.S)
    assert len(drawn) == 5
    for fields, drawing in drawn:
        pattern = AttentionPattern(**{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", fields)})
        visible, _ = literal(pattern, *np.ogrid[:10, :10])
        assert [line.split() for line in drawing.splitlines()] == [
            ["#" if visible[q, k] else "." for k in range(q + 1)] for q in range(10)
        ]


def test_drawn_distances_of_sinks_are_what_the_patterns_do():
    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    seen, *rows = re.search(r"^seen by query 9 (.*?)^```$", text, re.M | re.S)[0].splitlines()[:4]
    assert seen.split()[4:] == [*"##....####"]
    for row in rows:
        name, distances = re.fullmatch(r'distance, "(\w+)" +(.*)', row).groups()
        pattern = AttentionPattern(window=4, num_sinks=2, sink_position=name)
        visible, stands = literal(pattern, *np.ogrid[:10, :10])
        expected = [stands[9, k] - k for k in range(10) if visible[9, k]]
        assert [int(d) for d in distances.split()] == expected

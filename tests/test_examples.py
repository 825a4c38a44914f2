"""The examples run as they are, and their index has them all. Jupyter is not needed: code cells are plain Python."""

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom_and_draw(path):
    matplotlib.use("Agg")
    names = {}
    try:
        for number, cell in enumerate(cells(path)):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
        [figure] = map(plt.figure, plt.get_fignums())
        assert len(figure.axes) >= 3
    finally:
        plt.close("all")


def test_the_index_of_examples_names_every_file():
    index = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in files if f"]({name})" in index} == files

"""Files and lines that a greedy request on a CPU leads a reader through. Bounds are counts of today: they only fall."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ksana_jax
from ksana_jax import LLM, SamplingParams
from ksana_jax.engine.engine import Engine
from tests import machine

PACKAGE = Path(ksana_jax.__file__).parent

# Files entered, all of their lines, and moves from one file to another. They may only fall, each bound with its count.
BOUNDS = {"first": (47, 7_998, 1_098), "later": (26, 5_030, 562)}

# The files that the package's docstring names, without what it says of others.
ORDER = re.compile(r"greedy request enters them on a CPU;[^\n]*\n\n(.*?)\n\n", re.DOTALL)


def walked(function) -> tuple[list[str], list[str]]:
    """Calls a function; returns the file of ours of each call in it, in order, and the calls that led to a step."""
    files, way, root = [], [], f"{PACKAGE}/"

    def enter(frame, event, argument):
        if event == "call" and (name := frame.f_code.co_filename).startswith(root):
            files.append(name.removeprefix(root))
            if frame.f_code is Engine._step.__code__:
                way[:] = way_to(frame)

    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files, way


def way_to(frame) -> list[str]:
    """Returns the names of functions from `LLM.generate`, whose own is left out, to a frame."""
    names = []
    while frame.f_code is not LLM.generate.__code__:
        names.insert(0, frame.f_code.co_name)
        frame = frame.f_back
    return names


def walk_requests() -> dict[str, list[str]]:
    """Returns what two greedy requests walk through, the first of which compiles the steps, and the way to a step."""
    llm = LLM("ksana-tiny", max_model_len=256, num_blocks=64)

    def greedy():
        [output] = llm.generate("def main(", SamplingParams(temperature=0, max_tokens=8))
        assert len(output.outputs[0].token_ids) == 8

    first, _ = walked(greedy)
    later, way = walked(greedy)
    return {"first": first, "later": later, "way": way}


@pytest.fixture(scope="module")
def walks():
    """From an interpreter of its own that compiles its steps: those of other runs are read by other files."""
    run = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=PACKAGE.parent,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# Without native operators a step is traced through those of XLA.
@machine.native_products
@pytest.mark.cpu("the files of other devices differ")
@pytest.mark.parametrize("request_", BOUNDS)
def test_a_greedy_request_leads_through_no_more_files_and_lines_than_before(walks, request_):
    files = walks[request_]
    lines = sum(len((PACKAGE / name).read_text().splitlines()) for name in set(files))
    moves = sum(before != after for before, after in itertools.pairwise(files))
    found = len(set(files)), lines, moves
    names = " ".join(dict.fromkeys(files))
    bounds = BOUNDS[request_]
    assert all(map(int.__le__, found, bounds)), f"files, lines, moves {found}, at most {bounds}: {names}"


@machine.native_products
@pytest.mark.cpu("the files of other devices differ")
def test_the_package_names_files_in_the_order_in_which_they_are_entered(walks):
    named = ORDER.search(ksana_jax.__doc__ or "")
    assert named is not None
    files = [f"{name}.py" for name in re.findall(r"`([a-z_/]+)`", named[1])]
    assert len(files) > 20 and not [name for name in files if name not in walks["first"]]
    assert files == sorted(files, key=walks["first"].index)


def test_a_step_is_three_calls_from_generate(walks):
    assert walks["way"] == ["serve", "run", "_step"]


if __name__ == "__main__":
    print(json.dumps(walk_requests()))

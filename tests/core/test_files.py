"""Links, FIFOs and the like in place of files: nothing outside the folder changes, and nothing waits."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ksana_jax.core import files
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import UnsafeFile
from ksana_jax.core.folder_lock import FolderInUse, FolderLock


def within(seconds, function, *args):
    """What a call raises, in a thread: one that waits for ever must not take the tests along."""
    raised = []

    def call():
        try:
            function(*args)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits"
    return raised[0] if raised else None


@pytest.fixture
def outside(tmp_path):
    """A file of somebody else's; it must stay as it is."""
    path = tmp_path / "outside"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "file"


def test_a_link_is_read_and_never_written_through(path, outside):
    path.symlink_to(outside)
    assert files.read_bytes(path) == b"precious"
    with pytest.raises(UnsafeFile, match="file is a link, must be a plain file"):
        files.open_to_update(path)
    with pytest.raises(FileExistsError):
        files.create(path)
    files.write_atomic(path, "mine")
    assert path.read_text() == "mine" and not path.is_symlink()


def test_a_link_that_leads_nowhere_makes_no_file_there(path, tmp_path):
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(UnsafeFile, match="is a link"):
        files.open_to_update(path)
    with pytest.raises(FileExistsError):
        files.create(path)
    assert not (tmp_path / "nothing").exists()


def test_a_second_name_of_a_file_is_not_written_to(path, outside):
    os.link(outside, path)
    with pytest.raises(UnsafeFile, match=r"is one of 2 names of a file \(hard links\)"):
        files.open_to_update(path)
    assert files.read_bytes(path) == b"precious"


def test_a_fifo_is_refused_at_once(path):
    os.mkfifo(path)
    for function in (files.open_to_read, files.open_to_update, files.create):
        error = within(5, function, path)
        assert isinstance(error, FileExistsError if function is files.create else UnsafeFile)


def test_a_folder_and_a_device_are_refused(path):
    for odd in (path.parent, Path("/dev/zero")):
        for function in (files.open_to_read, files.open_to_update):
            with pytest.raises(UnsafeFile, match=r"is a (folder|device or a socket), must be a plain file"):
                function(odd)


def test_the_error_is_one_of_the_configuration_and_of_the_system(path):
    path.symlink_to("elsewhere")
    for kind in (ConfigError, OSError):
        with pytest.raises(kind, match="is a link"):
            files.open_to_update(path)


def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(path):
    files.write_atomic(path, b"old")
    with pytest.raises(RuntimeError), files.replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["file"]


def test_the_temporary_file_of_a_write_follows_no_link(path, outside, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda length: "0" * 8)
    path.with_name(".file.00000000.tmp").symlink_to(outside)
    with pytest.raises(FileExistsError), monkeypatch.context() as patch:
        patch.setattr(files, "remove_leftovers", lambda folder, pattern: None)
        files.write_atomic(path, "mine")
    files._remove_once.cache_clear()
    files.write_atomic(path, "mine")
    assert path.read_text() == "mine"


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(path):
    code = """
import os, signal, sys
from pathlib import Path
from ksana_jax.core.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"part")
    file.flush()
    print("written", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"written\n"
        empty, swap = path.with_name(".file.01234567.tmp"), path.with_name(".file.swp")
        empty.touch()  # not locked yet
        swap.touch()
        files.write_atomic(path, "mine")
        assert len(left := set(path.parent.iterdir())) == 4 and {path, empty, swap} < left
        other.kill()
    os.utime(empty, (0, 0))
    files._remove_once.cache_clear()  # as in the next process
    files.write_atomic(path, "mine again")
    assert {*path.parent.iterdir()} == {path, swap}


def test_a_lock_file_that_is_a_link_locks_nothing(path, outside):
    path.symlink_to(outside)
    with pytest.raises(UnsafeFile, match="is a link"):
        FolderLock(path)
    os.remove(path)
    os.mkfifo(path)
    assert isinstance(within(5, FolderLock, path), UnsafeFile)


def test_a_lock_keeps_others_out_until_it_is_released_or_dropped(path):
    lock = FolderLock(path)
    with pytest.raises(FolderInUse, match=str(os.getpid())):
        FolderLock(path)
    lock.release()
    lock = FolderLock(path)
    del lock
    with contextlib.ExitStack() as held:
        held.callback(FolderLock(path).release)
        with pytest.raises(FolderInUse):
            FolderLock(path)
    shared = [FolderLock(path, shared=True) for _ in range(2)]
    with pytest.raises(FolderInUse):
        FolderLock(path)
    for lock in shared:
        lock.release()
    FolderLock(path).release()


def test_a_lock_whose_file_was_removed_is_noticed(path):
    first = FolderLock(path)
    first.check()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        first.check()
    second = FolderLock(path)
    with pytest.raises(UnsafeFile, match="was removed and created again: another process may use the folder"):
        first.check()
    second.check()
    first.release()
    second.check()


def test_a_forked_child_leaves_the_lock_to_its_parent(path):
    code = """
import os, sys, time
from pathlib import Path
from ksana_jax.core.folder_lock import FolderInUse, FolderLock
path = Path(sys.argv[1])
lock, told = FolderLock(path), os.pipe()
if os.fork() == 0:
    lock.release()
    os.write(told[1], b"released")
    time.sleep(60)
os.read(told[0], 8)
assert path.read_text() == f"{os.getpid()}\\n"
try:
    FolderLock(path)
except FolderInUse as holder:
    print(holder, os.getpid())
lock.release()
FolderLock(path).release()  # the child, which lives, does not hold it
if (child := os.fork()) == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
os.killpg(0, 9)
"""
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=60)
    holder, parent = done.stdout.split()
    assert holder == parent and not done.stderr

"""Folders whose files are executed: who else could write there is found, and refused."""

import os
from pathlib import Path

import pytest

from ksana_jax.core import private_folder
from ksana_jax.core.files import UnsafeFile
from ksana_jax.core.private_folder import make_private, open_private


def test_a_new_folder_is_private_and_found_again(tmp_path):
    for _ in range(2):
        make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o701])
def test_a_folder_of_another_mode_is_refused(mode, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    with pytest.raises(UnsafeFile, match="mode 0700"):
        make_private(tmp_path / "x")


def test_links_and_files_are_refused(tmp_path):
    make_private(tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UnsafeFile, match="no link"):
            make_private(tmp_path / name)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    make_private(tmp_path / "x")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnsafeFile, match="folder of this user"):
        make_private(tmp_path / "x")


def test_a_parent_that_others_can_write_is_refused_unless_it_is_sticky(tmp_path):
    parent = tmp_path / "parent"
    make_private(parent / "x")
    parent.chmod(0o777)
    with pytest.raises(UnsafeFile, match=rf"{parent} can be written by everybody"):
        make_private(parent / "x")
    parent.chmod(0o1777)
    make_private(parent / "x")


def test_a_parent_of_a_shared_group_is_refused_and_one_of_a_private_group_is_not(tmp_path, monkeypatch):
    parent = tmp_path / "parent"
    make_private(parent / "x")
    parent.chmod(0o770)
    make_private(parent / "x")  # of the user's own group
    monkeypatch.setattr(private_folder, "_is_own_group", lambda group: False)
    with pytest.raises(UnsafeFile, match="can be written by group"):
        make_private(parent / "x")


def test_a_link_above_the_folder_is_followed_and_its_target_checked_too(tmp_path):
    target = tmp_path / "target"
    make_private(target / "x")
    (tmp_path / "link").symlink_to(target)
    make_private(tmp_path / "link" / "x")
    target.chmod(0o777)
    with pytest.raises(UnsafeFile, match=rf"{target} can be written by everybody"):
        make_private(tmp_path / "link" / "x")


def test_only_plain_files_of_the_user_are_opened(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    path.chmod(0o600)
    os.close(open_private(path))
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo"):
        with pytest.raises(OSError):
            open_private(tmp_path / name)
    path.chmod(0o620)
    with pytest.raises(UnsafeFile, match="only this user can write"):
        open_private(path)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnsafeFile):
        open_private(path)


def test_a_group_with_other_members_is_not_private(monkeypatch):
    class Group:
        gr_name, gr_mem = "", ["somebody"]

    group = os.stat(Path.home()).st_gid
    Group.gr_name = private_folder.grp.getgrgid(group).gr_name
    monkeypatch.setattr(private_folder.grp, "getgrgid", lambda number: Group)
    assert not private_folder._is_own_group(group)

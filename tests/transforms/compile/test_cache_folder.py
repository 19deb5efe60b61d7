import errno
import os
import time
from pathlib import Path

import pytest

from lightning_ups.transforms.compile import cache_folder, prune, user_folder

MOUNTS = "proc /proc proc rw 0 0\n/dev/sda / {root} rw 0 0\nhost:/home /srv/my\\040home {home} rw 0 0\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    mounted(monkeypatch, "ext4")
    return home


def mounted(monkeypatch, kind):
    monkeypatch.setattr(cache_folder, "_file_system", lambda path: kind)


def test_only_the_user_may_read_and_write_it(home):
    before = os.umask(0)
    try:
        folder = user_folder()
    finally:
        os.umask(before)
    assert folder.parent == (home / "lightning_ups" / "compiled").resolve()
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert user_folder() == folder


@pytest.mark.parametrize(("mode", "place"), [(0o750, "lightning_ups/compiled"), (0o777, "lightning_ups"), (0o775, "")])
def test_a_folder_that_others_may_write_to_is_refused(home, mode, place):
    user_folder()
    (home / place).chmod(mode)
    with pytest.raises(PermissionError, match=f"{home / place}: chmod"):
        user_folder()


@pytest.mark.parametrize("place", ["lightning_ups/compiled", "lightning_ups"])
def test_a_folder_of_another_user_is_refused(home, monkeypatch, place):
    user_folder()
    stat, other = Path.stat, (home / place).resolve()

    def owned(path, **options):
        facts = stat(path, **options)
        return os.stat_result((*facts[:4], 12345, *facts[5:])) if path == other else facts

    monkeypatch.setattr(Path, "stat", owned)
    with pytest.raises(PermissionError, match=f"{other} belongs to another user"):
        user_folder()


def test_a_folder_without_room_is_refused(home, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        user_folder()


def test_links_in_a_circle_are_refused(home):
    (home / "one").symlink_to(home / "two")
    (home / "two").symlink_to(home / "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "one"))
        with pytest.raises(OSError, match=r"loop|levels|exists"):
            user_folder()


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", None])
def test_a_folder_that_machines_may_share_is_refused(home, monkeypatch, kind):
    mounted(monkeypatch, kind)
    with pytest.raises(OSError, match=f"of type {kind}"):
        user_folder()
    assert not (home / "lightning_ups").exists()


def test_a_relative_folder_is_refused(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with pytest.raises(OSError, match="no absolute path"):
        user_folder()


def test_the_file_system_is_that_of_the_deepest_place(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: MOUNTS.format(root="ext4", home="nfs4"))
    assert cache_folder._file_system(Path("/srv/my home/user/.cache")) == "nfs4"
    assert cache_folder._file_system(Path("/srv/my")) == "ext4"


def test_other_versions_have_other_folders(home, monkeypatch):
    folder = user_folder()
    monkeypatch.setattr(cache_folder.dynamo, "toolchain", lambda: {"torch": "3.0"})
    cache_folder._key.cache_clear()
    assert user_folder() != folder
    cache_folder._key.cache_clear()


def test_what_was_used_longest_ago_is_deleted(home):
    folder = user_folder()
    for hours, name in ((9, "old"), (5, "newer"), (3, "newest"), (0, "in_use")):
        (folder / name).mkdir()
        for each, age in (("a", hours), ("b", 2 * hours)):  # files of a directory stay together
            file = folder / name / each
            file.write_bytes(bytes(50))
            os.utime(file, (time.time() - 3600 * age,) * 2)
    prune(limit=400)
    assert sorted(path.parent.name for path in folder.rglob("a")) == ["in_use", "newer", "newest", "old"]
    prune(limit=399)
    assert sorted(path.parent.name for path in folder.rglob("b")) == ["in_use", "newer", "newest"]
    prune(limit=0)
    assert [path.parent.name for path in folder.rglob("a")] == ["in_use"]

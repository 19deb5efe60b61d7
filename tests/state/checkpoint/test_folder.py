import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_ups.state.checkpoint import folder, meta


def save(path, *, content=b"data", stop_before=None, monkeypatch=None):
    """Save a small checkpoint; die before the call of ``folder`` or ``Path`` that is named."""
    if stop_before is not None:
        owner, name, number = stop_before
        stock, calls = getattr(owner, name), 0

        def dying(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return stock(*args, **kwargs)

        monkeypatch.setattr(owner, name, dying)
    draft = folder.begin(path)
    (draft.folder / ".metadata").write_bytes(b"metadata")
    (draft.folder / "data").write_bytes(content)
    folder.finish(draft, files={"meta.pt": content}, facts={"global_step": 1})


class Killed(BaseException):
    pass


def content_of(path):
    return (path / "data").read_bytes()


def test_a_whole_one_is_complete_and_newest(tmp_path):
    save(tmp_path / "a")
    save(tmp_path / "b")
    assert folder.is_complete(tmp_path / "a")
    assert folder.newest(tmp_path) == tmp_path / "b"
    assert not (tmp_path / "a" / "incomplete").exists()


@pytest.mark.parametrize("write", [save, lambda path: folder.write_file(path, {"x": 1})], ids=["folder", "one file"])
def test_a_folder_that_never_was_a_checkpoint_is_not_replaced(tmp_path, write):
    path = tmp_path / "results"
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"results is a folder that holds thesis.txt and no checkpoint"):
        write(path)
    assert [entry.name for entry in path.iterdir()] == ["thesis.txt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["results"]
    (path / "thesis.txt").unlink()
    write(path)
    assert folder.is_complete(path), "an empty one is"


@pytest.mark.parametrize("left", ["incomplete", ".metadata", "__0_0.distcp", folder.META])
def test_what_a_dead_run_has_left_is_replaced(tmp_path, left):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / left).write_text("{")
    save(tmp_path / "a")
    assert folder.is_complete(tmp_path / "a")


@pytest.mark.parametrize("harm", ["marker gone", "file cut", "file gone"])
def test_what_is_not_whole_is_not_complete(tmp_path, harm):
    save(tmp_path / "good")
    save(tmp_path / "bad")
    if harm == "marker gone":
        (tmp_path / "bad" / folder.MARKER).unlink()
        (tmp_path / "bad" / "incomplete").touch()
    elif harm == "file cut":
        (tmp_path / "bad" / "data").write_bytes(b"d")
    else:
        (tmp_path / "bad" / "data").unlink()
    assert not folder.is_complete(tmp_path / "bad")
    assert folder.newest(tmp_path) == tmp_path / "good"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"null", b"[1]", b'"files"', b"\xff\xfe", b'{"saved_at_ns": 1, "files": {}}']
)
def test_a_marker_that_is_none_of_ours_is_not_trusted(tmp_path, content):
    save(tmp_path / "good")
    save(tmp_path / "bad")
    (tmp_path / "bad" / folder.MARKER).write_bytes(content)
    assert not folder.is_complete(tmp_path / "bad")
    assert folder.located(tmp_path / "bad") is None
    assert folder.newest(tmp_path) == folder.newest_within(tmp_path) == tmp_path / "good"
    save(tmp_path / "bad")
    assert folder.is_complete(tmp_path / "bad")


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_folder_with_a_file_of_the_name_of_our_marker_alone_is_not_replaced(tmp_path, text):
    path = tmp_path / "results"
    path.mkdir()
    (path / folder.MARKER).write_text(text)
    (path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds complete\.json and no checkpoint"):
        save(path)
    assert (path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["stock", "größe"], ids=["ascii", "no ascii, which torch writes as we do"])
def test_a_folder_of_lightning_is_complete(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / ".metadata").touch()
    assert not folder.is_complete(tmp_path / name)
    torch.save({"epoch": 1}, tmp_path / name / "meta.pt")
    assert folder.is_complete(tmp_path / name)


def test_a_folder_of_ours_without_its_marker_is_none_of_lightning(tmp_path):
    save(tmp_path / "a", content=meta.dumped({"epoch": 1}))
    (tmp_path / "a" / folder.MARKER).unlink()
    assert not folder.is_complete(tmp_path / "a")
    assert folder.newest(tmp_path) is None


def test_what_lightning_may_have_written_stays_until_its_successor_is_whole(tmp_path):
    save(tmp_path / "last", content=meta.dumped({"epoch": 1}))  # as a tool leaves meta.pt that writes it anew
    (tmp_path / "last" / folder.MARKER).unlink()
    draft = folder.begin(tmp_path / "last")
    assert content_of(tmp_path / "last") == meta.dumped({"epoch": 1})
    (draft.folder / ".metadata").write_bytes(b"metadata")
    (draft.folder / "data").write_bytes(b"new")
    folder.finish(draft, files={"meta.pt": b""}, facts={})
    assert content_of(tmp_path / "last") == b"new"
    assert sorted(os.listdir(tmp_path)) == ["last"]


def test_a_folder_that_is_closed_to_this_user_is_passed_over(tmp_path, monkeypatch):
    save(tmp_path / "run" / "open")
    (tmp_path / "run" / "closed").mkdir()
    stock = folder.is_complete

    def closed(path):
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return stock(path)

    monkeypatch.setattr(folder, "is_complete", closed)
    assert folder.newest_within(tmp_path) == tmp_path / "run" / "open"


def test_a_draft_on_a_taken_path_touches_nothing(tmp_path):
    save(tmp_path / "last", content=b"old")
    draft = folder.begin(tmp_path / "last")
    assert draft.folder != tmp_path / "last"
    assert folder.is_complete(tmp_path / "last")
    folder.discard(draft)
    assert content_of(folder.located(tmp_path / "last")) == b"old"
    assert sorted(os.listdir(tmp_path)) == ["last"]


# Every change of the file system that replaces a checkpoint, each as the moment of death.
MOMENTS = [
    *[(Path, "rename", number) for number in range(1, 6)],
    *[(Path, "unlink", number) for number in range(1, 2)],
    *[(folder, name, 1) for name in ("mark", "take_place", "_delete", "_sync")],
    (folder, "_sync", 2),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment[1]} {moment[2]}")
def test_wherever_it_dies_a_whole_one_is_found_and_the_next_save_works(tmp_path, moment, monkeypatch):
    save(tmp_path / "last", content=b"old")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        save(tmp_path / "last", content=b"new", stop_before=moment, monkeypatch=patch)
    found = folder.located(tmp_path / "last")
    assert found is not None
    assert content_of(found) in (b"old", b"new")
    assert folder.newest(tmp_path) == found
    save(tmp_path / "last", content=b"newer")
    assert content_of(folder.located(tmp_path / "last")) == b"newer"
    assert sorted(os.listdir(tmp_path)) == ["last"], "nothing is left over"


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    save(tmp_path / "step", content=b"old")
    (tmp_path / "last").symlink_to("step")
    save(tmp_path / "last", content=b"new")
    assert content_of(tmp_path / "last") == b"new"
    assert content_of(tmp_path / "step") == b"old"


def test_removing_a_link_leaves_its_target(tmp_path):
    save(tmp_path / "step")
    (tmp_path / "last").symlink_to("step")
    folder.remove(tmp_path / "last")
    assert folder.is_complete(tmp_path / "step")
    folder.remove(tmp_path / "step")
    folder.remove(tmp_path / "step")
    assert os.listdir(tmp_path) == []


def test_half_removed_is_not_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", lambda path: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            folder.remove(tmp_path / "a")
    assert folder.located(tmp_path / "a") is None
    assert folder.newest(tmp_path) is None


def test_one_file_takes_the_place_of_a_folder(tmp_path):
    save(tmp_path / "a")
    folder.write_file(tmp_path / "a", {"x": torch.ones(2)})
    assert torch.load(tmp_path / "a")["x"].sum() == 2
    assert folder.is_complete(tmp_path / "a")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    folder.write_file(tmp_path / "a", {"x": 1})
    with pytest.raises(Exception, match="pickle"):
        folder.write_file(tmp_path / "a", {"x": lambda: 0})
    assert torch.load(tmp_path / "a") == {"x": 1}
    assert os.listdir(tmp_path) == ["a"]


def test_where_no_folder_can_be_made_is_known_without_making_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert folder.unwritable(tmp_path / "new" / "newer") is None
    assert folder.unwritable(Path("new")) is None
    (tmp_path / "link").symlink_to("nothing")
    for there in ("file", "link"):
        for place in (tmp_path / there, tmp_path / there / "below"):
            assert folder.unwritable(place) == f"{tmp_path / there} is no folder"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a disk that is mounted to be read
    assert folder.unwritable(tmp_path / "new") == f"{tmp_path} cannot be written to"
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "link"}


def test_a_place_in_a_folder_that_is_closed_to_this_user_cannot_be_written_to(tmp_path, monkeypatch):
    private, stat = tmp_path / "private", os.stat
    private.mkdir()

    def closed(path, **options):  # as for any user but root
        if str(path).startswith(f"{private}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "access", lambda path, mode: path != private)
    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(os, "lstat", closed)
    assert folder.unwritable(private / "new" / "newer") == f"{private} cannot be written to"


@pytest.mark.parametrize("clean_up", [False, True])
def test_the_only_whole_one_stays_if_the_one_in_its_place_is_damaged(tmp_path, clean_up):
    """As when a run died between two renames, and the newer one was damaged later."""
    path = tmp_path / "last.ckpt"
    folder.finish(folder.begin(path), files={"meta.pt": b"old"}, facts={})
    shutil.copytree(path, tmp_path / "last.ckpt.previous")
    (path / "meta.pt").write_bytes(b"")
    if clean_up:
        folder.clean(tmp_path, unchanged_s=0.0)
    else:
        draft = folder.begin(path)
        assert draft.folder != path
    assert folder.is_complete(folder.located(path))
    assert (folder.located(path) / "meta.pt").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["notes", "notes.txt", "runs/../runs/kept.ckpt", "runs/link/notes"])
def test_what_is_no_checkpoint_is_not_deleted(tmp_path, name):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    folder.finish(folder.begin(tmp_path / "runs" / "kept.ckpt"), files={"meta.pt": b"x"}, facts={})
    with pytest.warns(UserWarning, match="is not deleted: it is not a checkpoint of this run"):
        folder.remove(tmp_path / name)
    assert (tmp_path / name).exists()
    folder.remove(tmp_path / "runs" / "kept.ckpt")
    assert not (tmp_path / "runs" / "kept.ckpt").exists()

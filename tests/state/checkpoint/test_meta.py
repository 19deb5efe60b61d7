import argparse
import functools
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lightning_ups.state.checkpoint import meta


class Own:
    ran = False

    def __init__(self):
        self.value = 1

    def __setstate__(self, state):
        Own.ran = True


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("/tmp/lightning_ups_was_here",)


def write(path, content):
    path.write_bytes(meta.dumped(content))
    return path


def test_plain_values_come_back(tmp_path):
    content = {"a": 1, "b": [1.5, (2, "x")], "c": OrderedDict(d=torch.ones(2)), "none": None}
    state, left = meta.loaded(write(tmp_path / "m", content))
    assert left == {}
    assert torch.equal(state["c"].pop("d"), torch.ones(2))
    assert state["b"] == [1.5, (2, "x")]


def test_bytes_are_of_the_moment():
    content = {"a": [1]}
    frozen = meta.dumped(content)
    content["a"].append(2)
    assert frozen != meta.dumped(content)


@pytest.mark.parametrize(
    "value",
    [Own(), {"deep": [Own()]}, functools.partial(max, 1), argparse.Namespace(a=1), torch.nn.functional.relu],
    ids=["own class", "within", "partial", "namespace", "function"],
)
def test_what_is_needless_stays_behind_by_name(tmp_path, value):
    path = write(tmp_path / "m", {"hyper_parameters": {"lr": 0.1, "odd": value}, "loops": 3})
    Own.ran = False
    state, left = meta.loaded(path, needless=("hyper_parameters",))
    assert state["loops"] == 3
    assert state["hyper_parameters"]["lr"] == 0.1
    assert left
    assert all(place.startswith("hyper_parameters.odd") for place in left)
    assert not Own.ran


def test_what_is_needed_is_refused_by_name(tmp_path):
    path = write(tmp_path / "m", {"callbacks": {"mine": Own()}})
    with pytest.raises(ValueError, match=r"test_meta.Own at callbacks.mine.*\n?.*weights_only=False"):
        meta.loaded(path)
    state, _ = meta.loaded(path, weights_only=False)
    assert isinstance(state["callbacks"]["mine"], Own)


@pytest.mark.parametrize("content", [b"model:\n  class_path: Net\n", b"", b"PK\x03\x04 torn"])
def test_a_file_that_is_no_checkpoint(tmp_path, content):
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(ValueError, match=r"m is not a checkpoint\. .*Give a complete file\."):
        meta.loaded(tmp_path / "m")


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("harm", [b"\0" * 40, b"\xff" * 40], ids=["zeros", "ones"])
@pytest.mark.parametrize("part", [b"some_text", b"PK\x01\x02"], ids=["pickle", "directory of the archive"])
def test_a_file_that_is_damaged(tmp_path, part, harm, weights_only):
    path = write(tmp_path / "m", {"some_text": "x" * 400, "w": torch.ones(3)})
    content = path.read_bytes()
    start = content.index(part)
    path.write_bytes(content[:start] + harm + content[start + len(harm) :])
    with pytest.raises(ValueError, match=r"m cannot be read: .*\. It is damaged: .*Use an earlier checkpoint\.$"):
        meta.loaded(path, weights_only=weights_only)


@pytest.mark.parametrize("weights_only", [True, False])
def test_memory_that_is_short_is_no_damage(tmp_path, monkeypatch, weights_only):
    def refused(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", refused)
    with pytest.raises(RuntimeError, match="allocate memory"):
        meta.loaded(write(tmp_path / "m", {}), weights_only=weights_only)


def test_a_file_of_another_user(tmp_path, monkeypatch):
    write(tmp_path / "m", {})

    def refused(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError, match=r"m cannot be read: Permission denied\. It belongs to another user"):
        meta.loaded(tmp_path / "m")


def test_a_trusted_class_is_built(tmp_path):
    path = write(tmp_path / "m", {"callbacks": {"mine": Own()}})
    with torch.serialization.safe_globals([Own]):
        state, left = meta.loaded(path)
    assert isinstance(state["callbacks"]["mine"], Own)
    assert left == {}


def test_nothing_is_run(tmp_path):
    path = write(tmp_path / "m", {"x": Harmful()})
    with pytest.raises(ValueError, match="weights_only=False"):
        meta.loaded(path, needless=("x",))
    assert not os.path.exists("/tmp/lightning_ups_was_here")


def test_tensors_can_be_mapped(tmp_path):
    path = write(tmp_path / "m", {"w": torch.arange(4.0)})
    state, _ = meta.loaded(path, mmap=True)
    assert state["w"].tolist() == [0, 1, 2, 3]


def test_a_file_of_an_old_torch_is_refused_with_the_remedy(tmp_path):
    torch.save({"a": 1}, tmp_path / "m", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"before 1\.6: load it and save it again with torch\.save"):
        meta.loaded(tmp_path / "m")

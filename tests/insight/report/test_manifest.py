import json
import os
import threading

import pytest

from lightning_ups.insight.report.manifest import ABSENT, difference, flattened, read, reserve, write


def test_flattened_keeps_plain_lists_whole_and_numbers_nested_ones():
    nested = {"a": {"b": 1, "c": [1, 2], "d": {}}, "gpus": [{"name": "x"}, {"name": "y"}], "e": (1, 2), "f": []}
    assert flattened(nested) == {
        "a/b": 1,
        "a/c": [1, 2],
        "a/d": {},
        "gpus/0/name": "x",
        "gpus/1/name": "y",
        "e": [1, 2],
        "f": [],
    }
    assert flattened({"a": 1}, prefix="manifest") == {"manifest/a": 1}


def test_difference_names_what_changed_came_and_went(tmp_path):
    a = {"run": {"started": "1", "duration_s": 1.0, "status": "finished"}, "flags": {"tf32_matmul": True}, "gone": 1}
    b = {"run": {"started": "2", "duration_s": 2.0, "status": "failed"}, "flags": {"tf32_matmul": True}, "new": [1]}
    expected = {"run/status": ("finished", "failed"), "gone": (1, ABSENT), "new": (ABSENT, [1])}
    assert difference(a, b) == expected
    assert difference(a, a) == {}
    for name, manifest in {"a.json": a, "b.json": b}.items():
        write(manifest, tmp_path / name)
    assert difference(tmp_path / "a.json", str(tmp_path / "b.json")) == expected


def test_a_reader_never_finds_half_a_manifest(tmp_path):
    path, stop, torn = tmp_path / "m.json", threading.Event(), []
    write({"values": [0] * 50_000}, path)

    def look():
        while not stop.is_set():
            try:
                json.loads(path.read_text())
            except ValueError as error:
                torn.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(20):
        write({"values": [number] * 50_000}, path)
    stop.set()
    reader.join()
    assert not torn
    assert os.listdir(tmp_path) == ["m.json"]


def test_a_write_that_fails_leaves_the_old_manifest_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "m.json"
    write({"a": 1}, path)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write({"a": 2}, path)
    assert read(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["m.json"]


def test_no_two_runs_get_one_path(tmp_path):
    names = [reserve(tmp_path / "logs").name for _ in range(3)]
    assert names == ["manifest.json", "manifest-2.json", "manifest-3.json"]


@pytest.mark.parametrize("content", ["", "[" * 100_000, "[]", "x"])
def test_a_file_that_is_not_a_manifest_is_an_error(tmp_path, content):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ValueError, match=r"m\.json is not a manifest"):
        read(tmp_path / "m.json")

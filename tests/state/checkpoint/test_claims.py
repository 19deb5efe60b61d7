import json
import os

import pytest

from lightning_ups.state.checkpoint import claim, neighbors


def test_the_claim_of_this_process_is_no_neighbor(tmp_path):
    file = claim(tmp_path)
    assert claim(tmp_path) == file, "it is renewed"
    assert os.listdir(tmp_path) == [file.name]
    assert [*neighbors(tmp_path)] == []


def test_a_process_of_this_machine_that_has_ended_is_dead(tmp_path):
    file = claim(tmp_path)
    text = file.read_text()
    file.unlink()
    (tmp_path / ".run-here-1.json").write_text(text.replace('"began": "', '"began": "1'))  # its number was used again
    [other] = neighbors(tmp_path)
    assert other.is_alive is False
    assert f"process {os.getpid()} on " in str(other.claim)


def test_a_run_of_another_machine_may_be_alive_unless_slurm_has_requeued_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    file = claim(tmp_path)
    text = file.read_text()
    file.unlink()
    (tmp_path / ".run-elsewhere-1.json").write_text(text.replace('"host": "', '"host": "elsewhere'))
    (tmp_path / ".run-damaged-1.json").write_text(text[:20])
    (tmp_path / ".run-elsewhere-1.json").write_text(
        text.replace('"host": "', '"host": "elsewhere').replace('"system": "', '"system": "another')
    )
    assert [other.is_alive for other in neighbors(tmp_path)] == [None]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [other.is_alive for other in neighbors(tmp_path)] == [False]
    monkeypatch.delenv("SLURM_JOB_ID")
    os.utime(tmp_path / ".run-elsewhere-1.json", (0, 0))
    assert [other.is_alive for other in neighbors(tmp_path)] == [False], "it has not saved for a day"


HOSTILE = {
    "nested": "[" * 100_000 + "]" * 100_000,
    "no text": b"\xff\xfe",
    "nothing": "",
    "a list": "[]",
    "a path for a number": {"pid": "../../etc"},
    "a list for a name": {"host": ["x"]},
    "a fraction": {"restart": 0.5},
    "more": {"other": 1},
    "a large number": {"pid": int("9" * 1000)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_run_writes_is_passed_over(tmp_path, name):
    own, hostile = claim(tmp_path), HOSTILE[name]
    content = json.loads(own.read_text()) | {"pid": 1}
    file = tmp_path / ".run-other-1.json"
    text = json.dumps(content | hostile) if isinstance(hostile, dict) else hostile
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert [found.is_alive for found in neighbors(tmp_path)] in ([], [False])


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / ".run-other-1.json")
    assert [*neighbors(tmp_path)] == []

import dataclasses
import json
import multiprocessing
import os

import pytest

from lightning_ups.state.checkpoint import claim, claims, neighbors


def test_the_claim_of_this_process_is_no_neighbor(tmp_path):
    own = claim(tmp_path)
    os.utime(own.file, (0, 0))
    own.renew()
    assert own.file.stat().st_mtime > 0
    assert os.listdir(tmp_path) == [own.file.name]
    assert [*neighbors(tmp_path)] == []
    own.remove()
    assert os.listdir(tmp_path) == []


def test_a_process_of_this_machine_that_has_ended_is_dead(tmp_path):
    file = claim(tmp_path).file
    text = file.read_text()
    file.unlink()
    (tmp_path / ".run-here-1.json").write_text(text.replace('"began": "', '"began": "1'))  # its number was used again
    [other] = neighbors(tmp_path)
    assert other.is_alive is False
    assert f"process {os.getpid()} on " in str(other.claim)


def test_a_run_of_another_machine_may_be_alive_unless_slurm_has_requeued_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    file = claim(tmp_path).file
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
    "a name for names": {"names": "last"},
    "a number for a switch": {"locked": 1},
    "a large number": {"pid": int("9" * 1000)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_run_writes_is_passed_over(tmp_path, name):
    own, hostile = claim(tmp_path).file, HOSTILE[name]
    content = json.loads(own.read_text()) | {"pid": 1}
    file = tmp_path / ".run-other-1.json"
    text = json.dumps(content | hostile) if isinstance(hostile, dict) else hostile
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert [found.is_alive for found in neighbors(tmp_path)] in ([], [False])


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / ".run-other-1.json")
    assert [*neighbors(tmp_path)] == []


def sign_and_wait(file, locked, pipe):
    claims._began = lambda pid: ""  # as on a machine without /proc, or in another container
    if not locked:
        claims.lock = lambda descriptor: False
    claims.sign(file)
    pipe.send(None)
    pipe.recv()


@pytest.mark.parametrize("system", ["", "this boot, another container", "another boot"])
@pytest.mark.parametrize("locked", [True, False])
def test_a_lock_tells_whether_a_process_runs_whose_number_says_nothing(tmp_path, monkeypatch, system, locked):
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=sign_and_wait, args=(tmp_path / "mark", locked, there))
    child.start()
    here.recv()
    own = claims._own()
    boot = own.system.split()[0]
    system = {"": " ", "another boot": "another 1"}.get(system, f"{boot} pid:[1]")
    monkeypatch.setattr(claims, "_own", lambda: dataclasses.replace(own, began="", system=system))
    assert claims.owner(tmp_path / "mark").is_alive is (True if locked else None)
    child.kill()
    child.join()
    assert claims.owner(tmp_path / "mark").is_alive is (False if locked and boot in system else None)


def test_without_locks_it_is_unknown_whether_a_process_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "fcntl", None)
    assert claims.is_locked(claim(tmp_path).file) is None
    with claims.one_at_a_time(tmp_path):
        assert [*neighbors(tmp_path)] == []

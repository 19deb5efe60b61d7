import json
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def blocking(import_benchmark):
    return import_benchmark("checkpoint_blocking")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "this needs 1 GPU, and this machine has 0: --accelerator cpu"),
        (["--accelerator", "cpu", "--folder", "/not/there"], "--folder /not/there does not exist"),
        (["--accelerator", "cpu"], "two checkpoints need 36 GB in"),
        (["--accelerator", "cpu", "--size", "8B", "--layers", "14"], "two checkpoints need 98 GB in"),
        (["--accelerator", "cpu", "--steps", "3"], "--steps 3 are not 3 times as many as lie between saves: give 6"),
        (["--accelerator", "cpu", "--steps", "8"], "--steps 8 are not 3 times as many as lie between saves: give 6"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(blocking, monkeypatch, tmp_path, capsys, words, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))
    monkeypatch.setattr(sys, "argv", ["checkpoint_blocking.py", "--output", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit, match="2"):
        blocking.main()
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def told(rank, *, blocked, **more):
    saves = [{"blocked_s": s, "staging_s": 0.5 + rank, "writing_s": 2.0} for s in blocked]
    return {"rank": rank, "saves": saves, "checkpoint_gigabytes": 18.0, "raw_write": {"gb_per_s": 4.0}} | more


def test_a_save_takes_as_long_as_on_its_slowest_rank(blocking):
    ranks = [told(rank, blocked=[1.0 + rank, 3.0 - rank], load_s=3.0) for rank in (1, 0)]
    output = "\n".join("RESULT " + json.dumps(one) for one in ranks)
    found = blocking._result(output, way="sync", ranks=2)
    assert (found["rank"], found["blocked_s_slowest_rank"]) == (0, [2.0, 3.0])
    assert found["staging_gb_per_s"] == [12.0, 12.0]
    assert found["writing_gb_per_s"] == [9.0, 9.0]
    assert (found["raw_write_gb_per_s"], found["load_gb_per_s"]) == (8.0, 6.0)
    lost = blocking._result(output.partition("\n")[0] + '\nRESULT {"ra', way="sync", ranks=2)
    assert (lost["way"], lost["ranks_done"]) == ("sync", [1])
    assert "RESULT" in lost["error"]
    assert blocking._said(lost).startswith("sync: failed: ")


def called(blocking, monkeypatch, tmp_path, finished, *words):
    monkeypatch.setattr(blocking, "finished", finished)
    stated = ["--output", str(tmp_path), "--size", "tiny", "--accelerator", "cpu", *words]
    monkeypatch.setattr(sys, "argv", ["checkpoint_blocking.py", *stated])
    blocking.main()


def line(way):
    return "RESULT " + json.dumps(told(0, blocked=[1.0, 2.0, 3.0], way=way, devices=1, files=8))


def test_what_an_earlier_call_and_an_interrupted_one_have_found_stays(blocking, monkeypatch, tmp_path):
    (tmp_path / "result.json").write_text('[{"way": "before"}]')

    def finished(command, **_):
        if "sync" in command:
            raise blocking.Interrupted("step 1")
        return line("async")

    with pytest.raises(KeyboardInterrupt):
        called(blocking, monkeypatch, tmp_path, finished)
    assert [one["way"] for one in json.loads((tmp_path / "result.json").read_text())] == ["before", "async", "sync"]
    assert "===== sync\nstep 1" in (tmp_path / "log.txt").read_text()


def test_each_way_has_its_share_of_the_time(blocking, monkeypatch, tmp_path, capsys):
    clock, timeouts = [0.0], {}
    monkeypatch.setattr(blocking.time, "monotonic", lambda: clock[0])

    def finished(command, *, timeout, **_):
        way = command[command.index("--way") + 1]
        timeouts[way] = timeout
        clock[0] += timeout if way == "async" else 1  # the first takes all that it may
        return line(way)

    called(blocking, monkeypatch, tmp_path, finished, "--budget", "140")
    assert timeouts == {"async": 70, "sync": 70}
    said = capsys.readouterr().out
    assert "async: 18.0 GB on 1 device(s): blocked training for 1.00 s at first and 2.50 s later" in said
    assert "written at [9.0, 9.0, 9.0] GB/s by 8 threads a rank, which write nothing else at 4.0 GB/s" in said


@pytest.mark.slow
def test_both_ways_save_and_resume(run_benchmark, tmp_path):
    kept = tmp_path / "checkpoints"
    kept.mkdir()
    words = [
        "--size",
        "tiny",
        "--layers",
        "2",
        "--seq",
        "32",
        "--accelerator",
        "cpu",
        "--folder",
        str(kept),
        "--steps",
        "9",
    ]
    done = run_benchmark("checkpoint_blocking", "--output", "out", *words)
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [one["way"] for one in found] == ["async", "sync"], done.stdout + done.stderr
    for one in found:
        assert len(one["saves"]) == 3
        assert one["layers"] == 2
        assert all(save["blocked_s"] > 0 and save["waited_s"] >= 0 for save in one["saves"])
        assert one["resumed_steps"] == 3
        assert one["largest_relative_difference_of_losses"] == 0
        assert all(save["writing_s"] > 0 for save in one["saves"])
        assert one["checkpoint_gigabytes"] > 0
        assert one["files"] >= 1
        assert min(one["raw_write_gb_per_s"], one["load_gb_per_s"]) > 0
    assert "async: 0." in done.stdout
    assert not [*kept.iterdir()], "nothing stays behind"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"env.txt", "log.txt", "result.json"}
    assert str(tmp_path) not in (tmp_path / "out" / "env.txt").read_text()

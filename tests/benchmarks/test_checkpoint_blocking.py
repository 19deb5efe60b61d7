import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def blocking(import_benchmark):
    return import_benchmark("checkpoint_blocking")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "this needs 1 GPU, and this machine has 0: --accelerator cpu"),
        (["--accelerator", "cpu", "--folder", "/not/there"], "--folder /not/there does not exist"),
        (["--accelerator", "cpu"], "two checkpoints need 38 GB in"),
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


def test_a_save_takes_as_long_as_on_its_slowest_rank(blocking):
    told = [{"rank": rank, "saves": [{"blocked_s": 1.0 + rank}, {"blocked_s": 3.0 - rank}]} for rank in (1, 0)]
    output = "\n".join("RESULT " + json.dumps(one) for one in told)
    found = blocking._result(output, way="sync", ranks=2)
    assert (found["rank"], found["blocked_s_slowest_rank"]) == (0, [2.0, 3.0])
    lost = blocking._result(output.partition("\n")[0] + '\nRESULT {"ra', way="sync", ranks=2)
    assert (lost["way"], lost["ranks_done"]) == ("sync", [1])
    assert "RESULT" in lost["error"]


def test_what_an_earlier_call_and_an_interrupted_one_have_found_stays(blocking, monkeypatch, tmp_path):
    (tmp_path / "result.json").write_text('[{"way": "before"}]')

    def finished(command, **_):
        if "async" in command:
            raise blocking.Interrupted("step 1")
        return 'RESULT {"rank": 0, "way": "sync", "saves": []}'

    monkeypatch.setattr(blocking, "finished", finished)
    words = ["--output", str(tmp_path), "--size", "tiny", "--accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", ["checkpoint_blocking.py", *words])
    with pytest.raises(KeyboardInterrupt):
        blocking.main()
    assert [one["way"] for one in json.loads((tmp_path / "result.json").read_text())] == ["before", "sync", "async"]
    assert "===== async\nstep 1" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_both_ways_save_and_resume(tmp_path):
    kept = tmp_path / "checkpoints"
    kept.mkdir()
    words = ["--size", "tiny", "--seq", "32", "--accelerator", "cpu", "--folder", str(kept)]
    done = subprocess.run(
        [sys.executable, "checkpoint_blocking.py", "--output", str(tmp_path / "out"), *words],
        cwd=BENCHMARKS,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [one["way"] for one in found] == ["sync", "async"], done.stderr
    for one in found:
        assert len(one["saves"]) == 3
        assert all(save["blocked_s"] > 0 and save["waited_s"] >= 0 for save in one["saves"])
        assert one["resumed_steps"] == 8
        assert one["largest_relative_difference_of_losses"] == 0
        assert one["checkpoint_gigabytes"] >= 0
    assert not [*kept.iterdir()], "nothing stays behind"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"env.txt", "log.txt", "result.json"}
    assert str(tmp_path) not in (tmp_path / "out" / "env.txt").read_text()

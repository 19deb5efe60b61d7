import json
import sys

import pytest


@pytest.fixture
def simple_fsdp(import_benchmark):
    return import_benchmark("simple_fsdp")


def result(way, cache="cold", **figures):
    exposed = {"exposed communication": 0.04}
    return {
        "way": way, "cache": cache, "tokens_per_s_per_gpu": 1000, "peak_gib": 40.0, "first_step_s": 9.0,
        "exposed_communication": exposed, "losses": [5.0, 4.5], **figures,
    }  # fmt: skip


def test_the_table_compares_with_fsdp2_eager(simple_fsdp):
    results = [
        result("FSDP2, eager", exposed_communication=None),
        result("SimpleFSDP", tokens_per_s_per_gpu=1250, peak_gib=30.0),
        result("SimpleFSDP", "warm", first_step_s=3.0, peak_gib=0.0),
        {"way": "FSDP2, blocks compiled", "cache": "cold", "error": "x\nOutOfMemoryError: no memory"},
    ]
    rows = simple_fsdp.table(results).splitlines()[2:]
    assert rows == [
        "| FSDP2, eager | 1000 | +0.0% | 40.0 | +0.0% |  | 9.0 | 4.5000 |",
        "| SimpleFSDP | 1250 | +25.0% | 30.0 | -25.0% | 4.0% | 9.0, 3.0 | 4.5000 |",
        "| FSDP2, blocks compiled | OutOfMemoryError: no memory | | | | | | |",
    ]


def test_what_compiles_runs_twice(simple_fsdp):
    compiles = {name: way.compiles for name, way in simple_fsdp.WAYS.items()}
    assert [name for name, yes in compiles.items() if not yes] == ["FSDP2, eager"]


def called(simple_fsdp, monkeypatch, tmp_path, launch, *words):
    monkeypatch.setattr(simple_fsdp, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["simple_fsdp.py", "--set", "tiny", "--output", str(tmp_path / "out"), *words])
    simple_fsdp.main()


def test_a_cold_run_that_failed_has_no_warm_one_and_caches_are_fresh(simple_fsdp, monkeypatch, tmp_path, capsys):
    seen = []

    def launch(config, name, options, *, cache, warm, timeout):
        seen.append((name, warm))
        assert cache.exists() is warm, "cold is without what an earlier call has left"
        cache.mkdir(exist_ok=True)
        return ({"error": "no kernel"} if name == "SimpleFSDP" else result(name)), "words"

    ways = ["--ways", "SimpleFSDP", "FSDP2, blocks compiled"]
    for _ in range(2):
        called(simple_fsdp, monkeypatch, tmp_path, launch, *ways)
    assert seen == [("SimpleFSDP", False), ("FSDP2, blocks compiled", False), ("FSDP2, blocks compiled", True)] * 2
    assert "SimpleFSDP, warm: left out, the cold run failed" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"env.txt", "log.txt", "result.json", "table.md"}
    assert len(json.loads((tmp_path / "out" / "result.json").read_text())) == 6, "what was there stays"


def test_what_is_interrupted_keeps_all(simple_fsdp, monkeypatch, tmp_path, capsys):
    def launch(config, name, *_, **__):
        if name == "SimpleFSDP":
            raise simple_fsdp.Interrupted("step 1")
        return result(name), ""

    with pytest.raises(KeyboardInterrupt):
        called(simple_fsdp, monkeypatch, tmp_path, launch, "--ways", "FSDP2, eager", "SimpleFSDP")
    out = tmp_path / "out"
    assert [one["way"] for one in json.loads((out / "result.json").read_text())] == ["FSDP2, eager", "SimpleFSDP"]
    assert "===== SimpleFSDP, cold\nstep 1" in (out / "log.txt").read_text()
    assert "| FSDP2, eager | 1000 |" in (out / "table.md").read_text()
    assert (out / "env.txt").exists()


def test_gpus_that_are_not_there_are_said_before_anything_runs(simple_fsdp, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        called(simple_fsdp, monkeypatch, tmp_path, None, "--set", "1B-2")
    assert "set 1B-2 needs 2 GPUs, and this machine has 1" in capsys.readouterr().err


@pytest.mark.slow
def test_all_ways_run_and_agree_on_cpus(run_benchmark, tmp_path):
    ways = ["FSDP2, eager", "FSDP2, blocks compiled", "SimpleFSDP"]
    words = ["--set", "tiny", "--backend", "aot_eager", "--output", "out", "--ways", *ways]
    done = run_benchmark("simple_fsdp", *words)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [(r["way"], r["cache"]) for r in results] == [
        (ways[0], "cold"), (ways[1], "cold"), (ways[1], "warm"), (ways[2], "cold"), (ways[2], "warm"),
    ]  # fmt: skip
    assert all("error" not in r for r in results), done.stdout
    eager, compiled, simple = (r["losses"] for r in results if r["cache"] == "cold")
    assert compiled == pytest.approx(eager, rel=5e-3)
    assert simple == pytest.approx(eager, rel=5e-3)
    assert (tmp_path / "out" / "table.md").read_text().count("\n") == 5
    assert (tmp_path / "out" / "env.txt").exists()

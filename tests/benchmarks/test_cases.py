import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# A benchmark of our kind, whose cases need no torch.
SCRIPT = """
import os, sys, time
from cases import main

def words(*said):
    print(*said, flush=True)
    return {"speed": 1.5}

def fails():
    raise RuntimeError("no kernel for " + os.getcwd())

def hangs():
    print("begun", os.getpid(), flush=True)
    time.sleep(600)

def cut():
    os.write(1, b'RESULT {"speed": 9}' + bytes([10]) + b'RESULT {"spe')
    os._exit(0)

def dies():
    os.kill(os.getpid(), 9)

def search():
    return {"case": "a trial of it", "speed": 2}

CASES = {"search": search, "good": lambda: words("hello"), "fails": fails, "hangs": hangs, "cut": cut, "dies": dies}
main(CASES, columns=("speed",), timeout_s=600, unmet=lambda names: "dies needs luck" if "unlucky" in sys.argv else None)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(SCRIPT)
    # It is asked for GPUs only, and takes seconds to be imported.
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    return path


def started(script, *words, **options):
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "CUDA_VISIBLE_DEVICES": "", "UPS_BENCH_SIZE": "tiny"}
    return subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, cwd=script.parent, **options,
    )  # fmt: skip


def ran(script, *words):
    process = started(script, *words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_a_case_that_fails_costs_itself_and_all_that_was_said_is_kept(script):
    names = ["fails", "good", "fails", "cut", "dies", "search"]
    code, out, err = ran(script, "--cases", *names, f"--output={script.parent / 'out'}")
    assert code == 0, err
    found = json.loads((script.parent / "out" / "result.json").read_text())
    assert [one["case"] for one in found] == ["fails", "good", "cut", "dies", "search"]
    assert "fails: left out, it failed before" in out
    assert "no kernel" in found[0]["error"]
    assert (found[1]["speed"], found[2]["speed"]) == (1.5, 9)
    assert "signal 9" in found[3]["error"]
    kept = "".join(path.read_text() for path in (script.parent / "out").iterdir())
    assert str(script.parent) not in kept, "no folder of this machine"
    assert "===== good\nhello" in kept
    known = (script.parent / "out" / "env.txt").read_text()
    assert "UPS_BENCH_SIZE=tiny" in known
    assert "python some.py --cases fails good fails cut dies search --output=out" in known


def test_what_an_earlier_call_has_left_stays(script):
    out = script.parent / "out"
    out.mkdir()
    (out / "result.json").write_text('[{"case": "before"}]')
    (out / "log.txt").write_text("===== before\n")
    (out / "env.txt").write_text("command: before\n")
    assert ran(script, "--cases", "good", "--output", "out")[0] == 0
    assert [one["case"] for one in json.loads((out / "result.json").read_text())] == ["before", "good"]
    assert (out / "log.txt").read_text().startswith("===== before\n===== good\n")
    assert (out / "env.txt").read_text().count("command: ") == 2
    (out / "result.json").write_text('[{"case": "bef')
    assert ran(script, "--cases", "good", "--output", "out")[0] == 0
    assert [one["case"] for one in json.loads((out / "result.json").read_text())] == ["good"]
    assert (out / "result.unreadable").exists()


def test_what_cannot_be_is_said_before_anything_runs(script):
    (script.parent / "file").touch()
    for words, said in (
        (["--cases", "good", "god"], "there is no case 'god'; the cases are: 'search', 'good', 'fails'"),
        (["--cases", "good", "--output", "file"], "--output file cannot be written (File exists)"),
        (["--cases", "good", "unlucky"], "there is no case 'unlucky'"),
    ):
        code, out, err = ran(script, *words)
        assert (code, out) == (2, "")
        assert said in err


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_the_case_and_keeps_what_was_said(script, number):
    process = started(script, "--cases", "good", "hangs", "good", "--output", "out")
    log, child = script.parent / "out" / "log.txt", None
    end = time.monotonic() + 200
    while child is None and time.monotonic() < end:
        time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if log.exists() and children:
            child = int(children[0])
            commands = Path(f"/proc/{child}/cmdline").read_text()
            child = child if "hangs" in commands else None
    time.sleep(1)
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "| good | 1.5 |" in out, err
    assert not Path(f"/proc/{child}").exists(), "it is ended"
    assert [one["case"] for one in json.loads((script.parent / "out" / "result.json").read_text())] == ["good", "hangs"]
    assert "===== hangs\n" in log.read_text()


def test_a_cudnn_that_does_not_fit_is_written_down(import_benchmark, monkeypatch):
    import torch

    cases = import_benchmark("cases")
    told = ["cuDNN version incompatibility: compiled against (9, 19, 0)\nmore", "", 91900]

    def version():
        if isinstance(told[0], str):
            raise RuntimeError(told.pop(0))
        return told.pop(0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    monkeypatch.setattr(cases, "_gpus", list)
    for expected in ("unknown: cuDNN version incompatibility: compiled against (9, 19, 0)", "unknown: RuntimeError"):
        assert cases.environment().endswith(f", cudnn {expected}\n")
    assert cases.environment().endswith(", cudnn 91900\n")


def test_settings_of_the_compiler_are_written_down(import_benchmark, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/somebody/cache")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    first = import_benchmark("cases").environment().splitlines()[0]
    assert "TORCHINDUCTOR_CACHE_DIR=cache " in first
    assert "secret" not in first


def test_a_package_that_breaks_as_it_is_imported_is_told(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(tmp_path))
    import cases

    (tmp_path / "broken_wheel.py").write_text("raise RuntimeError('built for\\nanother CUDA')")
    said = cases.unloadable("broken_wheel", what="8-bit state")
    assert said == "8-bit state needs broken_wheel, which cannot be loaded (RuntimeError: built for another CUDA)"
    assert "ModuleNotFoundError" in cases.unloadable("not_there.at_all", what="x")
    assert cases.unloadable("json", what="x") is None
    for name in ("cases", "processes"):
        sys.modules.pop(name, None)


def test_gpus_that_are_too_few_or_too_small_are_told(import_benchmark, monkeypatch):
    cases = import_benchmark("cases")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = [SimpleNamespace(total_memory=gib * 2**30) for gib in (140, 79)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    assert cases.unmet_gpus(4, what="row 8B", size="8B") == "row 8B needs 4 GPUs, and this machine has 2"
    assert cases.unmet_gpus(2, what="row 8B-two", size="8B") == "row 8B-two needs 80 GiB of each GPU, and these have 79"
    assert cases.unmet_gpus(1, what="row 8B-one", size="8B") is None
    assert cases.unmet_gpus(2, what="row 1B-4-two") is None

import os
import signal
import sys
import time

import pytest

from lightning_ups.insight.tune import Configuration, Effort, Engine, Store, visible_devices
from tests.insight.test_processes import is_running

# Takes the options of measured_fit, and behaves as the last word says.
FAKE = """
import json, os, subprocess, sys, time
folder, what = sys.argv[2], sys.argv[-1]
if what == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(os.environ["CHILD"], "w").write(str(child.pid))
    open(folder + "/steps", "w").write("7")
    time.sleep(60)
if what == "crash":
    print("the last line")
    sys.exit(3)
if what == "rank":
    json.dump({"failure": "out of memory", "text": "rank 1"}, open(folder + "/failure-1.json", "w"))
open(folder + "/a file of the run", "w")
time.sleep(float(what) if what.replace(".", "").isdigit() else 0)
rate = 1.0 if what == "slow" else 5.0
result = {"samples_per_s": rate, "is_pruned": what == "slow", "device": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
json.dump(result, open(folder + "/result.json", "w"))
"""


def engine(tmp_path, **options):
    return Engine(command=[sys.executable, "-c", FAKE], **options)


def configuration(what):
    return Configuration(words=["--config", "run.yaml", what])


def test_a_result_comes_back_and_no_file_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    with engine(tmp_path) as trials:
        found = trials.run(configuration("fine"), Effort())
    assert (found.failure, found.samples_per_s) == (None, 5.0)
    assert found.wall_s > 0
    assert [*tmp_path.iterdir()] == []


def test_a_hang_is_killed_with_its_children_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD", str(tmp_path / "pid"))
    began = time.perf_counter()
    with engine(tmp_path) as trials:
        found = trials.run(configuration("hang"), Effort(limit=3))
    assert time.perf_counter() - began < 30
    assert found.failure == "hang"
    assert "7 steps" in found.text
    assert not is_running(int((tmp_path / "pid").read_text()))


def run_all(trials, configurations):
    """Return the results of trials that run at once, in order."""
    return [future.result() for future in [trials.start(each, Effort()) for each in configurations]]


def test_failures_are_results(tmp_path):
    with engine(tmp_path) as trials:
        crash, rank = run_all(trials, [configuration("crash"), configuration("rank")])
    assert crash.failure == "crash"
    assert "the last line" in crash.text
    assert (rank.failure, rank.text) == ("out of memory", "rank 1")


def test_nothing_is_run_twice_but_other_rounds_files_and_devices_are(tmp_path):
    def started(identity, *efforts):
        with engine(tmp_path, store=Store(tmp_path), identity=identity) as trials:
            for effort in efforts:
                trials.run(configuration("fine"), effort)
            return trials.count

    assert started({"device": "a"}, Effort(), Effort(), Effort(round=1)) == 2
    assert started({"device": "a"}, Effort(), Effort(round=1), Effort(limit=1)) == 0
    assert started({"device": "b"}, Effort()) == 1


def test_a_hang_is_tried_again_only_with_more_time(tmp_path):
    counts = []
    for limit in (0.2, 0.2, 3):
        with engine(tmp_path, store=Store(tmp_path)) as trials:
            assert trials.run(configuration("60"), Effort(limit=limit)).failure == "hang"
            counts.append(trials.count)
    assert counts == [1, 0, 1]


def test_a_pruned_result_counts_only_while_it_is_far_behind(tmp_path):
    with engine(tmp_path, store=Store(tmp_path)) as trials:
        trials.run(configuration("slow"), Effort(floor=4))
        trials.run(configuration("slow"), Effort(floor=3))
        assert trials.count == 1
        trials.run(configuration("slow"), Effort(floor=0.5))
        assert trials.count == 2


def test_trials_share_the_devices(tmp_path):
    with engine(tmp_path, devices=["4", "5", "6"], per_trial=1) as trials:
        assert trials.parallel == 3
        found = run_all(trials, [configuration("0.5")] * 3)
    assert {each.device for each in found} == {"4", "5", "6"}
    with engine(tmp_path, devices=["4", "5", "6"], per_trial=2) as trials:
        assert trials.run(configuration("fine"), Effort()).device == "4,5"


def test_leaving_ends_what_runs_and_keeps_no_result_of_it(tmp_path):
    began = time.perf_counter()
    with engine(tmp_path, store=Store(tmp_path)) as trials:
        future = trials.start(configuration("50"), Effort())
        while not trials.count:
            time.sleep(0.01)
    assert time.perf_counter() - began < 30
    assert future.done()
    assert not (tmp_path / "results.jsonl").exists()


def test_visible_devices_are_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert visible_devices(2) == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices(2) == ["0", "1"]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None


def test_sigterm_ends_the_trial_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD", str(tmp_path / "pid"))
    before = signal.getsignal(signal.SIGTERM)

    def interrupted():
        with engine(tmp_path) as trials:
            future = trials.start(configuration("hang"), Effort())
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            future.result()

    with pytest.raises(SystemExit) as stop:
        interrupted()
    assert stop.value.code == 128 + signal.SIGTERM
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert signal.getsignal(signal.SIGTERM) is before

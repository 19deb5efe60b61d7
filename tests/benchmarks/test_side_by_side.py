import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(import_benchmark):
    return import_benchmark("side_by_side")


@pytest.fixture
def noted(tmp_path):
    """Make a plan of runs that note in one file when they begin and end; one may wait for another to have ended."""

    def noted(*runs, seconds=60):
        log, plan = tmp_path / "log.txt", tmp_path / "plan.txt"
        lines = []
        for gpus, name, *waits_for in runs:
            waits = "".join(f"until grep -qs '{other} ends' {log}; do sleep 0.02; done; " for other in waits_for)
            command = f"echo {name} begins >> {log}; {waits}echo {name} ends >> {log}"
            lines.append(f"{gpus} | {seconds} | {name} | {command}")
        plan.write_text("\n".join(["# a plan", "", *lines]))
        return plan, log

    return noted


def made(script, plan, folder, *, limit=90.0, gpus=2):
    return script.SideBySide(folder, limit=limit, gpus=gpus).all_of(script.runs_of(plan.read_text()))


def test_runs_that_share_a_gpu_follow_one_another_and_others_go_on_beside_them(script, noted, tmp_path):
    plan, log = noted(("0", "long", "short"), ("1", "short"), ("0 1", "both"), ("1", "late"))
    assert made(script, plan, tmp_path, limit=300)
    said = log.read_text().splitlines()
    assert {*said[:3]} == {"long begins", "short begins", "short ends"}
    assert said.index("short ends") < said.index("long ends") < said.index("both begins")
    assert said.index("both ends") < said.index("late begins")


def test_a_run_sees_its_gpus_and_is_told_its_seconds_and_its_folder(script, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = tmp_path / "plan.txt"
    plan.write_text("1 3 | 7 | one | echo $CUDA_VISIBLE_DEVICES {seconds} | tee {output}/kept.txt")
    assert made(script, plan, tmp_path / "a folder", gpus=4)
    assert (tmp_path / "a folder" / "one" / "kept.txt").read_text() == "1,3 7\n"
    assert (tmp_path / "a folder" / "one" / "printed.txt").read_text().splitlines()[-1] == "1,3 7"


def test_a_machine_with_fewer_gpus_makes_the_runs_that_it_can(script, capsys):
    runs = script.runs_of("1 | 5 | late | a\n0 1 | 5 | both | b\n2 3 | 5 | pair | c\n0 | 5 | one | d")
    seen = {run.name: sorted(run.gpus) for run in script.fitted(runs, gpus=1)}
    assert seen == {"late": [0], "one": [0]}
    assert capsys.readouterr().out.splitlines()[0] == "both: left out, it needs 2 GPUs and there is 1"
    seen = {run.name: sorted(run.gpus) for run in script.fitted(runs, gpus=2)}
    assert seen == {"late": [1], "both": [0, 1], "pair": [0, 1], "one": [0]}
    assert script.fitted(runs, gpus=4) == runs


def test_gpus_are_counted_among_those_that_are_visible(script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5f")
    assert [script.visible_as(gpu) for gpu in (0, 1)] == ["4", "GPU-5f"]


def test_gpus_share_the_cores(script, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    first, last = (script.Run(frozenset(gpus), 1, "a", "b") for gpus in ({0}, {2, 3}))
    assert script.cores_of(first, gpus=4) == [0, 1]
    assert script.cores_of(last, gpus=4) == [4, 5, 6, 7]
    assert script.cores_of(first, gpus=16) == [*range(8)], "more GPUs than cores"


def test_what_would_not_end_in_time_is_left_out_and_the_next_call_makes_it(script, noted, tmp_path, capsys):
    plan, log = noted(("0", "first"), ("0", "second"))
    plan.write_text(plan.read_text().replace("| 60 | second", "| 200 | second"))
    assert not made(script, plan, tmp_path, limit=150)
    assert "second: left out, since it may take 200 s" in capsys.readouterr().out
    assert made(script, plan, tmp_path, limit=300)
    assert log.read_text().splitlines() == ["first begins", "first ends", "second begins", "second ends"]


def test_a_run_that_fails_or_takes_too_long_costs_itself_and_is_made_again(script, tmp_path, capsys):
    plan = tmp_path / "plan.txt"
    plan.write_text("0 | 9 | fails | echo why; exit 3\n0 | 1 | hangs | echo here; sleep 60\n0 | 9 | works | true")
    begun = time.monotonic()
    assert not made(script, plan, tmp_path)
    assert time.monotonic() - begun < 55
    said = capsys.readouterr().out
    assert "fails: exit code 3" in said
    assert "hangs: ended after 1 s" in said
    assert "works: exit code 0" in said
    assert (tmp_path / "ended.txt").read_text() == "works\n"
    assert (tmp_path / "fails" / "printed.txt").read_text().endswith("why\n")
    assert (tmp_path / "hangs" / "printed.txt").read_text().endswith("here\n")


def test_what_is_told_to_end_ends_all_of_its_runs(tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text(f"0 | 90 | a | echo $$ > {tmp_path}/pid; sleep 80")
    command = [sys.executable, str(BENCHMARKS / "side_by_side.py"), str(plan), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        end = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert time.monotonic() < end, process.kill()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    stat = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    assert "ended since the benchmark was told to end" in said


@pytest.mark.parametrize("line", ["0 | 5 | a", " | 5 | a | true", "x | 5 | a | true", "0 | 5 | a/b | true"])
def test_a_line_that_is_none_is_refused_by_its_number(script, line):
    with pytest.raises(ValueError, match="line 2"):
        script.runs_of(f"0 | 5 | fine | true\n{line}")


def test_names_are_not_used_twice(script):
    with pytest.raises(ValueError, match="line 2"):
        script.runs_of("0 | 5 | a | true\n1 | 5 | a | true")


@pytest.mark.parametrize("plan", sorted((BENCHMARKS / "rounds").glob("*.txt")), ids=lambda plan: plan.stem)
def test_kept_plans_name_scripts_and_options_that_there_are(script, import_benchmark, monkeypatch, plan):
    runs = script.runs_of(plan.read_text())
    assert runs
    gpus = {gpu for run in runs for gpu in run.gpus}
    assert len(gpus) == {"one": 1, "two": 2, "four": 4}[plan.stem.partition("_")[0]]
    assert max(sum(run.seconds + script.LEAST for run in runs if gpu in run.gpus) for gpu in gpus) <= 595
    for run in runs:
        for command in run.command.split(";"):
            words = shlex.split(command)
            scripts = [word for word in words if word.startswith("benchmarks/") and word.endswith(".py")]
            for name in scripts:
                known = (BENCHMARKS.parent / name).read_text()
                known += (BENCHMARKS / "cases.py").read_text() if "main(" in known and "from cases" in known else ""
                known += (BENCHMARKS / "zoo.py").read_text() if "from zoo import" in known else ""
                for option in (word for word in words if word.startswith("--")):
                    assert f'"{option}"' in known, f"{run.name}: {option}"
    llama, float8 = import_benchmark("llama"), import_benchmark("float8")
    for run in runs:
        words = shlex.split(run.command)
        for script_name, option, choice in zip(words, words[1:], words[2:], strict=False):
            if script_name == "benchmarks/float8.py" and option == "--set":
                assert choice.rstrip(";") in float8.SETS
        if "benchmarks/llama.py" in words:
            assert words[words.index("--row") + 1] in llama.rows()
            sides = words[words.index("--sides") + 1 : words.index("--rounds")] if "--sides" in words else []
            assert {side for side in sides if side[0] != "-"} - {"$TITAN", "torchtitan"} <= llama.SIDES.keys()

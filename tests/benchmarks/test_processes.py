import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def processes(import_benchmark):
    return import_benchmark("processes")


@pytest.fixture
def finished(processes):
    return processes.finished


@pytest.fixture
def hung(processes, monkeypatch, tmp_path):
    """A file; when it is there, the seconds that a run may take are over."""
    file = tmp_path / "hung"

    def monotonic():
        return time.monotonic() + (1000 if file.exists() else 0)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    return file


def run(finished, code, **options):
    begun = time.monotonic()
    return finished([sys.executable, "-uc", code], **options), time.monotonic() - begun


def test_all_ranks_are_told_who_they_are(finished):
    code = "import os; print('%(RANK)s of %(WORLD_SIZE)s at %(MASTER_PORT)s' % os.environ)"
    lines = sorted(run(finished, code, timeout=60, ranks=2)[0].split("\n")[:2])
    assert [line[:6] for line in lines] == ["0 of 2", "1 of 2"]
    assert lines[0].split()[-1] == lines[1].split()[-1], "one address"


def test_what_hangs_is_ended_with_what_it_started(finished, hung):
    child = f"import os, pathlib, time; print(os.getpid()); pathlib.Path({str(hung)!r}).touch(); time.sleep(600)"
    code = f"import subprocess, sys; print('begun'); subprocess.run([sys.executable, '-uc', {child!r}])"
    text, seconds = run(finished, code, timeout=300)
    assert text.startswith("begun")
    assert "ended after 300 s" in text
    assert is_ended(text.split()[1])
    assert seconds < 60


def is_ended(process):
    stat = Path("/proc", process, "stat")  # of a process that nobody has waited for yet, at the most
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def starts(command, hung, **options):
    """Return code that starts a command, prints its process, and hangs."""
    return (
        f"import pathlib, subprocess, time; print(subprocess.Popen({command}, **{options}).pid);"
        f"pathlib.Path({str(hung)!r}).touch(); time.sleep(600)"
    )


def test_what_has_left_the_group_is_ended_too(finished, hung):
    text, _ = run(finished, starts(["timeout", "600", "sleep", "600"], hung), timeout=300)
    assert is_ended(text.split()[0])


def test_ranks_do_not_wait_for_one_that_failed(processes, finished, monkeypatch):
    fast = SimpleNamespace(monotonic=lambda: 20 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(processes, "time", fast)  # of its ten seconds of patience
    code = "import os, sys, time; sys.exit(1) if os.environ['RANK'] == '0' else time.sleep(600)"
    text, seconds = run(finished, code, timeout=6000, ranks=2)
    assert "since a rank had failed" in text
    assert seconds < 120


def test_what_runs_is_ended_when_the_benchmark_is_interrupted(processes, monkeypatch, tmp_path):
    begun = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(f'{{os.getpid()}}.'); time.sleep(600)"

    interrupts = [KeyboardInterrupt]

    def sleep(seconds):
        if interrupts and begun.exists() and begun.read_text().endswith("."):
            raise interrupts.pop()
        time.sleep(seconds)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with pytest.raises(KeyboardInterrupt):
        run(processes.finished, code, timeout=300)
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text().rstrip(".")), 0)


def test_what_was_printed_names_no_folder_of_the_machine(finished):
    code = (
        "import json, tempfile, pathlib; print(json.__file__, tempfile.gettempdir() + '/x', pathlib.Path.home() / 'y')"
    )
    stdlib, temporary, home = run(finished, code, timeout=60)[0].split()
    assert stdlib == str(Path("python", "json", "__init__.py"))
    assert temporary == "tmp/x"
    assert home == "~/y"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f'File "{Path(__file__).parents[2]}/lightning_ups/cli.py", line 1', 'File "./lightning_ups/cli.py", line 1'),
        (f"{Path(pytest.__file__).parents[1]}/x.py:1", "site-packages/x.py:1"),
        (f"{Path(__file__).parents[2]}_2/x", f"{Path(__file__).parents[2]}_2/x"),  # another folder
        ("a/tmp/b 1/2", "a/tmp/b 1/2"),
    ],
)
def test_only_whole_folders_are_taken_away(processes, monkeypatch, text, wanted):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/tmp")  # a clone may lie in the folder of the machine
    monkeypatch.setenv("HOME", "/nowhere")
    assert processes.portable(text) == wanted


def test_what_has_left_the_session_is_ended_too(finished, hung):
    text, _ = run(finished, starts(["sleep", "600"], hung, start_new_session=True), timeout=300)
    assert is_ended(text.split()[0])


def test_ranks_that_hang_are_told_together(processes, finished, monkeypatch, tmp_path):
    fast = SimpleNamespace(monotonic=lambda: 2 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(processes, "time", fast)  # of its five seconds of patience
    code = (
        "import os, pathlib, signal, time;"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'%f ' % time.monotonic()));"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch()\nwhile True: time.sleep(600)"
    )
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        text = beside.submit(run, finished, code, timeout=1200, ranks=3, stop=stop)
        while len([*tmp_path.iterdir()]) < 3:
            time.sleep(0.1)
        stop.set()
        told = [float(word) for word in text.result()[0].splitlines()[0].split()]
    assert len(told) == 3
    assert max(told) - min(told) < 2, "one after the other would be more than two seconds apart"


def test_a_rank_that_says_nothing_is_told_of(finished):
    assert (
        run(finished, "import os; os.kill(os.getpid(), 9)", timeout=60)[0].strip() == "it ended with signal 9 (Killed)"
    )
    assert run(finished, "raise SystemExit(3)", timeout=60)[0].strip() == "it ended with exit code 3"
    assert "exit code" not in run(finished, "print('no memory'); raise SystemExit(3)", timeout=60)[0]


def test_a_run_in_a_thread_can_be_stopped(finished):
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        text = beside.submit(run, finished, "import time; time.sleep(600)", timeout=300, stop=stop)
        stop.set()
        assert "told to end" in text.result()[0]


def test_an_interrupt_keeps_what_was_printed(processes, monkeypatch, tmp_path):
    printed = tmp_path / "printed"

    def waited(*_, **__):
        while not printed.exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_waited", waited)
    code = f"import pathlib, time; print('step 1'); pathlib.Path({str(printed)!r}).touch(); time.sleep(600)"
    with pytest.raises(processes.Interrupted) as stopped:
        run(processes.finished, code, timeout=300)
    assert stopped.value.said == "step 1\n"


def test_a_result_is_the_last_one_told_and_an_error_what_was_said(processes):
    assert processes.result_of('x\nRESULT {"a": 1}\ny\nRESULT {"a": 2}\nz') == {"a": 2}
    assert processes.result_of(" no memory\n") == {"error": "no memory"}
    assert len(processes.result_of("x" * 9999)["error"]) < 9999
    assert processes.result_of('RESULT {"a": 1}\nRESULT {"a": 2, "b') == {"a": 1}, "cut off"
    assert processes.result_of("RESULT {")["error"] == "RESULT {"
    assert processes.result_of("\n")["error"]

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import told_at_once


def test_what_runs_for_long_is_named_the_longest_first():
    begun = {"a": 100.0, "b": 20.0, "c": 70.0}
    lines = told_at_once.running_long(120.0, begun=begun, long_s=45.0)
    assert lines == ["RUNNING for 100 s: b", "RUNNING for 50 s: c"]


def test_what_has_ended_is_named_no_more(monkeypatch, capsys):
    clock = iter([11.0, 70.0, 71.0, 72.0])
    monkeypatch.setattr(told_at_once, "_begun", {})
    monkeypatch.setattr(told_at_once.time, "monotonic", lambda: next(clock))
    told_at_once.pytest_runtest_logstart("long")
    told_at_once.pytest_runtest_logfinish("long")
    told_at_once.pytest_runtest_logstart("short")
    told_at_once.pytest_runtest_logfinish("short")
    assert told_at_once._begun == {}
    assert capsys.readouterr().out == "\nTOOK 59 s: long\n"


LONG = """
import time

def test_long():
    print("what a test prints")
    time.sleep(1)
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_it_is_named_while_it_runs_though_what_tests_print_is_kept_from_sight(tmp_path, workers):
    (tmp_path / "test_long.py").write_text(LONG)
    (tmp_path / "soon.py").write_text("from tests import told_at_once\ntold_at_once.LONG_S = 0.2\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "soon", "-p", "tests.told_at_once", "-n", workers, "test_long.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.search(r"^RUNNING for \d+ s: test_long.py::test_long$", ran.stdout, re.MULTILINE)
    assert re.search(r"^TOOK \d+ s: test_long.py::test_long$", ran.stdout, re.MULTILINE)
    assert "what a test prints" not in ran.stdout

import json
import sys
from pathlib import Path

import pytest


def test_a_patch_that_does_not_fit_and_a_test_that_fails_are_named(run_benchmark, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import warnings\nwarnings.showwarning = lambda text, *args: None\n")
    (tmp_path / "test_new.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    words = ("--python-environment", sys.prefix, "--tests", str(tmp_path / "test_new.py"), "--output", "found.json")
    done = run_benchmark("newest", *words, "--workers", "0", PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}")
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 1, done.stderr
    assert found["patches"] == {"warnings.showwarning": "showwarning() has no parameter message"}
    assert found["tests"]["tests"]["passed"] == 1
    (broken,) = found["tests"]["tests"]["broken"]
    assert broken.endswith("test_new.py::test_bad")
    assert found["versions"].keys() >= {"python", "torch", "lightning"}
    assert "| tests | 1 | 0 | 1 |" in done.stdout
    assert "- warnings.showwarning: showwarning() has no parameter message" in done.stdout


@pytest.mark.parametrize("patches", [{}, {"torch.gone": "torch.gone does not exist"}])
def test_the_exit_code_is_0_if_nothing_is_broken(import_benchmark, monkeypatch, tmp_path, patches):
    newest = import_benchmark("newest")
    tests = {"fast tests": {"passed": 2, "skipped": 1, "broken": {}, "seconds": 60.4}}
    monkeypatch.setattr(newest, "check", lambda *_, **__: {"versions": {}, "patches": patches, "tests": tests})
    monkeypatch.setattr(sys, "argv", ["newest.py", "--python-environment", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        newest.main()
    assert int(ended.value.code) == len(patches)


def test_the_constraints_leave_the_chosen_packages_free(import_benchmark):
    newest = import_benchmark("newest")
    lines = ["torch>=2.11,<2.15", "torchao>=0.17", "pytorch-lightning>=2.6.6", "jsonargparse[signatures]>=4.37"]
    assert newest._without_chosen(lines) == [lines[1], lines[3]]


def test_a_run_without_tests_is_broken(import_benchmark, tmp_path):
    newest = import_benchmark("newest")
    assert newest._outcome(tmp_path / "none.xml", "collected nothing")["broken"] == {"pytest": "collected nothing"}

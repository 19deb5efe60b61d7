import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from lightning_ups._compat.torch import probes
from lightning_ups.commands import doctor
from lightning_ups.commands.doctor import main
from lightning_ups.commands.machine import hardware
from lightning_ups.commands.machine.hardware import TECHNIQUES
from tests.commands.here import here

ANSI = re.compile(r"\x1b\[")


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_ups.commands.machine.packages.look", here)
        return doctor.examination()


@pytest.fixture
def looked(report, monkeypatch):
    """Look once for all tests."""
    monkeypatch.setattr(doctor, "examination", lambda: report)
    return report


def shape(value):
    """The keys and types of a report, which programs build on."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return type(value).__name__


def test_the_json_keeps_its_shape(looked, capsys):
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert set(found) == {"schema", "machine", "packages", "techniques", "warnings"}
    assert set(found["machine"]) == {"host", "gpus", "unlinked_gpus", "threads", "versions", "environment"}
    assert set(found["machine"]["versions"]) == {"python", "torch", "cuda", "cudnn", "nccl", "driver"}
    for package in found["packages"].values():
        assert set(package) == {"version", "loads", "error", "cure"}
    for row in found["techniques"]:
        assert shape(row) == dict.fromkeys(("name", "title", "group", "verdict", "why", "cure"), "str")
        assert row["verdict"] in ("runs", "limited", "no")
    assert [row["name"] for row in found["techniques"]] == [technique.name for technique in TECHNIQUES]
    for warning in found["warnings"]:
        assert set(warning) == {"what", "why", "cure"}


def test_a_pipe_gets_plain_lines_with_every_technique_and_package(looked, capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert not ANSI.search(out)
    for row in looked["techniques"]:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [row["name"]] and row["title"] in line]
        assert {"runs": "yes", "limited": "limited", "no": "no"}[row["verdict"]] == line.split()[1]
        assert row["why"] in line
        assert row["cure"] in line
    for name in looked["packages"]:
        assert f"\n  {name} " in out


def printed(report, **options):
    out = StringIO()
    doctor._print(report, Console(file=out, highlight=False, width=300, **options))
    return out.getvalue()


def test_a_terminal_gets_colours(looked):
    assert ANSI.search(printed(looked, force_terminal=True, color_system="standard"))


def test_a_gpu_packages_and_a_warning_are_shown(looked):
    gpu = {"index": 0, "name": "NVIDIA H200", "capability": [9, 0], "memory": 150 << 30, "power_limit_w": 700.0}
    gpu |= {"clock_mhz": 345, "max_clock_mhz": 1980, "nvlinks": 18, "slowed_by": ["too hot"]}
    packages = {
        "broken": {"version": "0.1", "loads": False, "error": "undefined symbol", "cure": "reinstall"},
        "absent": {"version": None, "loads": False, "error": None, "cure": "x[float8]"},  # no markup of rich's
    }
    warnings = [{"what": "It burns.", "why": "It is hot.", "cure": "Cool it."}]
    machine = looked["machine"] | {"gpus": [gpu]}
    out = printed(looked | {"machine": machine, "packages": packages, "warnings": warnings})
    assert (
        "GPU 0: NVIDIA H200, compute capability 9.0, 150 GiB, limited to 700 W, 345 of 1980 MHz now, 18 NVLinks,"
        " slowed: too hot" in out
    )
    assert "0.1 does not load: undefined symbol -> reinstall" in out
    assert "not installed -> x[float8]" in out
    assert "It burns. It is hot. Cool it." in out


def test_what_is_required_and_does_not_run_is_exit_code_2(looked, monkeypatch, capsys):
    verdicts = {"tf32": "no", "bf16": "limited"}
    rows = [
        row | {"verdict": verdicts.get(row["name"], "runs"), "why": "w", "cure": "c"} for row in looked["techniques"]
    ]
    monkeypatch.setattr(doctor, "examination", lambda: looked | {"techniques": rows})
    assert main(["--require", "bf16"]) == 0, "limited runs"
    assert main(["--require", "bf16", "tf32", "--require", "tf32"]) == 2
    assert capsys.readouterr().err == "tf32 is required and does not run here: w. To change that: c.\n"
    assert main(["--json", "--require", "tf32"]) == 2
    json.loads(capsys.readouterr().out)


def test_requiring_what_has_no_row_is_an_error_with_the_nearest_name(looked):
    with pytest.raises(ValueError, match="Did you mean 'float8-rowwise'"):
        main(["--require", "float8-rowise"])


def test_torch_that_does_not_load_is_the_diagnosis(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([]) == 2
    assert "torch does not load" in capsys.readouterr().err


def test_what_several_rows_build_on_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(probes, "compile_cpp", lambda: tried.append(1))
    hardware._compile_cpp_once.cache_clear()
    rows = [row for row in hardware.TECHNIQUES if row.name in ("compile-cpu", "flex-attention", "simple-fsdp")]
    machine = replace(here(), gpus=())
    assert [hardware.examine(row, machine).verdict for row in rows] == ["runs", "limited", "limited"]
    assert len(tried) == 1
    hardware._compile_cpp_once.cache_clear()


@pytest.mark.slow
def test_the_command_runs_by_itself():
    command = [sys.executable, "-m", "lightning_ups", "doctor", "--json", "--require", "fsdp2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["packages"]["lightning"]["loads"]
    assert done.stderr == ""

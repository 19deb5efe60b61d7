import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fake_te
from tests.real_te import need_engine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def te(import_benchmark, monkeypatch):
    te = import_benchmark("te")
    monkeypatch.setattr(te, "CUDA", False)
    with fake_te.installed():
        yield te


@pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="a GPU runs the benchmark itself")
@pytest.mark.parametrize(
    "case",
    [
        "conversion",
        "compiled",
        "speed delayed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("recipes", "checkpoints", "recompute")),
    ],
)
def test_a_case_holds_at_a_tiny_size(te, monkeypatch, case):
    if case == "compiled":
        monkeypatch.setattr(te, "STEPS", 3)  # of which it makes five times as many, for the time that one takes
    found = te.CASES[case]()
    assert found.get("failed", []) == []
    assert found["ok"]


@pytest.mark.slow  # each trains several times, which takes a GPU about a minute
@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("case", ["conversion", "recipes", "checkpoints", "recompute", "compiled"])
def test_a_case_holds_on_a_gpu(case, tmp_path):
    run_case(case, tmp_path)


@pytest.mark.slow
@pytest.mark.gpu(count=2, capability=(9, 0))
@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_a_case_holds_on_two_gpus(case, tmp_path):
    run_case(case, tmp_path)


def run_case(case, folder):
    """Run it in a process of its own, which may have a process group."""
    need_engine()
    command = [sys.executable, str(BENCHMARKS / "te.py"), "--cases", case, "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (result,) = json.loads((folder / "result.json").read_text())
    assert result.get("ok"), [result, done.stdout[-2000:]]


def test_each_case_belongs_to_one_set(te, monkeypatch):
    found = []
    for name in te.SETS:
        monkeypatch.setattr(sys, "argv", ["te.py", "--set", name, "--budget", "10"])
        found += te.chosen_cases()
        assert sys.argv == ["te.py", "--budget", "10"]  # what is left is for the rest
    assert sorted(found) == sorted(te.CASES)
    assert te.chosen_cases() == te.CASES


def test_what_needs_transformer_engine_is_left_out_where_it_cannot_be_loaded(te, monkeypatch, capsys):
    assert te.without_engine(te.CASES) == list(te.CASES)

    def broken(name):
        raise RuntimeError("built for CUDA 12")

    with monkeypatch.context() as patch:  # undone before the fixture puts back what there was before it
        patch.setattr("lightning_ups._compat.optional.te._required", broken)
        assert te.without_engine(te.CASES) == ["speed bf16", "speed bf16, compiled"]
        assert "cannot be loaded: RuntimeError: built for CUDA 12" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="Install Transformer Engine"):
            te.without_engine(["conversion"])


@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_two_gpus_are_asked_for(te, monkeypatch, case):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert te.CASES[case]() == {"ok": None, "skipped": "needs 2 GPUs, 1 visible"}


def test_a_failed_check_is_kept_and_the_others_run(te):
    checks = te.Checks()
    with checks.attempt("first"):
        raise RuntimeError("broken")
    checks.check("second", ok=True)
    checks.refused("third", lambda: None)
    assert checks.result()["failed"] == ["first", "third"]
    assert checks.result()["num_checks"] == 3


def test_how_far_losses_are_apart(te):
    assert te.apart([3.0, 2.2, 1.0], [3.0, 2.0, 1.0]) == pytest.approx(0.1)  # of what was learned
    assert te.apart([3.0, 2.0, 0.01], [3.0, 2.0, 0.02]) == pytest.approx(0.01 / 2.98)  # and not half of what is left
    assert te.apart([2.2], [2.0], learned=4.0) == pytest.approx(0.05)
    for broken in (math.nan, math.inf):
        assert te.apart([3.0, broken, 1.0], [3.0, 2.0, 1.0]) == math.inf


@pytest.mark.slow
def test_recipes_are_red_where_float8_loses_gradients(te, monkeypatch):
    backward = fake_te._Round.backward
    monkeypatch.setattr(fake_te._Round, "backward", lambda ctx, gradient: backward(ctx, gradient * (gradient > 0)))
    assert {*te.recipes()["failed"]} >= {"delayed, masters", "current, masters", "delayed, accumulation and clipping"}

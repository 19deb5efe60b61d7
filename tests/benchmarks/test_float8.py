import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def float8(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import float8

    yield float8
    for name in ("float8", "cases"):
        sys.modules.pop(name, None)


def run(tmp_path, *words):
    path = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "float8.py"), "--tiny", "--output", str(tmp_path), *words],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_set_has_its_configurations(float8, tmp_path):
    names = [*float8._cases(tiny=True, output=tmp_path)]
    assert {name.split()[0] for name in names} == {"speed", "losses", "predict", "measure"}
    assert [name for name in names if name.startswith("losses bf16")] == [f"losses bf16 seed {i}" for i in range(3)]
    assert len([name for name in names if name.startswith("measure")]) == 12
    parts = [sum(holds(name) for holds in float8.SETS.values()) for name in names]
    assert parts == [1] * len(names), "each belongs to one set"


def test_what_compiles_beside_a_precision_is_allowed_there(float8):
    from lightning_ups.precision import BF16Precision, TEPrecision

    assert [c.scope for c in float8._compiled(BF16Precision(), compiled=True)] == ["auto"]
    assert [c.scope for c in float8._compiled(TEPrecision(recipe="current"), compiled=True)] == ["blocks"]
    assert float8._compiled(TEPrecision(recipe="delayed"), compiled=True) == []
    assert float8._compiled(BF16Precision(), compiled=False) == []


def test_what_is_finished_is_kept_when_a_run_is_cut_off(float8, tmp_path, monkeypatch):
    ran = []

    def child(command, *, timeout_s, cache):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(command[command.index("--case") + 1])
        return {"step_ms": 1.0}

    monkeypatch.setattr(float8, "_child", child)
    options = argparse.Namespace(output=tmp_path, tiny=True, set="speed", only="", budget=100.0, timeout=10.0)
    with pytest.raises(KeyboardInterrupt):
        float8._run(options)
    assert ran == ["speed bf16", "speed tensorwise"]
    kept = {path.name for path in tmp_path.glob("*.json")}
    assert kept == {"speed_bf16.json", "speed_tensorwise.json"}


def test_the_tables_follow_from_what_was_kept(float8, tmp_path):
    def keep(name, **result):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))

    for name, tokens in (("bf16", 100.0), ("tensorwise", 125.0)):
        keep(f"speed_{name}", tokens_per_s=tokens, peak_gib=3.5, converted=5, losses=[2.0, 1.0])
    for seed, loss in enumerate((1.0, 1.1, 1.2)):
        keep(f"losses_bf16_seed_{seed}", last_tenth=loss)
    keep("losses_rowwise_seed_0", last_tenth=1.15)
    keep("losses_tensorwise_seed_0", last_tenth=1.25)
    keep("predict_1B", gain_all=0.20, gain_auto=0.22, verdict="")
    keep("predict_150M", gain_all=-0.05, gain_auto=0.0, verdict="leave bfloat16")
    for name, step in (("bf16", 120.0), ("tensorwise", 100.0), ("auto", 98.0)):
        keep(f"measure_1B_{name}", step_ms=step)
    text = "\n".join(float8._summary(tmp_path))
    assert "| tensorwise | 125 | 1.250 | 3.5 | 5 | 1.0000 |" in text
    assert "| rowwise_seed_0 | 1.1500 | True |" in text
    assert "| tensorwise_seed_0 | 1.2500 | False |" in text
    assert "The band: 1.0000 to 1.2000" in text
    assert "| 1B | +20.0% | +20.0% | +22.0% | +22.4% | True | +2.0% |" in text
    assert "| 150M | -5.0% | | +0.0% | | | leave bfloat16 |" in text


@pytest.mark.slow
@pytest.mark.parametrize("case", ["speed tensorwise", "losses rowwise seed 0", "predict vit"])
def test_a_configuration_runs_once_and_is_kept(tmp_path, case):
    done = run(tmp_path, "--only", case)
    path = tmp_path / f"{case.replace(' ', '_')}.json"
    assert path.exists(), done.stdout + done.stderr
    assert (tmp_path / "env.txt").exists()
    again = run(tmp_path, "--only", case)
    assert f"{case}: is there" in again.stdout


@pytest.mark.slow
def test_predictions_come_before_measuring(tmp_path):
    done = run(tmp_path, "--set", "measure-other", "--only", "mixed")
    assert "Nothing is predicted for mixed yet" in done.stdout
    assert run(tmp_path, "--set", "predict-other", "--only", "mixed").returncode == 0
    said = json.loads((tmp_path / "predict_mixed.json").read_text())
    assert 0 < len(said["converts"]) < said["of"]
    done = run(tmp_path, "--set", "measure-other", "--only", "mixed")
    assert json.loads((tmp_path / "measure_mixed_auto.json").read_text())["converted"] == len(said["converts"])
    assert "| mixed |" in done.stdout

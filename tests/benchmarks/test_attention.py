import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention

    # Parts run here instead of in processes of their own, each of which would import torch.
    def finished(command, *, timeout):
        told = dict(zip(command[2::2], command[3::2], strict=True))
        attention.run_part(told["--part"], deadline=float("inf"), log=Path(told["--log"]))
        return "a warning"

    monkeypatch.setattr(attention, "finished", finished)
    monkeypatch.setattr(attention, "ON_GPU", False)
    yield attention
    for name in ("attention", "processes"):
        sys.modules.pop(name, None)


def run(attention, monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["attention.py", "--out", str(folder), *words])
    attention.main()


def measurements(folder):
    return [json.loads(line) for line in (folder / "attention.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_part_measures_and_every_backend_is_right(attention, monkeypatch, tmp_path, capsys):
    run(attention, monkeypatch, tmp_path)
    lines = measurements(tmp_path)
    checked = [line for line in lines if line["part"] == "correct"]
    assert {(line["backend"], line["case"]) for line in checked if line.get("ok")} >= {
        (backend, case) for backend in ("math", "flash") for case in attention.CASES if "softcap" not in case
    }
    assert not [line for line in checked if not line.get("ok") and "refused" not in line]
    timed = [line for line in lines if line["part"] == "speed"]
    assert {(line["head_dim"], line["held"]) for line in timed} == {
        (width, held) for width in (32, 64, 128, 256) for held in (True, False)
    }
    assert all(time > 0 for line in timed for part in ("training", "forward") for time in line[part].values())
    table = json.loads((tmp_path / "cpu.json").read_text())
    assert len(table["rows"]) == 4, "held out shapes are not in the table"
    assert {path.name for path in tmp_path.iterdir()} == {"attention.jsonl", "attention.txt", "cpu.json", "log.txt"}
    assert "largest regret, training" in capsys.readouterr().out


def test_what_is_cut_off_keeps_every_measurement_by_then(attention, monkeypatch, tmp_path, capsys):
    measure = attention.measure

    def cut(shape, *options, **named):
        if shape.head_dim == 64 and shape.held:
            raise KeyboardInterrupt
        return measure(shape, *options, **named)

    monkeypatch.setattr(attention, "measure", cut)
    monkeypatch.setattr(attention, "TOGETHER", (("32",), ("64",)))
    with pytest.raises(KeyboardInterrupt):
        run(attention, monkeypatch, tmp_path)
    assert [(line["part"], line.get("head_dim")) for line in measurements(tmp_path)] == [
        ("device", None), ("speed", 32), ("speed", 32), ("device", None), ("speed", 64),
    ]  # fmt: skip
    assert len(json.loads((tmp_path / "cpu.json").read_text())["rows"]) == 1, "of the part that was whole"
    run(attention, monkeypatch, tmp_path, "--minutes", "0")
    assert len(json.loads((tmp_path / "cpu.json").read_text())["rows"]) == 2


def test_parts_have_all_of_the_time_together(attention):
    apart = {part: share for part, share in attention.SHARES.items() if part not in attention.CHECKED}
    assert sum(apart.values()) + attention.SHARES["correct-flex"] == pytest.approx(1.0)


def test_nothing_measured_is_no_table(attention, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, "finished", lambda *_, **__: "no device")
    run(attention, monkeypatch, tmp_path)
    assert "nothing was measured" in capsys.readouterr().out
    assert "no device" in (tmp_path / "log.txt").read_text()

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def attention(monkeypatch, import_benchmark):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # where other kernels would be timed
    attention = import_benchmark("attention")

    # Parts run here instead of in processes of their own, each of which would import torch.
    def finished(command, *, timeout, stop):
        told = dict(zip(command[2::2], command[3::2], strict=True))
        attention.run_part(
            told["--part"],
            deadline=time.monotonic() + float(told["--seconds"]) * 100,
            log=Path(told["--out"]) / "attention.jsonl",
        )
        return "a warning"

    monkeypatch.setattr(attention, "finished", finished)
    return attention


def run(attention, monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["attention.py", "--out", str(folder), *words])
    attention.main()


def measurements(folder):
    lines = [json.loads(line) for line in (folder / "attention.jsonl").read_text().splitlines()]
    return [line for line in lines if line["part"] != "begun"]


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
    assert {*table["host"]} == {"training", "forward"}
    assert all({*times} == {"math", "flash"} for times in table["host"].values())
    assert all(0 < time < 1000 for times in table["host"].values() for time in times.values())
    held = json.loads((tmp_path / "cpu_held_out.json").read_text())
    assert [len(held["rows"]), len(held["masked"])] == [4, 6]
    assert {path.name for path in tmp_path.iterdir()} == {
        "attention.jsonl", "attention.txt", "cpu.json", "cpu_held_out.json", "log.txt",
    }  # fmt: skip
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


def only_speed(attention, monkeypatch, *parts):
    monkeypatch.setattr(attention, "TOGETHER", tuple((part,) for part in parts))
    calls = []

    def measure(shape, *_, **__):
        calls.append(shape)
        return {"training": {"math": 1.0}, "forward": {"math": 1.0}, "trouble": {}}

    monkeypatch.setattr(attention, "measure", measure)
    return calls


def test_a_later_call_goes_on_from_an_earlier_one(attention, monkeypatch, tmp_path, capsys):
    calls = only_speed(attention, monkeypatch, "64")
    run(attention, monkeypatch, tmp_path)
    with (tmp_path / "attention.jsonl").open("a") as file:
        file.write('{"part": "spe')  # as a process that is killed leaves it
    assert "part 128: 2 of 2 not measured; the same command goes on from here" in capsys.readouterr().out
    only_speed(attention, monkeypatch, "64", "128").clear()
    run(attention, monkeypatch, tmp_path)
    assert [shape.head_dim for shape in calls] == [64, 64]
    assert "going on from 2 measurements" in capsys.readouterr().out
    assert {row["head_dim"] for row in json.loads((tmp_path / "cpu.json").read_text())["rows"]} == {64, 128}


def test_a_report_made_on_another_machine_does_not_tell_what_is_left(attention, monkeypatch, tmp_path, capsys):
    only_speed(attention, monkeypatch, "64")
    run(attention, monkeypatch, tmp_path)
    assert "not measured" in capsys.readouterr().out
    there = attention.device()
    monkeypatch.setattr(attention, "device", lambda: {**there, "device": "another"})
    run(attention, monkeypatch, tmp_path, "--minutes", "0")
    assert "not measured" not in capsys.readouterr().out


def test_a_shape_at_which_a_process_dies_is_tried_last_and_costs_only_itself(attention, monkeypatch, tmp_path):
    calls = only_speed(attention, monkeypatch, "64")
    measure, run_part = attention.measure, attention.run_part

    def dies(shape, *rest):
        if not shape.held:
            raise MemoryError
        return measure(shape, *rest)

    def process(*args, **kwargs):
        try:
            run_part(*args, **kwargs)
        except MemoryError:
            return

    monkeypatch.setattr(attention, "measure", dies)
    monkeypatch.setattr(attention, "run_part", process)
    run(attention, monkeypatch, tmp_path)
    assert [shape.held for shape in calls] == [True]
    assert [line["held"] for line in measurements(tmp_path) if line["part"] == "speed"] == [True]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--minutes", "0"], "there are no measurements"),
        (["--minutes", "-1"], "measures nothing"),
        (["--install"], "is for a table of a GPU"),
        (["--install", "--without-fa4", "--minutes", "0"], "there are no measurements"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(attention, monkeypatch, tmp_path, words, told):
    monkeypatch.setattr(attention, "run_all", None)
    with pytest.raises(SystemExit, match=told):
        run(attention, monkeypatch, tmp_path / "new", *words)


def test_measurements_of_another_machine_are_not_gone_on_from(attention, monkeypatch, tmp_path):
    only_speed(attention, monkeypatch, "64")
    run(attention, monkeypatch, tmp_path)
    here = attention.device()
    monkeypatch.setattr(attention, "device", lambda: {**here, "versions": {**here["versions"], "torch": "9.9"}})
    with pytest.raises(SystemExit, match=r"was measured with torch .* \(here 9.9\)"):
        run(attention, monkeypatch, tmp_path)


def test_a_gpu_without_flash_attention_4_ends_it_unless_asked_to_go_on(attention, monkeypatch, tmp_path):
    calls = only_speed(attention, monkeypatch, "64")
    monkeypatch.setattr(attention, "ON_GPU", True)
    monkeypatch.setattr(attention, "device", lambda: {"device": "Test", "capability": [9, 0], "versions": {}})
    monkeypatch.setattr(attention, "shapes", lambda dim: [attention.Shape(dim, 4, 2, 32, 2)])
    monkeypatch.setattr(attention, "missing_package", lambda _: "it cannot be loaded: RuntimeError")
    with pytest.raises(SystemExit, match=r"it cannot be loaded.*--without-fa4"):
        run(attention, monkeypatch, tmp_path)
    assert not calls
    run(attention, monkeypatch, tmp_path, "--without-fa4")
    assert len(calls) == 1
    monkeypatch.setattr(attention, "missing_package", lambda _: None)
    with pytest.raises(SystemExit, match="right in none of 0 cases"):
        run(attention, monkeypatch, tmp_path)
    wrong = {"part": "correct", "backend": "fa4", "error": "no kernel"}
    assert "none of 1 cases: no kernel" in attention.fa4_is_wrong([wrong])
    assert attention.fa4_is_wrong([wrong, {**wrong, "ok": True}]) is None


def test_what_is_small_comes_first_and_then_what_training_wants(attention, monkeypatch):
    monkeypatch.setattr(attention, "ON_GPU", True)
    assert [parts[0] for parts in attention.TOGETHER][1:3] == ["128", "64"]
    for width in (64, 128, 256):
        shapes = attention.shapes(width)
        work = [shape.batch * shape.heads * shape.seq**2 * width for shape in shapes]
        small = sum(one <= attention.SMALL for one in work)
        assert small >= 8
        assert max(work[:small]) <= attention.SMALL < min(work[small:])
        usual = [shape.seq for shape in shapes[small:] if shape[1:3] == (32, 8) and shape.causal]
        assert usual[:2] in ([2048, 4096], [4096, 8192], [1024, 2048])
        assert len(set(shapes)) == len(shapes)
        assert {s.seq for s in shapes if s.held} >= {1664, 3328, 11264}
        assert any(s.held and s.heads == 8 * s.kv_heads for s in shapes)
        assert any(s.held and not s.causal for s in shapes)


def test_what_is_installed_takes_the_place_of_the_same_shapes(attention):
    def table(seqs, time, **more):
        shape = {"head_dim": 64, "heads": 4, "kv_heads": 2, "batch": 1, "causal": True}
        rows = [{**shape, "seq": seq, "forward": {"math": time}, "training": {"math": time}} for seq in seqs]
        return {
            "device": "Test",
            "versions": {"torch": "2.11", "python": "3.12"},
            "date": "2026-11-22",
            "rows": rows,
        } | more

    def told(before, after):
        found = attention.joined(before, after)
        return {row["seq"]: row["training"]["math"] for row in found["rows"]}

    old, new = (
        table([8, 16], 5.0),
        table([16, 32], 1.0, date="2026-11-23", versions={"torch": "2.11", "python": "3.13"}),
    )
    assert told(old, new) == {8: 5.0, 16: 1.0, 32: 1.0}
    assert attention.joined(old, new)["date"] == "2026-11-23"
    assert told(table([8, 16], 5.0, versions={"torch": "2.9"}), new) == {16: 1.0, 32: 1.0}, "times of other versions"
    assert told({}, new) == {16: 1.0, 32: 1.0}
    # Since the host's time is told apart, what was short before may be the host's.
    counted = table([16, 32], 1.0, host={"training": {"math": 0.1}})
    assert told(old, counted) == {8: 5.0, 16: 1.0, 32: 1.0}
    assert told(table([8], 2.0), counted) == {16: 1.0, 32: 1.0}


def test_the_host_is_timed_where_it_matters(attention, monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "queueing", lambda call: calls.append(call) or 0.25)
    told = {"training": {"math": 0.25}, "forward": {"math": 0.25}}
    assert attention.measure(attention.Shape(32, 4, 2, 32, 2), ["math"])["host"] == told
    assert len(calls) == 2
    monkeypatch.setattr(attention, "SMALL", 0)
    found = attention.measure(attention.Shape(32, 4, 2, 32, 2), ["math"])
    assert found["host"] == {}
    assert found["training"]["math"] > 0
    assert len(calls) == 2


def test_the_host_of_a_table_is_the_median_over_shapes(attention):
    host = [{"training": {"math": one, "flash": 2.0}, "forward": {"math": 0.1}} for one in (1.0, 9.0, 3.0)]
    lines = [{"part": "speed", "host": one} for one in host] + [{"part": "masked", "host": host[1]}]
    assert attention.host_of(lines) == {"training": {"math": 3.0, "flash": 2.0}, "forward": {"math": 0.1}}
    assert attention.host_of([{"part": "speed", "host": {"math": 1.0}}]) == {}, "as an older one has it"


def test_held_out_shapes_are_fresh(attention, monkeypatch):
    """None of them was there to look at when the way of choosing was made."""
    monkeypatch.setattr(attention, "ON_GPU", True)
    folder = BENCHMARKS.parent / "tests" / "kernels" / "attention"
    known = json.loads((folder / "NVIDIA_H200_held_out.json").read_text())["rows"]
    known += json.loads(next(BENCHMARKS.parent.rglob("measured/NVIDIA_H200.json")).read_text())["rows"]
    seen = {(row["heads"], row["kv_heads"], row["seq"], row["batch"]) for row in known}
    held = {s[1:5] for width in (64, 128, 256) for s in attention.shapes(width) if s.held}
    assert len(held) >= 10
    assert not held & seen


def test_what_a_mask_leaves_is_told_to_auto(attention):
    line = {"batch": 2, "seq": 8192}
    assert attention.seen({**line, "mask": "window 1024"}) == {"window": 1024}
    assert attention.seen({**line, "mask": "documents of 1111"}) == {"documents": 15}
    assert attention.seen({**line, "mask": "causal"}) == attention.seen(line) == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_no_process(tmp_path, number):
    path = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    script = [sys.executable, str(BENCHMARKS / "attention.py"), "--out", str(tmp_path)]
    with subprocess.Popen(script, env=environment, stderr=subprocess.DEVNULL) as process:
        while len(parts := of_folder(tmp_path)) < 4 and process.poll() is None:
            time.sleep(0.1)
        assert len(parts) == 4, "the script, and the three parts that it begins with"
        process.send_signal(number)
        assert process.wait(timeout=100) != 0
    assert of_folder(tmp_path) == []


def of_folder(folder):
    """Return the processes that were told of a folder."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in command.read_text():
                found.append(command)
        except OSError:
            continue
    return found


def test_nothing_measured_is_no_table(attention, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, "finished", lambda *_, **__: "no device")
    run(attention, monkeypatch, tmp_path)
    assert "nothing was measured" in capsys.readouterr().out
    assert "no device" in (tmp_path / "log.txt").read_text()


def test_what_is_held_out_is_timed_for_the_table_of_the_package(attention, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"--held-out asks the package's table, and it has none of cpu"):
        run(attention, monkeypatch, tmp_path / "none", "--held-out")
    monkeypatch.setattr(attention, "ON_GPU", True)
    with pytest.raises(SystemExit, match="Leave one of them out"):
        run(attention, monkeypatch, tmp_path / "none", "--held-out", "--install")
    monkeypatch.setattr(attention, "ON_GPU", False)
    assert not (tmp_path / "none").exists()
    shape = {"head_dim": 64, "heads": 4, "kv_heads": 2, "seq": 48, "batch": 1, "causal": True}
    times = {"flash": 1.0, "math": 2.0}  # for which flash is taken
    content = {"device": "cpu", "capability": [0, 0], "versions": {}, "date": "2026-11-25"}
    monkeypatch.setattr(attention, "in_package", lambda _: tmp_path / "package.json")
    rows = [{**shape, "seq": seq, "forward": times, "training": times} for seq in (16, 64)]
    (tmp_path / "package.json").write_text(json.dumps({**content, "rows": rows}))
    before = (tmp_path / "package.json").read_text()
    monkeypatch.setattr(attention, "queueing", lambda _: 0.0)
    monkeypatch.setattr(attention, "rounds", lambda calls, _: {name: 3.0 - (name == "math") for name in calls})
    out = tmp_path / "out"
    run(attention, monkeypatch, out, "--held-out")
    timed = [line for line in measurements(out) if line["part"] == "speed"]
    assert [line["head_dim"] for line in timed] == [128, 64, 256]
    assert all(line["held"] for line in timed)
    assert (tmp_path / "package.json").read_text() == before
    assert {path.name for path in out.iterdir()} == {
        "attention.jsonl", "attention.txt", "cpu_held_out.json", "log.txt"
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "largest regret, training: 0.0% in the table, 50.0% held out, NOT within 3% of the best" in said
    assert "not measured" not in said, "nothing else is missed"

import argparse
import json
import sys
import time

import pytest
import yaml

pytestmark = pytest.mark.filterwarnings("ignore")

# Stands in for the command: its winner computes in bfloat16.
TUNE = """
import json, pathlib, sys
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
row = {"name": "fast", "result": {"samples_per_s": 20.0}, "why": "", "verified": "passed"}
output.with_suffix(".json").write_text(
    json.dumps({"best": "fast", "gain_over_stock": None, "is_complete": %s, "rows": [row]})
)
output.with_suffix(".yaml").write_text("preset: none\\ntrainer: {plugins+: [{class_path: Fast}]}\\n")
"""


@pytest.fixture
def judged(import_benchmark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    benchmark = import_benchmark("tune_zoo")
    monkeypatch.setattr(benchmark, "run_folder", lambda line, tiny: tmp_path / "run" / line)

    class Engine:
        def __init__(self):
            self.runs = []

        def run(self, configuration, effort):
            self.runs.append(configuration)
            text = "".join(configuration.fragments)
            if "fused: true" in text and "bf16-mixed" in text:
                return benchmark.Result(failure="crash", text="as a test wants it")
            rate = 20.0 if "Fast" in text else 19.0 if "BATCH" in text or "batch_size" in text else 10.0
            return benchmark.Result(samples_per_s=rate, error=0.001, losses=[2.0], wall_s=1.0)

    options = argparse.Namespace(
        output=tmp_path / "out",
        tiny=True,
        until=time.time() + 500,
        minutes=1.0,
        seconds=1.0,
        limit=50.0,
        rounds=2,
        most=400.0,
    )
    options.output.mkdir()

    def judge(complete=True):
        engine = Engine()
        command = [sys.executable, "-c", TUNE % complete]
        return benchmark.Judge("gpt2", options, engine, tune=command), engine

    return benchmark, judge, options


def test_takes_all_steps_once_and_reports_what_it_found(judged):
    benchmark, judge, options = judged
    first, engine = judge()
    assert first.take(benchmark.STEPS)
    assert len(engine.runs) == 4 + 2 * 4  # the grid of a CPU, and two rounds of four sides
    again, engine = judge()
    assert again.take(benchmark.STEPS)
    assert not engine.runs
    records = benchmark.read(options.output, tiny=True)
    final = records[-1]
    assert final["grid"] == "bf16, large batch"
    assert final["gains"]["grid"][0] == pytest.approx(20 / 19 - 1)
    text = benchmark.report(records, ["gpt2"])
    assert "passed" in text
    assert "yes" in text
    assert [r["result"].get("failure") for r in records if r["kind"] == "grid"].count("crash") == 1


def test_a_slice_that_was_interrupted_is_continued(judged):
    benchmark, judge, options = judged
    assert not judge(complete=False)[0].take(["grid", "tune"])
    assert not judge()[0].take(["final"])
    assert judge()[0].take(benchmark.STEPS)
    assert [r["is_complete"] for r in benchmark.read(options.output, tiny=True) if r["kind"] == "tune"] == [False, True]


def test_begins_nothing_that_the_budget_would_end(judged):
    benchmark, judge, options = judged
    options.until = time.time() + 30
    waiting, engine = judge()
    assert not waiting.take(benchmark.STEPS)
    assert not engine.runs


def test_a_line_stays_on_its_gpu(judged):
    benchmark, _, options = judged
    row = {"kind": "grid", "line": "gpt2", "tiny": True, "gpu": "1"}
    (options.output / "records.jsonl").write_text(json.dumps(row) + "\n")
    options.budget = 1.0
    lines = benchmark.Lines(options, ["0", "1"])
    assert [lines._may_have(gpu, "gpt2") for gpu in "01"] == [False, True]
    assert lines._may_have("0", "bert")
    assert benchmark.Lines(options, ["0"])._may_have("0", "gpt2")  # that GPU is not there


@pytest.mark.parametrize(
    ("preset", "grid", "meets"), [(0.0, 0.0, True), (-0.02, 0.1, False), (0.1, -0.03, False), (-0.005, -0.015, True)]
)
def test_the_winner_is_as_fast_as_the_preset_and_near_the_grid(import_benchmark, preset, grid, meets):
    gains = {"preset": [preset, -1.0, 1.0], "grid": [grid, -1.0, 1.0]}
    assert import_benchmark("tune_zoo").meets({"gains": gains}) == meets


def test_interrupts_a_command_in_time(import_benchmark):
    benchmark = import_benchmark("tune_zoo")
    script = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('kept')"
    code, text = benchmark.interrupted_after([sys.executable, "-c", script], 2.0)
    assert (code, text.strip()) == (0, "kept")


def test_the_grid_is_one_of_sixteen_settings_that_merge(import_benchmark):
    run = import_benchmark("tune_zoo_run")
    assert len({setting.name for setting in run.GRID}) == 16
    assert len({setting.fragments for setting in run.GRID}) == 16
    for setting in run.GRID:
        assert all(isinstance(yaml.safe_load(text), dict) for text in setting.texts(4))
    assert len(run.BUILDING) == 6
    assert len(run.HELD_OUT) == 4


def test_a_file_for_fit_has_batches_of_its_size(import_benchmark):
    pytest.importorskip("transformers")
    run = import_benchmark("tune_zoo_run")
    batch = run.micro_batch("gpt2", tiny=True)
    tree = yaml.safe_load(run.run_yaml("gpt2", preset="cpu", tiny=True, batch=batch))
    assert tree["trainer"]["accumulate_grad_batches"] * batch == 2
    batches = iter(run.Batches(**tree["data"]["init_args"]).train_dataloader())
    first = [next(batches)["input_ids"] for _ in range(9)]
    assert first[0].shape == (batch, 32)
    assert first[0].equal(first[8])
    assert not first[0].equal(first[1])
    assert next(run.module("pde", tiny=True).parameters()) is not None
    assert json.dumps(tree)

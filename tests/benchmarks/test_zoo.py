import json
import time
from collections import Counter

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")

TRAINED = ("llama", "t5", "bert", "clip", "lora", "lightning_transformer", "nn_transformer_encoder", "ema_llama")


@pytest.fixture
def zoo(import_benchmark):
    module = import_benchmark("zoo")
    module.load()
    return module


@pytest.fixture
def train(import_benchmark, zoo):
    """Return what runs a tiny line under a side in this process."""
    zoo_run = import_benchmark("zoo_run")

    def run(name, side):
        return zoo_run.run(zoo.LINES[name], zoo_run.SIDES[side], tiny=True, limit=200, blocks=(2, 0.0))

    yield run
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", TRAINED)
def test_stock_trains_in_float32_and_bfloat16(train, name):
    pytest.importorskip("transformers")
    exact, mixed = train(name, "fp32"), train(name, "stock_bits")
    assert "error" not in exact, exact
    assert "error" not in mixed, mixed
    torch.testing.assert_close(exact["losses"][:6], mixed["losses"], rtol=0.02, atol=0)
    assert exact["unchanged"] == mixed["unchanged"]
    assert len(exact["unchanged"]) == (21 if name == "lora" else 0)
    assert exact["losses"][0] != mixed["losses"][0]


@pytest.mark.parametrize("name", TRAINED)
def test_the_precision_of_the_preset_gives_the_losses_of_stock(train, name):
    stock, ours = train(name, "stock_bits"), train(name, "precision_bits")
    assert ours["losses"][:5] == stock["losses"][:5]
    assert ours["unchanged"] == stock["unchanged"]


def test_an_error_is_a_result_with_the_losses_before_it(train, zoo, monkeypatch):
    build = zoo.LINES["nn_mlp"].build

    def failing(tiny):
        work = build(tiny)
        work.module.on_train_batch_end = lambda outputs, batch, index: 1 / (2 - index)
        return work

    object.__setattr__(zoo.LINES["nn_mlp"], "build", failing)
    found = train("nn_mlp", "stock")
    assert found["error_line"] == "ZeroDivisionError: division by zero"
    assert len(found["losses"]) == 3
    assert "step_ms" not in found


def test_timed_blocks_and_the_end(train):
    found = train("nn_mlp", "stock")
    assert len(found["blocks_ms"]) == 2
    assert min(found["blocks_ms"]) <= found["step_ms"] <= max(found["blocks_ms"])
    assert found["steps"] == 2 + 4 + 2 * found["block_steps"] + 4


def test_a_run_whose_length_is_fixed_goes_to_its_end(train):
    pytest.importorskip("timm")
    found = train("swa", "stock")
    assert found["steps"] == 16
    assert found["step_ms"] > 0


def test_the_list_is_what_was_agreed(zoo):
    lines = zoo.LINES.values()
    assert len(lines) >= 60
    assert len({need for line in lines for need in line.needs}) >= 8
    assert len({line.way for line in lines} - {""}) >= 12
    assert sum(line.gate for line in lines) == 20
    assert min(Counter(line.family for line in lines).values()) >= 1


@pytest.fixture
def records():
    """Return the records of two lines under four sides."""

    def run(line, side, ms, losses, **more):
        common = {"kind": "run", "round": 0, "call": "a", "family": line[0], "tiny": False, "gpus": "0"}
        timed = {"step_ms": ms, "blocks_ms": [0.99 * ms, ms, 1.01 * ms], "peak_gib": 10.0, "first_step_s": 1.0}
        rest = {"losses": losses, "unchanged": [], "parameters": 1000, **more}
        return {**common, "line": line, "side": side, **timed, **rest}

    call = {"kind": "call", "call": "a", "cards": ["X"], "commit": "c"}
    exact, near, far = [1.0, 2.0], [1.0, 2.01], [1.0, 2.1]
    runs = [
        run("quick", "stock", 20.0, near),
        run("quick", "stock_compile", 15.0, near),
        run("quick", "preset", 10.0, far, unchanged=["w"], peak_gib=10.6),
        run("quick", "fp32", 50.0, exact),
        run("quick", "precision", 10.0, near),
        run("slow", "stock", 10.0, near, busy=0.8),
        run("slow", "preset", 20.0, near),
        run("sick", "stock", 10.0, near),
        {**run("sick", "preset", 1.0, []), "error": "...", "error_line": "E: no"},
    ]
    return {"call": [call], "run": runs}


@pytest.mark.parametrize(("again", "differs"), [("same", True), ("other", False), (None, True)])
def test_other_losses_count_only_where_those_of_stock_are_the_same_twice(import_benchmark, records, again, differs):
    sides = {"stock_bits": [1.0, 2.0], "precision_bits": [1.0, 2.5]}
    sides |= {} if again is None else {"stock_bits_again": [1.0, 2.0 if again == "same" else 3.0]}
    (stock,) = (run for run in records["run"] if (run["line"], run["side"]) == ("slow", "stock"))
    records["run"] += [{**stock, "side": side, "losses": losses} for side, losses in sides.items()]
    totals = import_benchmark("zoo_report").summary(records)["preset"]["totals"]
    assert totals["other_bits"] == (["slow"] if differs else [])


def test_the_summary_counts_each_failing(import_benchmark, records):
    found = import_benchmark("zoo_report").summary(records)["preset"]
    quick, totals = found["lines"]["quick"], found["totals"]
    assert quick["speed_up"][0] == pytest.approx(2.0)
    assert quick["speed_up"][1] < 2.0 < quick["speed_up"][2]
    assert quick["over_compile"][0] == pytest.approx(1.5)
    assert quick["same_bits"] is True
    assert quick["error_to_fp32"]["preset"] == pytest.approx(10 * quick["error_to_fp32"]["stock"])
    assert (totals["lines"], totals["trains"]) == (3, 2)
    assert totals["fails"] == {"sick": "E: no"}
    assert totals["geometric_mean"] == pytest.approx(1.0)
    assert totals["by_family"]["q"] == {"lines": 1, "geometric_mean": pytest.approx(2.0)}
    assert [*totals["slower"]] == ["slow"]
    assert totals["lost"] == {"quick": ["w"]}
    assert totals["memory"] == {"quick": [10.0, 10.6]}
    assert [*totals["worse_than_compile"]] == ["quick"]
    assert totals["busy_above_70"] == [1, 1]


def test_the_report_has_a_row_for_each_line(import_benchmark, records):
    text = import_benchmark("zoo_report").report(records)
    assert "| quick | yes |" in text
    assert "2.00 [" in text
    assert "| sick | **no** |" in text


def test_an_interval_over_rounds_is_wider_than_rounds_that_agree(import_benchmark):
    zoo_report = import_benchmark("zoo_report")

    def runs(times):
        return [{"round": turn, "step_ms": ms, "blocks_ms": [ms]} for turn, ms in enumerate(times)]

    ratio, low, high = zoo_report.speed_up(runs([10, 10, 10]), runs([5, 5, 5]))
    assert (ratio, low, high) == pytest.approx((2, 2, 2))
    ratio, low, high = zoo_report.speed_up(runs([10, 10, 10]), runs([4, 5, 6]))
    assert low < 1.5 < 2 < 3 < high


@pytest.mark.slow
def test_a_run_through_the_command_is_not_made_again(run_benchmark, tmp_path, zoo):
    words = ("--tiny", "--only", "lightning_boring", "--sides", "stock", "--output", "zoo.jsonl")
    done = run_benchmark("zoo", *words, OMP_NUM_THREADS="1")
    call, run = map(json.loads, (tmp_path / "zoo.jsonl").read_text().splitlines())
    assert (call["kind"], call["call"]) == ("call", run["call"])
    assert (run["line"], run["side"], len(run["losses"])) == ("lightning_boring", "stock", 14), done.stdout

    class Options:
        output, sides, rounds, again, tiny = tmp_path / "zoo.jsonl", ["stock", "preset"], 1, False, True

    (job,) = zoo.jobs(["lightning_boring"], Options)
    assert job.seconds == {"preset": zoo.EXPECTED["preset"]}


def test_a_line_whose_package_is_missing_is_named(zoo, monkeypatch, capsys):
    monkeypatch.setattr(zoo, "find_spec", lambda name: None if name == "timm" else object())

    class Options:
        only, gate = ["timm_vit", "llama"], False

    assert zoo.chosen(Options, None) == ["llama"]
    assert "timm_vit: left out, since timm is not installed" in capsys.readouterr().out


def job(zoo, name, *, gib=1.0, **seconds):
    return zoo.Job(name, 0, {**seconds}, dict.fromkeys(seconds, gib))


class Call:
    """Options of a call, with a process that takes no time."""

    tiny, limit, blocks, share, untimed = False, 10, (2, 0.1), 2, None

    def __init__(self, deadline):
        self.deadline = deadline


@pytest.fixture
def made(zoo, monkeypatch, tmp_path):
    """Return what makes jobs on two GPUs without any, and returns the records and how many runs are left."""

    def finished(words, *, timeout, ranks, environment, stop):
        found = {"losses": [1.0], "step_ms": 1.0, "held_s": 1.0}
        assert environment["TORCHINDUCTOR_CACHE_DIR"] not in caches
        caches.append(environment["TORCHINDUCTOR_CACHE_DIR"])
        return f"Compile: 3 blocks\nRESULT {json.dumps(found)}\n"

    caches = []
    monkeypatch.setattr(zoo, "finished", finished)

    def make(jobs, deadline):
        output = tmp_path / "zoo.jsonl"
        left = zoo.Zoo(output, Call(deadline), ["0", "1"]).make(jobs)
        return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else [], left

    return make


def test_all_sides_of_a_line_run_on_one_gpu(made, zoo):
    names = [*zoo.LINES][:20]
    records, left = made([job(zoo, name, stock=1, preset=2) for name in names], 100)
    assert left == 0
    assert Counter(record["line"] for record in records) == dict.fromkeys(names, 2)
    places = {(record["line"], record["gpus"]) for record in records}
    assert len(places) == 20
    assert records[0]["notes"] == ["Compile: 3 blocks"]


def test_runs_share_a_gpu_as_far_as_its_memory_goes(made, zoo, monkeypatch):
    running, most = [], []
    finished = zoo.finished

    def slowly(words, **options):
        running.append(options["environment"]["CUDA_VISIBLE_DEVICES"])
        most.append(running.count("0"))
        time.sleep(0.05)
        running.remove(options["environment"]["CUDA_VISIBLE_DEVICES"])
        return finished(words, **options)

    monkeypatch.setattr(zoo, "finished", slowly)
    for gib, expected in ((1.0, 2), (zoo.EXPECTED_GIB, 1)):
        most.clear()
        _, left = made([job(zoo, name, gib=gib, stock=1) for name in [*zoo.LINES][:8]], 100)
        assert (left, max(most)) == (0, expected)


def test_a_line_that_cannot_end_in_time_is_not_begun(made, zoo):
    jobs = [job(zoo, "llama", stock=10, preset=200), job(zoo, "gpt2", stock=10)]
    records, left = made(jobs, 60)
    assert [record["line"] for record in records] == ["gpt2"]
    assert left == 2

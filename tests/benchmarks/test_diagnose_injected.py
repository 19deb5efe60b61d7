import json
import math
import subprocess
import sys

import pytest
import torch
import yaml

from lightning_ups.insight.diagnose import TREE


@pytest.fixture
def script(import_benchmark):
    return import_benchmark("diagnose_injected")


@pytest.fixture
def injected(import_benchmark):
    limits = torch.compiler.config  # one of its modules raises them for its process
    with limits.patch({name: getattr(limits, name) for name in ("recompile_limit", "accumulated_recompile_limit")}):
        yield import_benchmark("injected")


@pytest.mark.parametrize("power", [0.7, 1, 2])
def test_the_amount_is_found_whatever_the_shape_of_the_cost(script, power):
    asked = []

    def cost(amount):
        asked.append(amount)
        extra = (amount / 40) ** power
        return extra / (1 + extra)

    amount, share = script.found_amount(cost, script.Case("language", "a problem", 300))
    assert abs(share - 0.15) <= script.TOLERANCE
    assert amount in asked
    assert len(asked) <= script.TRIALS


def test_a_cost_that_begins_late_is_found_and_one_that_cannot_be_reached_ends(script):
    def late(amount):
        extra = max(0.0, amount - 25) / 40
        return extra / (1 + extra)

    assert abs(script.found_amount(late, script.Case("vision", "slow loader", 4))[1] - 0.15) <= script.TOLERANCE
    asked = []
    amount, share = script.found_amount(
        lambda amount: asked.append(amount) or 0.01, script.Case("vision", "a problem", 5, most=100)
    )
    assert (share, max(asked)) == (0.01, 100)
    assert amount in asked


def test_every_fault_has_a_configuration_with_its_modules(script, injected):
    for name, case in script.CASES.items():
        config = yaml.safe_load(yaml.safe_dump(script.config_of(name, 7.0, active=True)))
        arguments = config["model"]["init_args"]
        module = getattr(injected, config["model"]["class_path"].removeprefix("injected."))(**arguments)
        data = injected.Data(**config["data"]["init_args"])
        assert arguments == ({"fault": name, "amount": 7.0, "active": True} if case.named else {})
        if case.ranks == 1:
            loader = data.train_dataloader()
            losses = module.losses(loader.collate_fn([loader.dataset[index] for index in range(4)]))
            assert losses.isfinite().all()
            losses.mean().backward()
            assert all(weight.grad is not None for weight in module.parameters())


def test_an_inactive_fault_keeps_the_shapes(injected):
    for fault in ("no_tf32", "slow_optimizer"):
        model = injected.Language if fault == "no_tf32" else injected.Physics
        sizes = [[p.shape for p in model(fault, 3.0, active=active).parameters()] for active in (False, True)]
        assert sizes[0] == sizes[1]
    assert injected.batch_size("physics", "", 3.0) == injected.BATCH["physics"]
    assert injected.batch_size("physics", "tiny_batch", 3.0) == injected.BATCH["physics"] // 4


def test_the_first_finding_counts(script):
    diagnosis = {
        "findings": [{"name": "host sync", "lost": 0.2}, {"name": "slow loader", "lost": 0.1}],
        "sentence": "S",
    }
    assert not script.verdict("slow_loader", diagnosis)["correct"]
    assert script.verdict("host_sync", diagnosis)["correct"]
    assert script.verdict("host_sync", diagnosis)["also_named"] == ["slow loader"]
    healthy = script.verdict("healthy_vision", {"findings": [], "sentence": "Nothing stands out"})
    assert (healthy["named"], healthy["correct"]) == ("nothing", True)


@pytest.mark.parametrize("share", [1, 2, 3, 4])
def test_cases_are_spread_over_the_gpus(script, share):
    runs = script.runs_of([*script.CASES], share=share, words=["python"], seconds=9)
    assert {run.name for run in runs} == {*script.CASES}
    assert all(len(run.gpus) == script.CASES[run.name].ranks for run in runs)
    each = [sum(gpu in run.gpus for run in runs) for gpu in range(share)]
    assert max(each) <= math.ceil(17 / share) + 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fault_and_a_healthy_run_on_a_cpu(run_benchmark, tmp_path):
    words = ["--only", "slow_loader", "healthy_physics", "--minutes", "0.2", "--seconds", "0.3", "--output", "out"]
    words += ["--calibration", "200"]
    done = run_benchmark("diagnose_injected", *words)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["slow_loader", "healthy_physics"], done.stdout + done.stderr
    assert (tmp_path / "out" / "table.md").read_text() in done.stdout
    for line in lines:
        assert "failed" not in line, line
        found = json.loads((tmp_path / "out" / line["output"]).read_text())
        assert line["sentence"] == found["sentence"]
    assert lines[0]["share"] > 0
    again = run_benchmark("diagnose_injected", *words)
    assert "begins" not in again.stdout, "results of an earlier call stay"


def test_cases_take_turns_on_a_gpu(injected, monkeypatch, tmp_path):
    tried = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    monkeypatch.setenv(injected.TURNS, str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    injected.take_turn()
    assert not [*tmp_path.iterdir()], "rank 0 has taken the turn of the run"
    monkeypatch.setenv("LOCAL_RANK", "0")
    injected.take_turn()
    injected.take_turn()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["turn-0", "turn-1"]
    assert all(subprocess.run([sys.executable, "-c", tried, str(file)], check=False).returncode for file in files)
    for turn in injected._turns:
        turn.close()


def test_each_problem_is_one_that_diagnose_knows(script):
    assert {case.named for case in script.CASES.values() if case.named} <= {cause.name for cause in TREE}

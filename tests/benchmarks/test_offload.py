import json
import sys

import pytest
import torch

from lightning_ups.insight.memory.plan import Planner


@pytest.fixture
def offload(import_benchmark, monkeypatch):
    monkeypatch.setenv("UPS_BENCH_SIZE", "tiny")
    return import_benchmark("offload")


def test_what_cases_need_is_said_before_any_runs(offload, monkeypatch, tmp_path):
    assert offload.unmet(["plain", "together, 8-bit", "largest together"]) is None
    (tmp_path / "torchao.py").write_text("raise RuntimeError('another CUDA')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    assert "8-bit state needs torchao" in offload.unmet(["plain", "largest together, 8-bit"])
    assert offload.unmet(["plain", "largest together"]) is None
    monkeypatch.setattr(offload, "TOKENS", 3 * offload.SEQ)
    assert offload.unmet(["plain", "checkpointing"]) is None, "one microbatch of three"
    monkeypatch.setattr(offload, "TOKENS", 6 * offload.SEQ)
    assert "are not whole microbatches of 4 x 32 tokens, as 'together'" in offload.unmet(["together"])
    monkeypatch.setattr(offload, "SIZE", "7B")
    assert "UPS_BENCH_SIZE=7B is not a size" in offload.unmet(["plain"])


def test_a_size_for_gpus_needs_one_and_room_on_the_host(offload, monkeypatch):
    monkeypatch.setattr(offload, "TINY", False)
    monkeypatch.setattr(offload, "SIZE", "8B")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "the 8B GPT needs 1 GPU, and this machine has 0: UPS_BENCH_SIZE=tiny" in offload.unmet(["plain"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(offload, "HOST_GB", 1e9)
    assert "which has" in offload.unmet(["plain", "largest together"])
    assert offload.unmet(["plain", "largest plain"]) is None


def test_the_hosts_free_memory_is_what_the_container_may_take(offload, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:  200000000 kB\nHugePages_Total: 0\n")
    assert offload._host_gb(meminfo=meminfo, group=tmp_path) == pytest.approx(204.8)
    for name, text in {
        "memory.max": "137000000000\n",
        "memory.current": "60000000000\n",
        "memory.stat": "anon 1\ninactive_file 30000000000\nactive_file 8000000000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert offload._host_gb(meminfo=meminfo, group=tmp_path) == pytest.approx(115)
    (tmp_path / "memory.max").write_text("max\n")
    assert offload._host_gb(meminfo=meminfo, group=tmp_path) == pytest.approx(204.8)
    assert offload._host_gb(meminfo=tmp_path / "none", group=tmp_path / "none") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_state_is_where_a_case_says_and_losses_are_the_same(offload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, both = offload.CASES["checkpointing"](), offload.CASES["optimizer offload, checkpointing"]()
    assert plain["losses"] == both["losses"]
    assert len(plain["losses"]) == offload.STEPS
    assert plain["state_on_host_gib"] == 0
    assert both["state_on_host_gib"] == plain["state_on_device_gib"] > 0
    assert both["state_on_device_gib"] < 0.4 * plain["state_on_device_gib"]
    assert both["tok_s"] > 0


def test_a_trial_has_the_number_of_blocks_and_keeps_what_the_host_has_no_room_for(offload, monkeypatch):
    seen = {}
    monkeypatch.setattr(offload, "run", lambda case, **options: seen.update(options, case=case) or {})
    monkeypatch.setattr(offload, "HOST_GB", 1e-3)
    assert offload.CASES["fits together, 8-bit 3"]() == {"layers": 3}
    assert seen["layers"] == 3
    offloads = [make() for make in seen["case"].callbacks if make.func is offload.OptimizerOffload]
    assert 0.5 < offloads[0].resident < 1


def test_tokens_a_second_are_of_the_tokens_that_a_run_had(offload):
    clock = offload.Clock(tokens=offload.SEQ)
    clock.times = [0.0, 5.0, 7.0, 9.0]
    assert clock.figures()["tok_s"] == offload.SEQ / 2


@pytest.mark.parametrize(("largest", "trials"), [(66, 2), (67, 4), (63, 4), (37, 10), (90, 10), (200, 9)])
def test_the_search_finds_the_largest(offload, monkeypatch, largest, trials):
    def trial(name):
        layers = int(name.rpartition(" ")[2])
        return {"layers": layers} if layers <= largest else {"error": "out of memory"}

    monkeypatch.setattr(offload, "_trial", trial)
    monkeypatch.setattr(offload, "TINY", False)
    found = offload.largest("together")
    assert found["layers"] == largest
    assert len(found["tried"]) <= trials


def test_a_search_that_is_ended_has_what_it_found_until_then(offload, monkeypatch, capsys, tmp_path):
    def trial(name):
        layers = int(name.rpartition(" ")[2])
        if layers > 68:
            raise KeyboardInterrupt
        return {"layers": layers}

    monkeypatch.setattr(offload, "_trial", trial)
    monkeypatch.setattr(offload, "TINY", False)
    monkeypatch.setenv(offload.SAYS, str(tmp_path / "said"))
    with pytest.raises(KeyboardInterrupt):
        offload.largest("together")
    found = offload.result_of(capsys.readouterr().out)
    assert found["layers"] == max(map(int, found["tried"])) == 67
    assert [line.rpartition(": ")[2] for line in (tmp_path / "said").read_text().splitlines()] == ["fits"] * 2


def test_out_of_memory_is_a_result_with_what_the_forensics_say(offload, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    forward = offload.Module.training_step

    def step(self, batch, batch_idx):
        if batch.is_meta or "Fake" in type(batch).__name__:  # the forensics plan
            return forward(self, batch, batch_idx)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(offload.Module, "training_step", step)
    monkeypatch.setattr(Planner, "variants", lambda self: iter(()))  # each would be rehearsed
    found = offload.CASES["plain"]()
    assert found["error"] == "out of memory: OutOfMemoryError"
    assert found["forensics"][0].endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert any("By plan, this run needs" in line for line in found["forensics"])
    monkeypatch.setattr(offload.Module, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        offload.CASES["plain"]()


@pytest.mark.slow
def test_the_script_runs_from_one_command(run_benchmark, tmp_path):
    names = ["update on the CPU, checkpointing", "activation offload", "8-bit, no masters, checkpointing"]
    done = run_benchmark("offload", "--cases", *names, "--output", "out", UPS_BENCH_SIZE="tiny")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [result["case"] for result in results] == names
    assert all(result["tok_s"] > 0 for result in results), results

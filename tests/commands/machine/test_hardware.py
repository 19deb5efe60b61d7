import pytest
import torch

from lightning_ups._compat.torch import probes
from lightning_ups.commands.machine import hardware
from lightning_ups.commands.machine.hardware import TECHNIQUES, Finding, Technique, examine
from lightning_ups.commands.machine.packages import KNOWN, Machine, Package
from tests.commands.here import here

ROWS = {technique.name: technique for technique in TECHNIQUES}
GPUS = {"V100": (7, 0), "A100": (8, 0), "L40S": (8, 9), "H100": (9, 0), "B200": (10, 0)}


def machine(gpu=None, *, count=1, packages=None, **options):
    gpus = [{"index": i, "name": gpu, "capability": [*GPUS[gpu]]} for i in range(count)] if gpu else []
    every = {known.name: Package(version="1") for known in KNOWN} | {"torch": Package(version="2.11.0+cu130")}
    return Machine(host={}, gpus=gpus, cuda="13.0", packages=every if packages is None else packages, **options)


@pytest.fixture
def probes_pass(monkeypatch):
    """The hardware of a machine that is not here."""
    for name in (n for n, f in vars(probes).items() if getattr(f, "__module__", "") == probes.__name__):
        monkeypatch.setattr(probes, name, lambda *_, **__: None)
    monkeypatch.setattr(hardware, "attention_kernel_error", lambda *_, **__: None)


# Seed of the table: what each generation can do.
@pytest.mark.parametrize(
    ("name", "runs_on"),
    [
        ("bf16", "A100 L40S H100 B200"),
        ("tf32", "A100 L40S H100 B200"),
        ("float8-tensorwise", "L40S H100 B200"),
        ("float8-rowwise", "L40S H100 B200"),
        ("te-fp8", "L40S H100 B200"),
        ("mxfp8", "B200"),
        ("flash-attention-2", "V100 A100 L40S H100 B200"),
        ("flash-attention-3", "H100"),
        ("flash-attention-4", "H100 B200"),
        ("compile-gpu", "V100 A100 L40S H100 B200"),
        ("cuda-graphs", "V100 A100 L40S H100 B200"),
    ],
)
@pytest.mark.usefixtures("probes_pass")
def test_each_generation_runs_what_it_can(name, runs_on):
    for gpu in GPUS:
        found = examine(ROWS[name], machine(gpu))
        assert (found.verdict == "runs") == (gpu in runs_on.split()), (gpu, found)
    assert name == "bf16" or examine(ROWS[name], machine()).verdict != "runs"


def test_every_row_can_be_asked_of_this_machine():
    for technique in TECHNIQUES:
        found = examine(technique, here())
        assert found.verdict in ("runs", "limited", "no")
        assert found.verdict == "runs" or found.why, technique.name
    assert len(ROWS) == len(TECHNIQUES), "a name is given once"


def test_a_probe_that_fails_is_quoted():
    def fails(_):
        raise RuntimeError("no kernel image is available\nmore")

    row = Technique(name="x", title="x", group="g", check=fails)
    assert examine(row, machine()) == Finding(verdict="no", why="tried, and it failed: no kernel image is available")


@pytest.mark.usefixtures("probes_pass")
def test_a_missing_package_names_its_extra_and_a_broken_one_its_error():
    absent = examine(ROWS["float8-tensorwise"], machine("H100", packages={}))
    assert absent == Finding(verdict="no", why="torchao is not installed", cure="pip install 'torchao>=0.17'")
    broken = {"torch": Package(version="2.11.0+cu130"), "torchao": Package(version="0.1", error="undefined symbol")}
    found = examine(ROWS["float8-tensorwise"], machine("H100", packages=broken))
    assert "torchao 0.1 does not load: undefined symbol" in found.why
    assert found.cure.startswith("reinstall it for torch 2.11.0+cu130: pip install")


@pytest.mark.usefixtures("probes_pass")
@pytest.mark.parametrize("name", ["fsdp2", "simple-fsdp"])
def test_several_gpus_and_one(name):
    assert examine(ROWS[name], machine("H100")).verdict == "limited"
    assert examine(ROWS[name], machine("H100", count=2)).verdict == "runs"


@pytest.mark.usefixtures("probes_pass")
def test_simple_fsdp_falls_with_the_compiler(monkeypatch):
    def fails(_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(probes, "triton_kernel", fails)
    found = examine(ROWS["simple-fsdp"], machine("H100", count=2))
    assert found.verdict == "no"
    assert "no compiler" in found.why
    assert "apt install" in found.cure
    assert examine(ROWS["flex-attention"], machine("H100")).verdict == "no"


@pytest.mark.usefixtures("probes_pass")
def test_bfloat16_that_is_emulated_or_converted_is_limited(monkeypatch):
    assert examine(ROWS["bf16"], machine("V100")).verdict == "limited"
    for computes, verdict in ((False, "limited"), (True, "runs")):
        monkeypatch.setattr(probes, "cpu_computes_bfloat16", lambda computes=computes: computes)
        assert examine(ROWS["bf16"], machine()).verdict == verdict


def test_a_gpu_that_torch_does_not_see_has_a_cure():
    hidden = machine(has_nvidia=True)
    assert "CUDA_VISIBLE_DEVICES" in examine(ROWS["tf32"], hidden).cure
    build = Machine(host={}, has_nvidia=True, cuda=None)
    assert "CPU build" in examine(ROWS["tf32"], build).cure
    assert examine(ROWS["tf32"], machine()).cure == ""


@pytest.mark.gpu(capability=(9, 0))
def test_on_a_hopper_gpu_the_probes_agree_with_the_table():
    for name in ("bf16", "tf32", "compile-gpu", "cuda-graphs", "flash-attention-2", "cudnn-attention", "nccl"):
        assert examine(ROWS[name], here()).verdict == "runs", examine(ROWS[name], here())
    assert examine(ROWS["optimizer-offload"], here()).verdict == "runs"
    if here().packages.get("torchao", Package(version=None)).version:
        assert examine(ROWS["float8-tensorwise"], here()).verdict == "runs"
        assert examine(ROWS["float8-rowwise"], here()).verdict == "runs"
    assert examine(ROWS["mxfp8"], here()).verdict == ("runs" if torch.cuda.get_device_capability() >= (10, 0) else "no")

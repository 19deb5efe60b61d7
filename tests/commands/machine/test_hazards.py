import pytest

from lightning_ups.commands.machine import hazards
from lightning_ups.commands.machine.hazards import warnings_for
from lightning_ups.commands.machine.packages import Machine, Package

GIB = 1 << 30
FINE = {"usable_cores": 4, "shared_memory": 16 * GIB}


def machine(**options):
    return Machine(
        **{"host": FINE, "packages": {"torch": Package(version="2.13.0+cpu")}, "threads": 4, "cuda": "13.0"} | options
    )


def gpu(index=0, name="H100", **state):
    return {"index": index, "name": name, "capability": [9, 0]} | state


def test_a_sound_machine_has_none():
    assert warnings_for(machine()) == []
    assert warnings_for(machine(gpus=[gpu(slowed_by=["power limit"])], has_nvidia=True)) == []
    assert warnings_for(machine(host=FINE | {"shared_memory": None})) == []


@pytest.mark.parametrize("package", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_the_stolen_releases(monkeypatch, package, version):
    monkeypatch.setattr(hazards, "installed", lambda name: version if name == package else "2.6.6")
    (advice,) = warnings_for(machine())
    assert advice.what == f"{package} {version} is installed."
    assert "change every secret" in advice.cure


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0.dev20260101+cu130", "3.0.1"])
def test_a_torch_beyond_the_tested_ones(version):
    (advice,) = warnings_for(machine(packages={"torch": Package(version=version)}))
    assert version in advice.what
    assert "'torch<2.15'" in advice.cure


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, "NCCL_ALGO=Ring, NCCL_PROTO=LL is set."),
        ({"NCCL_P2P_DISABLE": "0"}, "NCCL_P2P_DISABLE=0 is set."),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1 is set."),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, None),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "TORCH_DISTRIBUTED_DEBUG=DETAIL is set."),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, None),
        ({"TORCHDYNAMO_DISABLE": "1"}, "TORCHDYNAMO_DISABLE=1 is set."),
        ({"TORCH_INDUCTOR_DISABLE_CUDAGRAPHS": "1"}, "TORCH_INDUCTOR_DISABLE_CUDAGRAPHS=1 is set."),
        ({"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"}, None),
    ],
)
def test_variables(environment, what):
    assert [advice.what for advice in warnings_for(machine(environment=environment))] == ([what] if what else [])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"has_nvidia": True, "cuda": None}, "torch 2.13.0+cpu is a CPU build"),
        ({"has_nvidia": True}, "built for CUDA 13.0, sees none"),
        ({"threads": 64}, "64 threads on 4 usable cores"),
        ({"host": FINE | {"shared_memory": 64 << 20}}, "/dev/shm has 64 MiB"),
        ({"gpus": [gpu(), gpu(1, slowed_by=["too hot", "power limit"])]}, "GPU 1 is slowed: too hot and power limit"),
        ({"gpus": [gpu(), gpu(1, "A100")]}, "different kinds are visible: H100, A100"),
    ],
    ids=str,
)
def test_machines(options, what):
    (advice,) = warnings_for(machine(**options))
    assert what in advice.what

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_ups._compat import copy_engines
from lightning_ups._compat.copy_engines import gather_by_copy_engines, lacks_copy_engines


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(copy_engines.nccl, "version", lambda: (2, 27, 5))
    assert "NCCL 2.27.5" in lacks_copy_engines()
    monkeypatch.setattr(copy_engines.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(copy_engines.dist, "ProcessGroupNCCL", type("Known", (), {"NCCL_CTA_POLICY_ZERO": 2}), False)
    assert lacks_copy_engines() is None
    monkeypatch.setattr(copy_engines.dist, "ProcessGroupNCCL", object)
    assert "this torch" in lacks_copy_engines()


def trained(model, *, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step + 10 * dist.get_rank())
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def gathered_on_a_rank():
    """Train with memory of the host in the place of that which ranks know; return what was asked of it."""
    expected, said, pool = trained(sharded()), [], []

    @contextmanager
    def use_mem_pool(asked):
        pool.append(asked)
        yield
        pool.pop()

    empty = torch.empty

    def noted(size, **options):
        tensor = empty(size, **options)
        if pool:
            said.append(("allocate", tensor.data_ptr(), pool[-1]))
        return tensor

    def meet(tensor, group):
        said.append(("meet", tensor.data_ptr(), group))

    with (
        patch.object(copy_engines.symmetric, "set_backend", lambda name: said.append(("backend", name))),
        patch.object(copy_engines.symmetric, "get_mem_pool", lambda device: f"pool of {device.type}"),
        patch.object(copy_engines.symmetric, "rendezvous", meet),
        patch.object(copy_engines.torch.cuda, "use_mem_pool", use_mem_pool),
        patch.object(copy_engines.torch, "empty", noted),
    ):
        model = sharded()
        gather_by_copy_engines(module for module in model.modules() if isinstance(module, FSDPModule))
        losses = trained(model)
    return losses == expected, said, dist.group.WORLD.group_name


def test_every_gather_is_in_memory_that_ranks_have_met_over(ranks):
    same, said, name = ranks(gathered_on_a_rank)
    assert same
    assert said[0] == ("backend", "NCCL")
    gathers = [line for line in said if line[0] == "allocate"]
    assert len(gathers) >= 9, "three blocks in three steps"
    assert {pool for _, _, pool in gathers} == {"pool of cpu"}
    meetings = [line for line in said if line[0] == "meet"]
    assert [pointer for _, pointer, _ in meetings] == [pointer for _, pointer, _ in gathers]
    assert {group for _, _, group in meetings} == {name}


RUN = """
import json
from unittest.mock import patch
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.profiler import ProfilerActivity, profile
from lightning_ups.data import RandomTokens
from lightning_ups.models import GPTModule
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy

def train(precision, **options):
    seed_everything(0, verbose=False)
    module, losses = GPTModule(size="150M", schedule="constant", warmup_steps=1), []
    step = module.training_step
    module.training_step = lambda *args: losses.append(step(*args)) or losses[-1]
    trainer = Trainer(accelerator="gpu", devices=2, strategy=FSDP2Strategy(copy_engines=True, **options),
                      plugins=[precision], max_steps=6, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trainer.fit(module, RandomTokens(vocab_size=50304, seq_len=256, batch_size=2))
    kernels = {event.key for event in seen.key_averages() if "AllGather" in event.key}
    return [loss.item() for loss in losses], sorted(kernels)

torch.use_deterministic_algorithms(True, warn_only=True)
found = {}
for name, precision in (("bf16", BF16Precision), ("float8", Float8Precision)):
    for options in ({"sharding": "full"}, {"sharding": "gradients"}):
        by_engines = train(precision(), **options)
        with patch("lightning_ups.strategies.fsdp2.gather_by_copy_engines"):
            plain = train(precision(), **options)
        found[f"{name} {options}"] = [by_engines, plain]
if torch.distributed.get_rank() == 0:
    print(json.dumps(found))
"""


@pytest.mark.gpu(count=2)
def test_on_two_gpus_no_kernel_gathers_and_not_a_bit_changes(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(launch, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for (losses, kernels), (plain_losses, plain_kernels) in found.values():
        assert losses == plain_losses
        assert losses[0] != losses[-1]
        assert not kernels
        assert plain_kernels

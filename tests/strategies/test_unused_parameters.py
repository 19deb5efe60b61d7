"""What only some devices give a gradient: trained as by DDP where that is allowed, and refused where it is not."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_ups.strategies import Communication, FSDP2Strategy
from tests.strategies.cases import WIDTH, Block, Case, data, weights_of
from tests.toys import trainer

DDP = "ddp_find_unused_parameters_true"


class Uneven(Case):
    def configure_optimizers(self):  # in small steps, since what rounding changes is to stay small
        return torch.optim.SGD(self.parameters(), lr=0.002, momentum=0.9)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x):
        return self.heads[dist.get_rank() % 2](x)


class Heads(Uneven):
    """A task for each device, with a head of its own; the heads are alike, and in one group."""

    def build(self):
        super().build()
        self.head = Tasks()


class Dropped(Uneven):
    """All devices run all blocks, and each drops what another one gave."""

    def run(self, x):
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = x if i == dist.get_rank() % 2 else y
        return self.head(x)


class DroppedByOne(Uneven):
    """One device drops what the first of four blocks gave, and the other nothing."""

    def build(self):
        super().build()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def run(self, x):
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = x if self.drops(i) else y
        return self.head(x)

    def drops(self, i):
        return dist.get_rank() % 2 == 0 and i < 2


class DroppedByTurns(DroppedByOne):
    """One device drops what the first two of four blocks gave, and the other what the last two did."""

    def drops(self, i):
        return i // 2 == dist.get_rank() % 2


class Twice(Dropped):
    """All devices run all blocks twice."""

    def run(self, x):
        for i, layer in enumerate([*self.layers, *self.layers]):
            y = layer(x)
            x = x if i % 2 == dist.get_rank() % 2 else y
        return self.head(x)


class Penalised(DroppedByTurns):
    """Every third step penalises the gradient for its input."""

    def loss(self, x):
        if len(self.losses) % 3:
            return super().loss(x)
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.run(x).sum(), x, create_graph=True)
        return super().loss(x) + slope.square().mean()


class LeftOut(Uneven):
    """Each device leaves out another block."""

    def run(self, x):
        for i, layer in enumerate(self.layers):
            x = x if i == dist.get_rank() % 2 else layer(x)
        return self.head(x)


class Idle(Uneven):
    """No device uses a block in every other step, nor a scalar."""

    def build(self):
        super().build()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.without = []

    def run(self, x):
        x, y = self.layers[0](x), self.layers[1](x)
        return self.head(x + y * self.gain if len(self.losses) % 2 == 0 else x)

    def on_before_optimizer_step(self, optimizer):
        self.without += [name for name, p in self.named_parameters() if p.grad is None]


class Scalar(Uneven):
    """A scalar, which stays whole, is used by the first device alone."""

    def build(self):
        super().build()
        self.gain = nn.Parameter(torch.tensor(1.0))

    def run(self, x):
        x = self.layers[0](x)
        return self.head(x + 0.1 * self.gain if dist.get_rank() == 0 else x)


CASES = {
    kind.__name__: kind
    for kind in (Heads, Dropped, DroppedByOne, DroppedByTurns, Twice, Penalised, LeftOut, Idle, Scalar)
}
TRAINED = [name for name in CASES if name != "LeftOut"]


def trained(tmp_path, name, strategy, accumulate=1, accelerator="cpu"):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)  # that of the sampler, whatever ran in this process before
    model = CASES[name]()
    chosen = (
        FSDP2Strategy(communication=Communication(timeout_minutes=0.5), **strategy)
        if isinstance(strategy, dict)
        else strategy
    )
    fit = trainer(
        tmp_path,
        strategy=chosen,
        devices=dist.get_world_size(),
        epochs=4,
        accelerator=accelerator,
        accumulate_grad_batches=accumulate,
    )
    fit.fit(model, DataLoader(data(), batch_size=2))
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    weights = {name: weight.cpu() for name, weight in weights_of(model).items()}
    return weights, sharded, getattr(model, "without", [])


def assert_as_ddp(ours, ddp):
    (mine, sharded, without), (theirs, _, theirs_without) = ours, ddp
    assert sharded
    assert mine.keys() == theirs.keys()
    for key, weight in mine.items():
        assert weight.isfinite().all()
        torch.testing.assert_close(weight, theirs[key], rtol=1e-5, atol=1e-6)
    assert without == theirs_without


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("options", [{}, {"sharding": "gradients"}, {"sharding": "none"}])
def test_it_trains_as_ddp(ranks, tmp_path, name, options):
    options = {"unused_parameters": True, **options}
    assert_as_ddp(ranks(trained, tmp_path, name, options), ranks(trained, tmp_path, name, DDP))


@pytest.mark.parametrize("options", [{"sync": "last"}, {"sync": "every"}, {"sharding": "none"}])
@pytest.mark.parametrize("name", ["Heads", "Twice", "Idle"])
def test_an_accumulation_trains_as_ddp(ranks, tmp_path, name, options):
    options = {"unused_parameters": True, **options}
    assert_as_ddp(ranks(trained, tmp_path, name, options, 2), ranks(trained, tmp_path, name, DDP, 2))


def test_copies_left_out_blocks_train_as_ddp(ranks, tmp_path):
    options = {"sharding": "none", "unused_parameters": True}
    assert_as_ddp(ranks(trained, tmp_path, "LeftOut", options), ranks(trained, tmp_path, "LeftOut", DDP))


def test_parameters_stay_gathered_with_it():
    assert FSDP2Strategy(unused_parameters=True).settings["reshard_after_forward"] is False


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["Heads", "Dropped", "Idle"])
def test_sharded_copies_train_as_ddp(four_ranks, tmp_path, name, accumulate):
    options = {"replicate_size": 2, "unused_parameters": True}
    ours, ddp = (four_ranks(trained, tmp_path, name, each, accumulate) for each in (options, DDP))
    assert_as_ddp(ours, ddp)


@pytest.mark.parametrize("name", ["Heads", "Dropped"])
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_it_is_refused_where_it_is_not_allowed(ranks, tmp_path, name, sharding):
    with pytest.raises(AssertionError, match=r"in a different order.*FSDP2Strategy\(unused_parameters=True\)"):
        ranks(trained, tmp_path, name, {"sharding": sharding, "sigterm_every": 1})


def test_copies_that_leave_out_blocks_are_refused(ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"sharding='none', unused_parameters=True"):
        ranks(trained, tmp_path, "LeftOut", {"sharding": "none"})


RUN = """
import json, sys
import torch
import torch.distributed as dist
from tests.strategies.test_unused_parameters import DDP, TRAINED, assert_as_ddp, trained

accelerator, folder = sys.argv[1:]
dist.init_process_group("gloo" if accelerator == "cpu" else "cpu:gloo,cuda:nccl")
if accelerator == "gpu":
    torch.cuda.set_device(dist.get_rank())
same = []
for options in ({}, {"sharding": "gradients"}, {"sharding": "none"}):
    for name in TRAINED + ["LeftOut"] * (options.get("sharding") == "none"):
        ours = trained(folder, name, {"unused_parameters": True, **options}, 1, accelerator)
        assert_as_ddp(ours, trained(folder, name, DDP, 1, accelerator))
        same.append([name, options])
if dist.get_rank() == 0:
    print(json.dumps(same))
"""


@pytest.mark.parametrize(
    "accelerator", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu(count=2))]
)
def test_processes_that_torchrun_starts_train_as_ddp(tmp_path, accelerator):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*launch, accelerator, str(tmp_path)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout.splitlines()[-1])) == 25

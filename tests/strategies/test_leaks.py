"""What a run leaves behind when its trainer and its module are dropped: nothing."""

import gc
import warnings
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, Compile, OptimizerOffload
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from tests.strategies.cases import two_ranks
from tests.toys import trainer

STRATEGIES = {
    "full": FSDP2Strategy,
    "gradients": partial(FSDP2Strategy, sharding="gradients"),
    "copies": partial(FSDP2Strategy, replicate_size=2),
    "simple": SimpleFSDPStrategy,
    "auto": lambda: "auto",
}
PLUGINS = {
    "stock": lambda: {},
    "bf16": lambda: {"plugins": [BF16Precision()]},
    "float8": lambda: {"plugins": [Float8Precision(emulate=True, head=True)]},
    "recomputed": lambda: {"callbacks": [ActivationCheckpoint(save="nothing")]},
    "compiled": lambda: {"callbacks": [Compile(backend="eager")]},
    "offloaded": lambda: {"callbacks": [OptimizerOffload()]},
}
KINDS = ("Trainer", "Wide", "FSDPParamGroup", "AdamW", "ProcessGroup")


class Wide(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def training_step(self, batch, _):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def validation_step(self, batch, index):
        self.training_step(batch, index)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def left():
    gc.collect()
    types = Counter(map(type, gc.get_objects()))
    found = {kind: sum(count for t, count in types.items() if t.__name__ == kind) for kind in KINDS}
    found["FSDPModule"] = sum(count for t, count in types.items() if issubclass(t, FSDPModule))
    found["groups"] = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    return found


def run(tmp_path, strategy, plugins, devices):
    if plugins == "compiled":
        torch.compiler.reset()  # which forgets how DTensors are sharded, too: elsewhere it costs a second
    batches = DataLoader(torch.randn(16, 16), batch_size=16)
    options = PLUGINS[plugins]()
    lightning = trainer(tmp_path, strategy=STRATEGIES[strategy](), devices=devices, epochs=2, **options)
    model = Wide()
    lightning.validate(model, batches, verbose=False)
    lightning.fit(model, batches, batches)
    return [weakref.ref(thing) for thing in (lightning, lightning.strategy, lightning.precision_plugin, model)]


def counts(tmp_path, strategy, plugins, devices):
    """Return what is left after each of two runs; what all runs share, the first has made."""
    found = []
    gc.collect()
    gc.freeze()  # what others have made: to look through it takes longer than the runs
    for _ in range(2):
        run(tmp_path, strategy, plugins, devices)
        found.append(left())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plugins", PLUGINS)
def test_runs_in_one_process_leave_nothing(tmp_path, plugins):
    left_behind = run(tmp_path, "auto", plugins, 1)
    gc.collect()
    assert [thing() for thing in left_behind] == [None] * 4


@two_ranks
@pytest.mark.parametrize(
    ("strategy", "plugins"),
    [("full", "stock"), ("gradients", "stock"), ("copies", "stock"), ("simple", "compiled")]
    + [("full", plugins) for plugins in PLUGINS if plugins != "stock"],
)
def test_runs_on_two_ranks_leave_nothing(tmp_path, strategy, plugins):
    warnings.simplefilter("ignore")
    first, second = counts(tmp_path, strategy, plugins, 2)
    assert first == second


class Holding(Callback):
    """Counts the parameters as they were built that are there when training begins."""

    def __init__(self, module):
        self.built = [weakref.ref(parameter) for parameter in module.parameters()]
        self.left = None

    def on_train_start(self, *_):
        self.left = sum(parameter() is not None for parameter in self.built)


@two_ranks
@pytest.mark.parametrize("strategy", ["full", "gradients", "copies", "simple"])
def test_what_was_sharded_goes_when_it_is_and_not_when_garbage_is_collected(tmp_path, strategy):
    warnings.simplefilter("ignore")
    module = Wide()
    holding = Holding(module)
    # Else inductor would compile it, whose kernels take seconds.
    callbacks = [holding, *([Compile(backend="eager")] if strategy == "simple" else [])]
    lightning = trainer(tmp_path, strategy=STRATEGIES[strategy](), devices=2, epochs=1, callbacks=callbacks)
    gc.disable()  # their memory must not wait for that
    try:
        lightning.fit(module, DataLoader(torch.randn(16, 16), batch_size=16))
    finally:
        gc.enable()
    assert holding.left == 0

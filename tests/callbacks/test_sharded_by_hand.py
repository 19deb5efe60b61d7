"""Callbacks on modules that their users shard in `configure_model`, under Lightning's own ModelParallelStrategy."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile, OptimizerOffload, StepGuard
from tests.toys import Net, loader, trainer


class ByHand(Net):
    def configure_model(self):
        meshes = self.device_mesh
        for layer in [] if isinstance(self.layers[0][0].weight, DTensor) else self.layers:
            if meshes["tensor_parallel"].size() > 1:
                parallelize_module(layer, meshes["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            else:
                fully_shard(layer, mesh=meshes["data_parallel"])


def losses(tmp_path, split, *callbacks, **options):
    seed_everything(0, verbose=False)
    module = ByHand()
    strategy = ModelParallelStrategy(data_parallel_size=2 // split, tensor_parallel_size=split)
    run = trainer(tmp_path, strategy=strategy, devices=2, epochs=3, callbacks=callbacks, **options)
    run.fit(module, loader(4))
    return torch.stack(module.losses)


BLOCKS = ["layers.*"]
CALLBACKS = {
    "compile": (Compile(blocks=BLOCKS, backend="aot_eager"),),
    "recompute": (ActivationCheckpoint(blocks=BLOCKS, save="nothing"),),
    "optimizer": (OptimizerOffload(chunk_mb=0.001),),
    "activations": (ActivationOffload(blocks=BLOCKS, min_mb=0),),
    "guard": (StepGuard(on_nonfinite="skip"),),
    "all": (
        Compile(blocks=BLOCKS, backend="aot_eager"),
        ActivationCheckpoint(blocks=BLOCKS, save="nothing"),
        OptimizerOffload(chunk_mb=0.001),
        StepGuard(on_nonfinite="skip"),
    ),
}
SPLIT = [name for name in CALLBACKS if name != "activations"]  # tensors of a class of their own stay


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("split", "names"), [(1, [*CALLBACKS]), (2, SPLIT)], ids=["fully_shard", "tensor parallel"])
def test_losses_are_those_without(ranks, tmp_path, split, names):
    right = ranks(losses, tmp_path, split)
    assert len(set(right.tolist())) == len(right)
    for name in names:
        torch.testing.assert_close(ranks(losses, tmp_path, split, *CALLBACKS[name]), right, rtol=1e-6, atol=0, msg=name)

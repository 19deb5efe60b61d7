import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm, grads
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import Compile
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy

TO_TENSOR = LightningModule._LightningModule__to_tensor


class Watched(LightningModule):
    """Logs the norms of its gradients, as Lightning's documentation shows it, and that of a weight."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.types = set()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, 2)
        self.log_dict(norms)
        self.log("norm", norms["grad_2.0_norm_total"])

    def on_train_batch_end(self, *args):
        self.log("weight", self.net[0].weight.norm(), on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.types |= {type(value) for value in self.trainer.callback_metrics.values()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def watched(tmp_path, kind):
    seed_everything(3, verbose=False)
    module, best = Watched(), ModelCheckpoint(tmp_path / "kept", monitor="weight", filename="{weight:.3f}")
    strategy = {"fsdp2": FSDP2Strategy, "simple": SimpleFSDPStrategy}[kind]() if dist.is_initialized() else "auto"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    lightning = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_epochs=2,
        callbacks=[EarlyStopping("weight"), best, *([Compile(backend="aot_eager")] if kind == "simple" else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    lightning.fit(module, DataLoader(data, batch_size=8 // ranks))
    found = {name: value.item() for name, value in lightning.callback_metrics.items()}
    kept = LightningModule._LightningModule__to_tensor is TO_TENSOR, grads.torch is torch
    return found, module.types, type(best.best_model_score), kept


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fsdp2", "simple"])
def test_norms_of_shards_are_logged_as_those_of_whole_tensors(ranks, tmp_path, kind):
    right, *_ = watched(tmp_path / "one", None)
    found, types, score, kept = ranks(watched, tmp_path / "two", kind)
    assert found == pytest.approx(right, rel=1e-4)
    assert found["norm"] > 0
    assert types == {torch.Tensor}
    assert score is torch.Tensor
    assert kept == (True, True), "Lightning has its own again"

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_ups.callbacks import OptimizerOffload
from lightning_ups.precision import BF16WeightsPrecision
from lightning_ups.strategies import FSDP2Strategy
from tests.toys import Net, loader, trainer


class Rounding(torch.optim.SGD):
    """Says of itself that it rounds by chance, as torchao's optimizers do."""

    bf16_stochastic_round = True


class Low(Net):
    def __init__(self, kind=Rounding):
        super().__init__()
        self.kind, self.types = kind, set()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.types.add(loss.dtype)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.types |= {p.dtype for p in self.parameters()} | {p.grad.dtype for p in self.parameters()}

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.05)


def fit(tmp_path, module, *, callbacks=(), **options):
    trainer(tmp_path, plugins=[BF16WeightsPrecision()], callbacks=callbacks, **options).fit(module, loader())
    return module


def test_weights_and_gradients_are_bfloat16_and_the_loss_is_not(tmp_path):
    module = fit(tmp_path, Low())
    assert module.types == {torch.bfloat16, torch.float32}
    assert all(p.dtype is torch.bfloat16 for p in module.parameters())
    assert module.losses[-1] < module.losses[0]
    assert module.losses[0].dtype is torch.float32


def test_what_it_did_is_said(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, Low())
    line = "Precision: BF16WeightsPrecision computes in bfloat16, by bfloat16 weights"
    assert caplog.messages.count(line) == 1, "and not in every step"


def test_statistics_stay_in_float32(tmp_path):
    class Normed(Low):
        def __init__(self):
            super().__init__()
            self.layers[1].append(nn.BatchNorm1d(8))

    module = Normed()
    BF16WeightsPrecision().convert_module(module)
    assert module.layers[1][-1].weight.dtype is torch.float32
    assert module.layers[1][0].weight.dtype is torch.bfloat16


def refusal(tmp_path, strategy, devices):
    chosen = FSDP2Strategy() if strategy == "fsdp2" else strategy
    with pytest.raises(ValueError, match=r"SGD steps bfloat16 .*or another of its kind, or BF16Precision\(\)\.$"):
        fit(tmp_path, Low(torch.optim.SGD), strategy=chosen, devices=devices)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_an_optimizer_that_would_lose_small_steps_is_refused(tmp_path, strategy, ranks):
    if strategy == "auto":
        refusal(tmp_path, strategy, 1)
    else:
        ranks(refusal, tmp_path, strategy, 2)


def on_ranks(tmp_path, strategy):
    chosen = FSDP2Strategy() if strategy == "fsdp2" else strategy
    module = fit(tmp_path, Low(), strategy=chosen, devices=2)
    return [loss.item() for loss in module.losses], [str(t) for t in module.types]


def test_two_ranks(ranks, tmp_path):
    replicated, types = ranks(on_ranks, tmp_path, "ddp")
    sharded, sharded_types = ranks(on_ranks, tmp_path, "fsdp2")
    assert sorted(types) == sorted(sharded_types) == ["torch.bfloat16", "torch.float32"]
    assert sharded == pytest.approx(replicated, rel=0.05)
    assert sharded[-1] < sharded[0]


class Drift(LightningModule):
    """Each step is a quarter of what bfloat16 can tell apart at one."""

    def __init__(self, rounds):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rounds = nn.Linear(64, 256, bias=False), rounds
        nn.init.ones_(self.layer.weight)

    def training_step(self, batch, _):
        return self.layer(batch).float().sum()

    def configure_optimizers(self):
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(self.parameters(), lr=2**-10, weight_decay=0.0, bf16_stochastic_round=True)
        optimizer.bf16_stochastic_round = self.rounds  # which the precision would refuse from the start
        return optimizer


def drifted(tmp_path, rounds, callbacks=()):
    module = Drift(rounds)
    precision = BF16WeightsPrecision()
    if not rounds:
        module.layer.to(torch.bfloat16)
        precision = "bf16-true"
    data = torch.utils.data.DataLoader(torch.ones(32, 64), batch_size=1)
    options = {"plugins": [precision]} if rounds else {"precision": precision}
    with torch.compiler.set_stance("force_eager"):
        trainer(tmp_path, callbacks=callbacks, epochs=1, **options).fit(module, data)
    return module.layer.weight.float().mean().item()


def test_steps_too_small_to_be_told_apart_add_up(tmp_path):
    assert drifted(tmp_path, rounds=False) == 1.0
    assert drifted(tmp_path, rounds=True) == pytest.approx(1 - 32 * 2**-10, abs=2e-3)


def test_with_state_on_the_host(tmp_path):
    drift = drifted(tmp_path, rounds=True, callbacks=[OptimizerOffload(chunk_mb=0.01)])
    assert drift == pytest.approx(1 - 32 * 2**-10, abs=2e-3)

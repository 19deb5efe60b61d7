"""CUDA graphs on a GPU, chosen by ``Compile(mode="auto")`` and asked for, against the default mode."""

import gc

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups._compat.torch.compile.cudagraph_trees import recordings
from lightning_ups.callbacks import Compile
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from tests.clocks import FixedClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
GRAPHS = pytest.mark.parametrize("mode", ["auto", "reduce-overhead"])
CONFIG = GPTConfig(dim=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=128, vocab_size=64, max_seq_len=32)


@pytest.fixture(autouse=True)
def deterministic():
    gc.collect()  # what an earlier test left in a cycle may hold outputs of its recording, and delay those of this one
    torch.compiler.reset()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)  # else sums of gradients differ from run to run
    yield
    torch.use_deterministic_algorithms(mode=False)


class Tiny(LightningModule):
    """A tiny GPT whose losses, gradients and predictions are kept."""

    def __init__(self, *, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        if dropout:
            self.model.norm = nn.Sequential(self.model.norm, nn.Dropout(dropout))
        self.kept, self.values, self.norms, self.validation = [], [], [], []

    def loss(self, batch):
        return self.model(batch[:, :-1], batch[:, 1:])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.values.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.float().norm() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.stack(norms).tolist() if norms else [])

    def on_train_batch_end(self, *args):
        self.report = applied(self.trainer.strategy).report.parts.get("Compile", {})

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.validation.append(loss)

    def predict_step(self, batch, index):
        return self.model(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def tokens(*sizes):
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randint(64, (size, 17), generator=generator) for size in sizes], batch_size=None)


def fit(monkeypatch, mode, *, module=Tiny, sizes=(4,) * 5, clock=None, precision=None, **options):
    """Return the module after a fit, and what it predicts."""
    if clock is not None:  # so that the choice does not depend on the machine
        monkeypatch.setattr("lightning_ups.callbacks.compile._clock", lambda device: clock)
    model = module()
    torch.manual_seed(2)
    lightning = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=2,
        callbacks=[Compile(scope="model", mode=mode)],
        plugins=[precision()] if precision else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    lightning.fit(model, tokens(*sizes), tokens(4, 4))
    return model, [logits.cpu() for logits in lightning.predict(model, tokens(4, 4, 4))]


def both(monkeypatch, mode, **options):
    expected = fit(monkeypatch, "default", **options)
    torch.compiler.reset()
    actual = fit(monkeypatch, mode, clock=FixedClock(6.1, 5.2), **options)
    if mode == "auto":
        assert actual[0].report["chosen"]["mode"] == "reduce-overhead", actual[0].report["lines"]
    assert [loss.item() for loss in actual[0].kept] == actual[0].values  # kept over steps, and right
    return expected, actual


@GRAPHS
def test_losses_and_gradients_are_bitwise_those_of_the_default_mode(monkeypatch, mode):
    (expected, _), (actual, _) = both(monkeypatch, mode)
    assert actual.values == expected.values
    assert actual.norms == expected.norms


class Counting(Tiny):
    """Has buffers that the model reads, as a GPT has, and one that it writes to."""

    def __init__(self):
        super().__init__()
        self.model.norm = nn.Sequential(self.model.norm, Counts())


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x


@pytest.mark.parametrize("module", [Tiny, Counting])
def test_a_forward_and_a_backward_are_recorded_once(monkeypatch, module):
    device = torch.device("cuda", torch.cuda.current_device())
    before = recordings(device)
    model, _ = fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2), sizes=(4,) * 10, module=module)
    assert recordings(device) == before + 2
    assert model.report["chosen"]["recorded"] == 2
    assert [buffer.item() for name, buffer in model.named_buffers() if "calls" in name] in ([], [20.0])


@GRAPHS
def test_accumulated_and_clipped_gradients_are_those_of_the_default_mode(monkeypatch, mode):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "sizes": (4,) * 6}
    (expected, _), (actual, _) = both(monkeypatch, mode, **options)
    assert actual.values == expected.values
    assert actual.norms == expected.norms


@GRAPHS
def test_validation_between_steps_and_predictions_in_a_list(monkeypatch, mode):
    (expected, predicted), (actual, predicted_too) = both(monkeypatch, mode, val_check_interval=2, sizes=(4,) * 6)
    assert actual.values == expected.values
    assert len(actual.validation) == 12
    assert [loss.item() for loss in actual.validation] == [loss.item() for loss in expected.validation]
    torch.testing.assert_close(predicted_too, predicted)
    assert not torch.equal(predicted[0], predicted[1])


@GRAPHS
def test_batches_of_several_sizes(monkeypatch, mode):
    device = torch.device("cuda", torch.cuda.current_device())
    before = recordings(device)
    (expected, _), (actual, _) = both(monkeypatch, mode, sizes=(4, 4, 3, 5, 4, 2, 6, 4))
    assert actual.values == pytest.approx(expected.values, rel=1e-4)  # of graphs for any size, and for one
    if mode == "auto":
        assert recordings(device) == before + 2


@GRAPHS
def test_master_weights(monkeypatch, mode):
    (expected, _), (actual, _) = both(monkeypatch, mode, precision=BF16Precision, accumulate_grad_batches=2)
    assert actual.values == pytest.approx(expected.values, rel=1e-2)


def test_random_numbers_are_those_of_the_default_mode(monkeypatch):
    (expected, _), (actual, _) = both(monkeypatch, "auto", module=lambda: Tiny(dropout=0.3))
    assert actual.values == pytest.approx(expected.values, rel=1e-5)


class Late(Tiny):
    """Goes backward through two steps at once."""

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.values.append(loss.item())
        if index % 2 == 0:
            self.earlier = loss
            return None
        earlier, self.earlier = self.earlier, None
        return loss + earlier


def test_a_forward_whose_backward_comes_in_a_later_step_is_not_overwritten(monkeypatch):
    (expected, _), (actual, _) = both(monkeypatch, "auto", module=Late, sizes=(4,) * 6)
    assert actual.values == expected.values
    assert actual.norms == expected.norms


def test_where_graphs_are_asked_for_such_a_backward_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="in a later step than its forward"):
        fit(monkeypatch, "reduce-overhead", module=Late, sizes=(4,) * 6)


@GRAPHS
def test_what_replays_graphs_after_a_run_is_not_recorded_in_each_call(monkeypatch, mode):
    fit(monkeypatch, mode, clock=FixedClock(6.1, 5.2))
    device = torch.device("cuda", torch.cuda.current_device())
    linear = nn.Linear(8, 8, device=device)
    run = torch.compile(linear, mode="reduce-overhead")
    before = recordings(device)
    with torch.no_grad():
        kept = [run(torch.ones(2, 8, device=device)) for _ in range(8)]
    assert len(kept) == 8
    assert recordings(device) - before <= 2


def test_a_second_fit_on_the_same_device(monkeypatch):
    first, _ = fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2))
    second, _ = fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2))
    assert second.values == first.values
    assert second.report["chosen"]["mode"] == "reduce-overhead"


# With the clock of the device itself.


class Large(Tiny):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))

    def loss(self, batch):
        return self.model(torch.ones(4096, 4096, device=self.device)).square().mean()

    def predict_step(self, batch, index):
        return batch


@torch.library.custom_op("ups_test::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    assert x.sum().item() == x.sum().item()
    return x.clone()


waits.register_fake(torch.empty_like)
waits.register_autograd(lambda ctx, grad: grad.clone())


class Waiting(Tiny):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(17, 17), Waits(), nn.Linear(17, 17))

    def loss(self, batch):
        return self.model(batch.float() / 64).square().mean()

    def predict_step(self, batch, index):
        return batch


class Waits(nn.Module):
    def forward(self, x):
        return waits(x)


def chosen(monkeypatch, mode, **options):
    """Return what was chosen, at the fourth time at the latest ``mode``: other processes may use the device as well."""
    for _ in range(4):
        facts = fit(monkeypatch, "auto", **options)[0].report["chosen"]
        if facts.get("mode") == mode:
            break
    return facts


def test_a_small_model_is_bound_by_launches(monkeypatch):
    facts = chosen(monkeypatch, "reduce-overhead")
    assert facts.get("mode") == "reduce-overhead", facts
    assert facts["launch_ms"] > 0.25 * facts["device_ms"] > 0


def test_a_large_model_is_bound_by_its_device(monkeypatch):
    facts = chosen(monkeypatch, "default", module=Large, sizes=(1, 1))
    assert facts.get("mode") == "default", facts
    assert facts["device_ms"] > facts["launch_ms"] > 0


def test_a_model_that_waits_for_the_device_is_not_recorded(monkeypatch):
    facts = chosen(monkeypatch, "default", module=Waiting)
    assert facts.get("mode") == "default", facts
    assert "its own time is not known" in facts["why"]

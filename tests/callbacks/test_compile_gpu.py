"""CUDA graphs on a GPU, chosen by ``Compile(mode="auto")`` and asked for, against the default mode."""

import gc
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch._inductor import cudagraph_trees  # noqa: TID251
from torch.utils.data import DataLoader

from lightning_ups._compat.torch.compile.cudagraph_trees import Recording, _count
from lightning_ups._compat.torch.device import CudaClock
from lightning_ups.callbacks import Compile
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from lightning_ups.transforms.compile.compiler import Compiled
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
def deterministic(monkeypatch):
    monkeypatch.setattr(Compiled, "ways", lambda compiled, waits: ["compiled"])  # nothing is compared as a whole
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


def recorded_by_torch(device):
    """Return how many CUDA graphs torch keeps for ``device``, ours apart."""
    manager = cudagraph_trees.get_manager(device.index, create_if_none_exists=False)
    return 0 if manager is None or manager.roots is None else _count(manager.roots)


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


@pytest.fixture
def recordings(monkeypatch):
    """Collect all recordings that are made."""
    made, make = [], Recording.__init__
    monkeypatch.setattr(Recording, "__init__", lambda self: made.append(self) or make(self))
    return made


@pytest.mark.parametrize("module", [Tiny, Counting])
def test_a_forward_and_a_backward_are_recorded_once_and_freed(monkeypatch, module, recordings):
    counts, close = [], Recording.close
    monkeypatch.setattr(Recording, "close", lambda self: counts.append(self.count) or close(self))
    model, _ = fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2), sizes=(4,) * 10, module=module)
    assert counts == [2]
    assert model.report["chosen"]["recorded"] == 2
    assert reserved_by_recordings() == 0
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
    (expected, _), (actual, _) = both(monkeypatch, mode, sizes=(4, 4, 3, 5, 4, 2, 6, 4))
    assert actual.values == pytest.approx(expected.values, rel=1e-4)  # of graphs for any size, and for one
    if mode == "auto":
        assert actual.report["chosen"]["recorded"] == 2


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
    before = recorded_by_torch(device)
    with torch.no_grad():
        kept = [run(torch.ones(2, 8, device=device)) for _ in range(8)]
    assert len(kept) == 8
    assert recorded_by_torch(device) - before <= 2


def test_a_second_fit_on_the_same_device(monkeypatch):
    first, _ = fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2))
    second, _ = fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2))
    assert second.values == first.values
    assert second.report["chosen"]["mode"] == "reduce-overhead"


def as_it_is(module, batch, index):
    return batch


class TwoViews(Tiny):
    """Calls its model twice before a backward, and once more."""

    def loss(self, batch):
        first, second = (self.model(b[:, :-1], b[:, 1:]) for b in (batch, batch.flip(1)))
        third = self.model(batch[:, 1:], batch[:, :-1])
        return first * second.tanh() + third


class Broken(Tiny):
    """Has a graph break between two parts."""

    def __init__(self):
        super().__init__()
        self.model = Parts()

    def loss(self, batch):
        return self.model(batch.float() / 64).square().mean()

    predict_step = as_it_is


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(17, 64), nn.Linear(64, 17)

    def forward(self, x):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()  # noqa: TID251
        return self.second(hidden)


class Alternating(Tiny):
    """A generator and a critic, each of which is called in turn with the other's output."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 17))
        self.critic = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(self, batch):
        real = batch.float() / 64
        return (self.critic(self.model(real)) - self.critic(real)).square().mean()

    predict_step = as_it_is


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("module", "recorded"), [(TwoViews, 6), (Broken, 4), (Alternating, 6)], ids=["views", "break", "two models"]
)
def test_all_graphs_of_a_step_are_replayed(monkeypatch, module, recorded, accumulate):
    options = {"module": module, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "sizes": (4,) * 6}
    (expected, _), (actual, _) = both(monkeypatch, "auto", **options)
    assert actual.report["chosen"]["recorded"] == recorded
    assert actual.values == expected.values
    assert actual.norms == expected.norms


class Looking(Tiny):
    """Returns 32 MiB, which is looked at after the backward, and kept."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 1024))
        self.outputs = []

    def loss(self, batch):
        self.outputs.append(self.model((batch.float() / 64).repeat(2048, 1)))
        return self.outputs[-1].square().mean()

    predict_step = as_it_is


def test_outputs_are_right_after_the_backward_and_as_long_as_they_live(monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.compile.mode.OUTPUT_SHARE", 10)
    (expected, _), (actual, _) = both(monkeypatch, "auto", module=Looking, sizes=(4,) * 8)
    assert actual.values == expected.values
    for one, other in zip(actual.outputs, expected.outputs, strict=True):
        assert torch.equal(one, other)


def test_outputs_that_would_take_much_memory_forbid_graphs(monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.compile.mode.OUTPUT_SHARE", 0.05)
    peaks = []
    for mode in ("default", "auto"):
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model, _ = fit(monkeypatch, mode, clock=FixedClock(6.1, 5.2), module=Looking, sizes=(4,) * 12)
        peaks.append(torch.cuda.max_memory_allocated())
        model.outputs.clear()
    assert "copies of what it returns" in model.report["chosen"]["why"]
    assert peaks[1] < 1.05 * peaks[0]


class Unfreezing(Tiny):
    """Thaws its first layer in the third step."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 17))
        self.model[0].requires_grad_(False)

    def on_train_batch_start(self, batch, index):
        self.model[0].requires_grad_(self.global_step > 2)

    def loss(self, batch):
        return self.model(batch.float() / 64).square().mean()

    predict_step = as_it_is


def test_after_an_unfreeze_the_model_is_recorded_anew(monkeypatch):
    (expected, _), (actual, _) = both(monkeypatch, "auto", module=Unfreezing, sizes=(4,) * 6)
    assert actual.values == expected.values
    assert actual.norms == expected.norms
    assert actual.report["chosen"]["mode"] == "reduce-overhead"
    assert actual.report["chosen"]["recorded"] == 4


class Frozen(Tiny):
    """Trains a head on what a frozen backbone returns."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(17, 64), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(64, 17)

    def loss(self, batch):
        return self.head(self.model(batch.float() / 64)).square().mean()

    predict_step = as_it_is


def test_a_frozen_backbone_is_replayed_without_a_backward(monkeypatch):
    (expected, _), (actual, _) = both(monkeypatch, "auto", module=Frozen, sizes=(4,) * 6)
    assert actual.report["chosen"]["recorded"] == 3
    assert actual.values == expected.values
    assert actual.norms == expected.norms


class Hoarding(Tiny):
    """Keeps the gradients of its tenth step, and may fail in it."""

    fails = False

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        if len(self.norms) == 10:
            self.hoard = [p.grad.detach() for p in self.parameters()]
            self.copies = [grad.clone() for grad in self.hoard]
            if self.fails:
                raise KeyError("amid a run")


class Failing(Hoarding):
    fails = True


def reserved_by_recordings():
    gc.collect()
    torch.cuda.empty_cache()
    return CudaClock(torch.device("cuda")).recorded()


@pytest.mark.parametrize("module", [Hoarding, Failing])
def test_gradients_that_are_kept_stay_as_they_are_after_the_run(monkeypatch, module):
    made = [module()]
    model = made[0]
    with pytest.raises(KeyError, match="amid a run") if module.fails else nullcontext():
        fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2), module=made.pop)
    assert reserved_by_recordings() > 0
    others = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]
    assert all(torch.equal(*pair) for pair in zip(model.hoard, model.copies, strict=True))
    del others, model
    gc.collect()
    fit(monkeypatch, "auto", clock=FixedClock(6.1, 5.2))
    assert reserved_by_recordings() == 0


class ManyKernels(Tiny):
    """Launches more kernels than a queue takes."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(17, 17) for _ in range(400)))

    def loss(self, batch):
        return self.model(batch.float() / 64).square().mean()

    def predict_step(self, batch, index):
        return batch


# With the clock of the device itself.


@pytest.mark.slow
def test_a_model_of_more_kernels_than_a_queue_takes_is_timed(monkeypatch):
    facts = chosen(monkeypatch, "reduce-overhead", module=ManyKernels)
    assert facts.get("mode") == "reduce-overhead", facts


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


@pytest.mark.parametrize("module", [Tiny, Broken])
def test_whole_steps_are_compared_and_change_nothing_but_rounding(monkeypatch, module):
    expected, _ = fit(monkeypatch, "default", module=module, sizes=(4,) * 40)
    torch.compiler.reset()
    monkeypatch.setattr(Compiled, "ways", lambda compiled, waits: ["uncompiled", "compiled", "with CUDA graphs"])
    actual, _ = fit(monkeypatch, "auto", module=module, sizes=(4,) * 40)
    assert actual.report["steps"].count(" ms ") == 3
    assert actual.values == pytest.approx(expected.values, rel=1e-3)


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
    assert "copies of what it returns" in facts["why"] or facts["device_ms"] > facts["launch_ms"] > 0


def test_a_model_that_waits_for_the_device_is_not_recorded(monkeypatch):
    facts = chosen(monkeypatch, "default", module=Waiting)
    assert facts.get("mode") == "default", facts
    assert "its own time is not known" in facts["why"]

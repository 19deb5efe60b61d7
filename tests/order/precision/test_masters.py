import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import OptimizerOffload, StepGuard
from lightning_ups.precision import BF16Precision
from tests.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Edits(LightningModule):
    """Writes into gradients where users do: in hooks, in its own clipping, and between a backward and its step."""

    def __init__(self, how):
        super().__init__()
        self.how, self.seen = how, []
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.automatic_optimization = not how.startswith("manual")

    def training_step(self, batch, batch_idx):
        loss = 10 * self.net(batch).float().square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers(use_pl_optimizer=self.how != "manual, norm, not Lightning's")
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.how == "manual, twice":
            self.manual_backward(10 * self.net(batch).float().abs().mean())
        self.edit("manual")
        if self.how in ("manual, ours", "manual, ours, hooked"):
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        optimizer.step()
        return None

    def edit(self, where):
        if self.how.startswith(f"{where}, norm"):
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        elif self.how == f"{where}, data":
            for parameter in self.parameters():
                parameter.grad.data.sign_()
        elif self.how.endswith("none"):
            self.net[0].weight.grad = None
        elif self.how.endswith("half"):
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InHook(Edits):
    def on_before_optimizer_step(self, optimizer):
        self.seen.append(grad_norm(self, 2)["grad_2.0_norm_total"].item())
        self.edit("hook")


class AfterBackward(Edits):
    def on_after_backward(self):
        self.edit("after")


class OwnClipping(Edits):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if "ours" in self.how:
            how = "value" if "value" in self.how else "norm"
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm=how)
        self.edit("clipping")


class EditsByCallback(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.edit("callback")


EDITS = {
    "hook, norm": InHook, "hook, data": InHook, "hook, none": InHook, "after, data": AfterBackward,
    "clipping, norm": OwnClipping, "clipping, ours by norm": OwnClipping, "clipping, ours by value": OwnClipping,
    "clipping, ours by norm, half": OwnClipping, "clipping, ours by value, half": OwnClipping,
    "clipping, ours by norm, none": OwnClipping, "manual, ours, hooked": InHook, "manual, twice": Edits,
    "manual, norm, not Lightning's": Edits, "callback, norm": Edits, "manual, norm": Edits, "manual, data": Edits,
    "manual, ours": Edits, "nothing": Edits, "manual, nothing": Edits,
}  # fmt: skip


def edited(how, accumulate=1, *, weights="masters", callbacks=()):
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    seed_everything(0, verbose=False)
    module = EDITS[how](how)
    run = trainer(
        None,
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        epochs=3,
        plugins=[BF16Precision(weights=weights)],
        callbacks=[*callbacks, *([EditsByCallback()] if how.startswith("callback") else [])],
        accumulate_grad_batches=accumulate,
    )
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    run.fit(module, DataLoader(data, batch_size=8 // ranks // accumulate))
    return [p.detach().float() for p in module.parameters()], module.seen


def apart(found, right):
    return max((a - b).abs().max().item() for a, b in zip(found[0], right[0], strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [how for how in EDITS if "nothing" not in how])
def test_what_users_write_into_gradients_counts(ranks, how):
    """By masters as by autocast, whose gradients are the parameters' own; the band is bfloat16's."""
    right = edited(how, weights="autocast")
    plain = edited("manual, nothing" if how.startswith("manual") else "nothing", weights="autocast")
    wholes = {"one device": edited(how), "two ranks": ranks(edited, how)}
    if not how.startswith(("manual", "after")):  # whose backwards a step does not have several of, or sees in parts
        wholes["accumulated"] = edited(how, accumulate=2)
        wholes["accumulated, on the host"] = edited(how, accumulate=2, callbacks=[OptimizerOffload(chunk_mb=0.01)])
        wholes["accumulated on two ranks"] = ranks(edited, how, 2)
    far = apart(plain, right)
    for name, found in wholes.items():
        assert apart(found, right) < 0.1 * far, name
        assert found[1] == pytest.approx(right[1], rel=2e-2)


class SeveralBackwards(LightningModule):
    """Steps two optimizers, each by several backwards, and then calls ``zero_grad`` on one of several objects."""

    def __init__(self, forgets):
        super().__init__()
        self.automatic_optimization, self.forgets = False, forgets
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for part in (self.first, self.second):
            nn.init.zeros_(part.weight)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for gradient in (1.0, 2**-9, 2**-9):
            x = torch.tensor([[gradient]])
            self.manual_backward(self.first(x).sum() + self.second(x).sum())
        assert self.second.weight.grad.item() == 1.0  # rounded
        first.step()
        assert self.second.weight.grad.item() == 1.0
        if self.forgets == "module":
            self.zero_grad()
        elif self.forgets == "optimizers":
            first.zero_grad()
            second.zero_grad()
        self.manual_backward(self.second(torch.tensor([[2.0**-9]])).sum())
        second.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.first, self.second)]


@pytest.mark.parametrize("callbacks", [(), (OptimizerOffload(chunk_mb=0.001),)], ids=["on the device", "on the host"])
@pytest.mark.parametrize(("forgets", "second"), [("module", 1), ("optimizers", 1), ("nothing", 2**9 + 3)])
def test_backwards_of_a_manual_step_are_added_in_float32(tmp_path, forgets, second, callbacks):
    module = SeveralBackwards(forgets)
    trainer(tmp_path, plugins=[BF16Precision(weights="masters")], callbacks=[*callbacks], max_steps=2).fit(
        module, DataLoader([1])
    )
    assert module.first.weight.item() == -1 - 2**-8
    assert module.second.weight.item() == -second * 2**-9


class AddsMore(Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.accumulate_grad_batches = 4


class OneWeight(SeveralBackwards):
    def __init__(self):
        super().__init__("nothing")
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.first(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.first.parameters(), lr=1.0)


def test_microbatches_are_added_in_float32_where_a_callback_asks_for_more(tmp_path):
    module, gradients = OneWeight(), [torch.tensor([each]) for each in (1.0, 2**-9, 2**-9, 0.0)]
    trainer(tmp_path, plugins=[BF16Precision(weights="masters")], callbacks=[AddsMore()], max_steps=1).fit(
        module, DataLoader(gradients)
    )
    assert module.first.weight.item() == -(1 + 2**-8) / 4


class Idle(InHook):
    """Has a layer that no rank uses, whose weights would decay if it had gradients of zero."""

    def __init__(self, how):
        super().__init__(how)
        self.idle = nn.Linear(8, 8)

    def edit(self, where):
        if self.how == "none":
            for parameter in self.net[0].parameters():
                parameter.grad = None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def moved(how, accumulate, *callbacks):
    seed_everything(0, verbose=False)
    module = Idle(how)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    run = trainer(
        None,
        strategy="ddp_find_unused_parameters_true",
        devices=2,
        epochs=3,
        plugins=[BF16Precision(weights="masters")],
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
    )
    run.fit(module, DataLoader(torch.randn(8, 8), batch_size=4 // accumulate))
    return {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "callbacks",
    [
        (),
        (StepGuard(on_nonfinite="skip"),),
        (OptimizerOffload(chunk_mb=0.001),),
        (OptimizerOffload(chunk_mb=0.001, update="host"), StepGuard(on_nonfinite="skip")),
    ],
    ids=["stepped", "guarded", "offloaded", "on the host, guarded"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_has_no_gradient_is_not_stepped_whoever_looks(ranks, accumulate, callbacks):
    net = {f"net.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")}
    assert ranks(moved, "nothing", accumulate, *callbacks) == net
    assert ranks(moved, "none", accumulate, *callbacks) == {"net.2.weight", "net.2.bias"}


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1, initial_denom_lr=1)


class Trained(InHook):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


EDITS["hook, nothing, unfrozen"] = Trained


@pytest.mark.filterwarnings("ignore")
def test_what_is_unfrozen_has_all_of_its_gradient_whoever_looks(ranks):
    right = edited("hook, nothing, unfrozen", callbacks=[Unfreezes()])
    assert apart(ranks(edited_unfrozen), right) < 2e-3
    assert apart(ranks(edited_unfrozen, OptimizerOffload(chunk_mb=0.01)), right) < 2e-3


def edited_unfrozen(*callbacks):
    return edited("hook, nothing, unfrozen", 2, callbacks=[Unfreezes(), *callbacks])


class Called:
    def __call__(self, *args):
        args[1].seen.append(0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_hook_may_be_any_object_that_can_be_called():
    _, seen = edited("nothing", callbacks=[LambdaCallback(on_before_optimizer_step=Called())])
    assert seen == [0, 0, 0]

import copy
import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.strategies import FSDP2Strategy
from tests.strategies.cases import WIDTH, Case, data

CODES = 6


class Coder(nn.Module):
    """A codebook that follows the means of what it codes."""

    def __init__(self, trained, write):
        super().__init__()
        self.write, self.runs = write, 0
        self.codebook = nn.Parameter(torch.randn(CODES, WIDTH), requires_grad=trained)
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.scale(x)
        code = torch.cdist(y.detach(), self.codebook.detach()).argmin(-1)
        coded = self.codebook[code]
        self.runs += 1
        with torch.no_grad():
            if self.write == "data":
                self.codebook.data.copy_(self.codebook * 0.9 + 0.1 * y.mean(0))
            elif self.write == "lerp":
                self.codebook.lerp_(y.mean(0).expand_as(self.codebook).contiguous(), 0.1)
            elif self.write == "first rank" and torch.distributed.get_rank() == 0:
                self.codebook.data[:1] += 1.0  # a row of the first rank's shard
        return y + (coded - y).detach()


class Coding(Case):
    def __init__(self, *, trained, write, bare=False, manual=False):
        self.made, self.bare = (trained, write), bare
        super().__init__()
        self.automatic_optimization = not manual

    def build(self):
        super().build()
        self.coder = Coder(*self.made)
        if self.bare:
            self.own = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def run(self, x):
        if self.bare is True:
            self.own.data.mul_(0.9)
        return super().run(self.coder(x))

    def training_step(self, batch, index):
        if self.automatic_optimization:
            return super().training_step(batch, index)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        return None


class BeforeBackward(Coding):
    def on_before_zero_grad(self, _):
        with torch.no_grad():
            self.own.add_(1)


class Afterwards(Coding):
    def on_train_batch_end(self, *_):
        values = torch.full((WIDTH, WIDTH), 2.0)
        if self.made[1] == "replace":
            self.coder.scale.weight = nn.Parameter(values)
        elif self.made[1] == "write":
            with torch.no_grad():
                self.coder.scale.weight[:] = values

    def on_train_end(self):
        if self.made[1] == "write":
            assert (self.coder.scale.weight.full_tensor() == 2).all()


def fit(path, options, strategy, kind=Coding):
    model = kind(**options)
    return failure(path, model, FSDP2Strategy(**strategy), steps=2), model.coder.runs


def failure(path, model, strategy, *, steps):
    """Return what the error of a fit says, or nothing."""
    warnings.simplefilter("ignore")
    lightning = Trainer(
        accelerator="cpu", devices=2, max_steps=steps, strategy=strategy, default_root_dir=path,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        lightning.fit(model, DataLoader(data(), batch_size=4))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"trained": False, "write": "data"}, {}),
        ({"trained": True, "write": "data"}, {"sharding": "gradients"}),
        ({"trained": False, "write": "lerp"}, {"sharding": "none"}),
        ({"trained": False, "write": "first rank"}, {}),
        ({"trained": False, "write": "data", "manual": True}, {}),
    ],
)
def test_a_codebook_that_its_forward_writes_to_is_refused_in_the_first_step(ranks, tmp_path, options, strategy):
    said, runs = ranks(fit, tmp_path, options, strategy)
    assert "coder.codebook is written to" in said
    assert "self.register_buffer('codebook', ...)" in said
    assert runs == 1


def test_so_is_what_the_model_itself_holds(ranks, tmp_path):
    said, _ = ranks(fit, tmp_path, {"trained": False, "write": "", "bare": True}, {})
    assert "own is written to" in said


@pytest.mark.parametrize("strategy", [{}, {"sharding": "none"}])
def test_so_is_what_a_hook_writes_to_before_the_backward(ranks, tmp_path, strategy):
    options = {"trained": True, "write": "", "bare": "before backward"}
    said, runs = ranks(fit, tmp_path, options, strategy, BeforeBackward)
    assert "own is written to" in said
    assert runs == 1


@pytest.mark.parametrize("strategy", [{}, {"sharding": "none"}])
def test_a_parameter_that_is_replaced_after_sharding_is_an_error(ranks, tmp_path, strategy):
    said, runs = ranks(fit, tmp_path, {"trained": True, "write": "replace"}, strategy, Afterwards)
    assert said.startswith("coder.scale.weight was set to another parameter after sharding,")
    assert runs == 1
    assert ranks(fit, tmp_path, {"trained": True, "write": "write"}, strategy, Afterwards) == ("", 2), "the cure"


@pytest.mark.parametrize("strategy", [{}, {"sharding": "none"}, {"offload": True}, {"replicate_size": 2}])
@pytest.mark.parametrize("manual", [False, True])
def test_who_writes_nothing_is_left_alone(ranks, tmp_path, strategy, manual):
    assert ranks(fit, tmp_path, {"trained": True, "write": "", "manual": manual}, strategy) == ("", 2)


class Teaching(Case):
    """A copy of a layer follows it: with a warm-up it is written what it has, until the third step."""

    def __init__(self, hook):
        self.hook = hook
        super().__init__()

    def build(self):
        super().build()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def follow(self):
        for mine, its in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.data.lerp_(its.data, 0.1)

    def training_step(self, batch, index):
        with torch.no_grad():
            target = self.teacher(batch)
        loss = (self.run(batch) - target).square().mean()
        if self.hook == "training_step":
            self.follow()
        self.losses.append(loss.detach())
        return loss

    def on_before_zero_grad(self, _):
        if self.hook == "on_before_zero_grad":
            self.follow()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def teach(path, hook):
    model = Teaching(hook)
    return failure(path, model, FSDP2Strategy(), steps=5), len(model.losses)


@pytest.mark.parametrize("hook", ["training_step", "on_before_zero_grad"])
def test_a_teacher_that_begins_as_its_student_is_an_error_once_they_differ(ranks, tmp_path, hook):
    said, steps = ranks(teach, tmp_path, hook)
    assert "teacher.bias, teacher.weight are written to" in said
    assert steps == 3


class TeachingManually(Teaching):
    """Makes three optimizer steps in each training step, and the teacher follows once, before them."""

    automatic_optimization = False

    def training_step(self, batch, index):
        super().training_step(batch, index)
        for _ in range(3):
            self.optimizers().zero_grad()
            self.manual_backward(self.run(batch).square().mean())
            self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def teach_manually(path):
    model = TeachingManually("training_step")
    return failure(path, model, FSDP2Strategy(), steps=12), len(model.losses)


def test_so_it_is_if_a_training_step_makes_several_optimizer_steps(ranks, tmp_path):
    said, steps = ranks(teach_manually, tmp_path)
    assert "teacher.bias, teacher.weight are written to" in said
    assert steps == 2

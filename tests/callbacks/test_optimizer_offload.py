import pytest
import torch
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import StepLR

from lightning_ups.callbacks import Compile, OptimizerOffload, StepGuard
from lightning_ups.optim import MasteredOptimizer, OffloadedOptimizer, adamw_step
from lightning_ups.order import Declaration, Stage, applied
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.toys import Net, loader, trainer


class Scheduled(Net):
    """Remembers its learning rates, and has two groups."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rates, self.kind = [], None

    def on_train_batch_end(self, *_):
        optimizer = self.trainer.strategy.optimizers[0]
        self.kind = type(optimizer)
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            [{"params": self.layers.parameters()}, {"params": self.head.parameters(), "lr": 3e-2}], lr=1e-2
        )
        return [optimizer], [StepLR(optimizer, 2, gamma=0.5)]


def fit(tmp_path, callbacks=(), *, masters=False, kind=Scheduled, size=8, path=None, **options):
    module = kind()
    plugins = [BF16Precision(weights="masters")] if masters else []
    t = trainer(tmp_path, callbacks=callbacks, plugins=plugins, **options)
    t.fit(module, loader(size), ckpt_path=path)
    return t, module


OPTIONS = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.1},
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 2, "size": 4},
    "accumulate and clip": {"accumulate_grad_batches": 2, "size": 4, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
def test_losses_are_those_without_it(tmp_path, masters, options, update):
    _, right = fit(tmp_path, masters=masters, **options)
    _, module = fit(tmp_path, [OptimizerOffload(update=update, chunk_mb=0.001)], masters=masters, **options)
    assert issubclass(module.kind, OffloadedOptimizer)
    assert module.kind.__name__ == right.kind.__name__
    assert torch.equal(torch.stack(module.losses), torch.stack(right.losses))
    assert module.rates == right.rates
    assert module.rates[0] != module.rates[-1]
    for name, value in right.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.mark.parametrize("weights", ["autocast", "masters"])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["accumulate and clip"]], ids=["plain", "all"])
def test_where_there_is_one_kernel_chunks_are_stepped_by_it(tmp_path, monkeypatch, weights, options):
    steps, step = [], adamw_step.reference_step
    monkeypatch.setattr(adamw_step, "_has_kernel", lambda device: True)
    monkeypatch.setattr(adamw_step, "reference_step", lambda *a, **k: (steps.append(1), step(*a, **k)))
    modules, counts = [], []
    compiled = [Compile(backend="eager")] if weights == "autocast" else []  # else the step is left to torch
    for callbacks in (compiled, [*compiled, OptimizerOffload(chunk_mb=0.001)]):
        module = Scheduled()
        t = trainer(tmp_path, callbacks=callbacks, plugins=[BF16Precision(weights=weights)], **without_size(options))
        t.fit(module, loader(options.get("size", 8)))
        modules.append(module)
        counts.append(len(steps))
    assert 0 < counts[0] < counts[1] - counts[0], "each chunk is stepped by itself"
    right, module = modules
    assert torch.equal(torch.stack(module.losses), torch.stack(right.losses))
    for name, value in right.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


class ByHand(Scheduled):
    """Clips and steps by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


@pytest.mark.parametrize("weights", ["autocast", "masters"])
@pytest.mark.parametrize("offloads", [False, True], ids=["on the device", "offloaded"])
def test_gradients_that_are_clipped_by_hand_are_clipped(tmp_path, weights, offloads):
    losses = []
    for module, options in ((Scheduled(), {"gradient_clip_val": 0.1}), (ByHand(), {})):
        callbacks = [OptimizerOffload(chunk_mb=0.001)] if offloads else []
        t = trainer(tmp_path, callbacks=callbacks, plugins=[BF16Precision(weights=weights)], **options)
        t.fit(module, loader(8))
        losses.append(torch.stack(module.losses))
    assert torch.equal(*losses)


def without_size(options):
    return {name: value for name, value in options.items() if name != "size"}


def test_it_is_undone_and_a_second_fit_works(tmp_path):
    callback = OptimizerOffload(chunk_mb=0.001)
    t, module = fit(tmp_path, [callback], masters=True, epochs=2)
    assert isinstance(t.optimizers[0], torch.optim.AdamW)
    assert not isinstance(t.optimizers[0], OffloadedOptimizer)
    t.fit_loop.max_epochs = 4
    t.fit(module, loader())
    again = fit(tmp_path, masters=True, epochs=2)
    again[0].fit_loop.max_epochs = 4
    again[0].fit(again[1], loader())
    assert torch.equal(torch.stack(module.losses), torch.stack(again[1].losses))


def test_it_is_undone_after_an_exception(tmp_path):
    module = Net(fail=True)
    t = trainer(tmp_path, callbacks=[OptimizerOffload()], plugins=[BF16Precision(weights="masters")])
    with pytest.raises(RuntimeError, match="stop here"):
        t.fit(module, loader())
    assert not any(isinstance(o, (OffloadedOptimizer, MasteredOptimizer)) for o in t.optimizers)
    assert next(module.parameters()).dtype is torch.float32


class Reports(Declaration):
    stage = Stage.RECOMPUTE

    def on_train_end(self, trainer, *_):
        self.parts = applied(trainer.strategy).report.parts

    def change(self, module, context):
        return super().change(module, context)


def test_the_report_says_how_much(tmp_path):
    reports = Reports()
    _, module = fit(tmp_path, [OptimizerOffload(chunk_mb=0.001), reports], masters=True)
    part = reports.parts["OptimizerOffload"]
    assert part["lines"] == ["nothing to do: training runs on the cpu"]
    assert part["host_bytes"] == 12 * sum(p.numel() for p in module.parameters())
    assert 0 < part["device_bytes"] < part["host_bytes"]


class Stateless(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_no_effect_is_an_error(tmp_path):
    match = r"or use FSDP2Strategy\(offload=True\), which moves parameters\."
    with pytest.raises(RuntimeError, match=rf"{match} .*on_no_effect='warn'"):
        fit(tmp_path, [OptimizerOffload()], kind=Stateless)
    with pytest.warns(UserWarning, match=match):
        fit(tmp_path, [OptimizerOffload(on_no_effect="warn")], kind=Stateless)


class Normed(torch.optim.SGD):
    """Looks at all gradients at once."""

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        torch._foreach_div_(gradients, norm)
        super().step()
        return loss


class Refused(Net):
    def configure_optimizers(self):
        return Normed(self.parameters(), lr=0.1, momentum=0.9)


def test_an_optimizer_that_looks_at_all_parameters_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"^Normed cannot be offloaded") as refused:
        fit(tmp_path, [OptimizerOffload()], kind=Refused)
    assert str(refused.value).endswith("such as AdamW, or leave the offloading out.")


def test_torchaos_own_is_refused_where_it_is_not_valid(tmp_path):
    with pytest.raises(ValueError, match=r"which have none of these limits\.$") as error:
        fit(tmp_path, [OptimizerOffload(update="torchao")], gradient_clip_val=1.0)
    assert "it wants parameters on cuda or xpu" in str(error.value)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"Use one of \('device', 'host', 'torchao'\)\.$"):
        OptimizerOffload(update="gpu")
    for given in ({"resident": 0.5}, {"chunk_mb": 256}):
        with pytest.raises(ValueError, match=r"^OptimizerOffload\(update='torchao'\) takes neither resident nor chunk"):
            OptimizerOffload(update="torchao", **given)
    with pytest.raises(ValueError, match=r"chunk_mb=0\) is out of range.*Use a finite number, more than 0, or None\.$"):
        OptimizerOffload(chunk_mb=0)


class Save(Callback):
    """Saves when training ends, while everything still holds."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, *_):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
@pytest.mark.parametrize("before", [False, True], ids=["since the start", "from then on"])
def test_resume_is_bit_for_bit(tmp_path, masters, before, update):
    def offload():
        return OptimizerOffload(update=update, chunk_mb=0.001)

    _, right = fit(tmp_path, masters=masters, epochs=6)
    save = Save(tmp_path / "saved.ckpt")
    fit(tmp_path, [save, *([] if before else [offload()])], masters=masters, epochs=3)
    _, module = fit(tmp_path, [offload()], masters=masters, epochs=6, path=save.path)
    assert torch.equal(torch.stack(module.losses), torch.stack(right.losses[3:]))
    for name, value in right.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def on_ranks(tmp_path, strategy, masters, options, callbacks, path=None, save=None, epochs=4):
    torch.manual_seed(0)
    module = Scheduled()
    chosen = FSDP2Strategy(**strategy) if isinstance(strategy, dict) else strategy
    saver = [Save(save)] if save else []
    t = trainer(
        tmp_path,
        callbacks=[*callbacks, *saver],
        strategy=chosen,
        devices=2,
        plugins=[BF16Precision(weights="masters")] if masters else [],
        epochs=epochs,
        use_distributed_sampler=True,
        **options,
    )
    t.fit(module, loader(4), ckpt_path=path)
    losses = torch.stack(module.losses).tolist()
    kind = module.kind.__name__
    state = {name: value.tolist() for name, value in t.strategy.model.state_dict().items()} if strategy == "ddp" else {}
    return losses, kind, state, module.rates


ALL = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
ON_RANKS = {  # strategy, bfloat16, options
    "ddp, masters, all": ("ddp", True, ALL),
    "fsdp2, bfloat16, all": ({}, True, ALL),
    "copies": ({"sharding": "none"}, False, {}),
}
MORE = {
    "ddp": ("ddp", False, {}),
    "ddp, masters": ("ddp", True, {}),
    "ddp, all": ("ddp", False, ALL),
    "fsdp2": ({}, False, {}),
    "fsdp2, all": ({}, False, ALL),
    "copies, bfloat16, all": ({"sharding": "none"}, True, ALL),
}


@pytest.mark.parametrize(
    ("strategy", "masters", "options"),
    [*ON_RANKS.values(), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE.values())],
    ids=[*ON_RANKS, *MORE],
)
def test_two_ranks(ranks, tmp_path, strategy, masters, options):
    right = ranks(on_ranks, tmp_path, strategy, masters, options, [])
    for update in ["device", "host"]:
        result = ranks(
            on_ranks, tmp_path, strategy, masters, options, [OptimizerOffload(update=update, chunk_mb=0.001)]
        )
        assert result[1] == right[1]  # the name of its class, under which others log it
        assert (result[0], result[2], result[3]) == (right[0], right[2], right[3])


@pytest.mark.parametrize(
    "strategy",
    [{}, pytest.param("ddp", marks=pytest.mark.slow), pytest.param({"save": "full"}, marks=pytest.mark.slow)],
    ids=["fsdp2", "ddp", "one file"],
)
def test_two_ranks_resume(ranks, tmp_path, strategy):
    right = ranks(on_ranks, tmp_path, strategy, True, {}, [], None, None, 6)
    offload = OptimizerOffload(chunk_mb=0.001)
    ranks(on_ranks, tmp_path, strategy, True, {}, [offload], None, tmp_path / "saved.ckpt", 3)
    result = ranks(on_ranks, tmp_path, strategy, True, {}, [offload], tmp_path / "saved.ckpt", None, 6)
    assert right[0][-len(result[0]) :] == result[0]
    assert len(result[0]) == len(right[0]) // 2
    assert result[2] == right[2]


class SkipsTheFirst(Net):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss if index else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None:UserWarning")
def test_a_first_batch_that_is_skipped_is_no_first_step(tmp_path):
    right, ours = SkipsTheFirst(), SkipsTheFirst()
    for module, callbacks in ((right, []), (ours, [OptimizerOffload(update="host")])):
        trainer(tmp_path, callbacks=callbacks, epochs=2).fit(module, loader(2))
    assert torch.equal(torch.stack(ours.losses), torch.stack(right.losses))


class BadAtFirst(Net):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss if index else loss * float("nan")


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_first_step_that_is_left_out_is_no_first_step(tmp_path, update):
    right, ours = BadAtFirst(), BadAtFirst()
    for module, callbacks in ((right, []), (ours, [OptimizerOffload(update=update)])):
        trainer(tmp_path, callbacks=[StepGuard(), *callbacks], epochs=1).fit(module, loader(2))
    assert len(ours.losses) == 4
    assert torch.equal(torch.stack(ours.losses), torch.stack(right.losses))


class TwoByHand(Net):
    """The second optimizer, which alone keeps state, steps for the first time at the second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        for optimizer in self.optimizers()[: index + 1]:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: index + 1]:
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.AdamW(self.layers.parameters())]


def test_an_optimizer_that_steps_later_counts_too(tmp_path):
    right, ours = TwoByHand(), TwoByHand()
    for module, callbacks in ((right, []), (ours, [callback := OptimizerOffload()])):
        trainer(tmp_path, callbacks=callbacks, epochs=1).fit(module, loader(2))
    assert callback._report is None
    assert torch.equal(torch.stack(ours.losses), torch.stack(right.losses))

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_ups._compat.torch.fake_tensors import fake_mode
from lightning_ups.callbacks import OptimizerOffload
from lightning_ups.optim import OffloadedOptimizer, check_rounding, make_portable
from lightning_ups.optim.low_bit import is_low_bit, make_state_alone
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.cli_toys import Toy
from tests.toys import trainer

KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step: seconds for each shape on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def made(kind, parameters, **options):
    import torchao.optim

    return getattr(torchao.optim, kind)(parameters, lr=1e-2, **options)


class Wide(LightningModule):
    """Matrices of which half is enough to be kept in few bits, and vectors that are not."""

    def __init__(self, kind, options=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
        self.kind, self.options, self.losses, self.forms = kind, dict(options), [], []

    def training_step(self, batch, _):
        for layer in self.layers:
            batch = layer(batch) + batch
        loss = batch.float().square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_end(self):
        states = self.trainer.strategy.optimizers[0].state.values()
        self.forms = sorted({is_low_bit(state["exp_avg"]) for state in states})

    def configure_optimizers(self):
        optimizer = made(self.kind, self.parameters(), **self.options)
        return [optimizer], [StepLR(optimizer, 2, gamma=0.5)]


def batches():
    torch.manual_seed(1)
    return DataLoader(torch.randn(8, 64), batch_size=4)


class Save(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, *_):
        trainer.save_checkpoint(self.path)


def fit(tmp_path, kind, *, epochs, strategy="auto", devices=1, path=None, save=None, masters=False, offload=False):
    with torch.compiler.set_stance("force_eager"):
        module = Wide(kind)
        t = trainer(
            tmp_path,
            callbacks=[*([Save(save)] if save else []), *([OptimizerOffload(chunk_mb=0.1)] if offload else [])],
            plugins=[BF16Precision(weights="masters")] if masters else [],
            strategy=FSDP2Strategy(**strategy) if isinstance(strategy, dict) else strategy,
            devices=devices,
            epochs=epochs,
        )
        t.fit(module, batches(), ckpt_path=path)
        return module.losses, module.forms


def resumed(run, tmp_path, kind, **options):
    """Return the losses without a break and those after it, and what is in few bits then."""
    right, _ = run(tmp_path, kind, 6, None, None, options)
    run(tmp_path, kind, 3, None, tmp_path / "saved.ckpt", options)
    after, forms = run(tmp_path, kind, 6, tmp_path / "saved.ckpt", None, options)
    return right[-len(after) :], after, forms


def run_here(tmp_path, kind, epochs, path, save, options):
    return fit(tmp_path, kind, epochs=epochs, path=path, save=save, **options)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_device_resumes_bit_for_bit(tmp_path, kind, offload):
    right, after, forms = resumed(run_here, tmp_path, kind, masters=True, offload=offload)
    assert after == right
    assert len(after) == 6
    assert forms == [False, True]


HOW = {
    "ddp": {"strategy": "ddp", "masters": True},
    "fsdp2": {"strategy": {}, "masters": True},
    "fsdp2, one file": {"strategy": {"save": "full"}, "masters": True},
    "fsdp2, on the host": {"strategy": {}, "offload": True},
}


@pytest.mark.parametrize("options", HOW.values(), ids=HOW)
@pytest.mark.parametrize("kind", ["AdamW8bit", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1:])])
def test_two_ranks_resume_bit_for_bit(ranks, tmp_path, kind, options):
    right, after, forms = resumed(partial(ranks, run_here), tmp_path, kind, devices=2, **options)
    assert after == right
    assert len(after) > 0
    assert forms == [False, True]


def test_what_two_ranks_saved_one_device_loads(ranks, tmp_path):
    options = {"strategy": {"save": "full"}, "devices": 2}
    ranks(run_here, tmp_path, "AdamW8bit", 3, None, tmp_path / "saved.ckpt", options)
    losses, forms = fit(tmp_path, "AdamW8bit", epochs=6, path=tmp_path / "saved.ckpt", masters=True)
    assert losses[-1] < 0.2
    assert forms == [False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_holds_plain_tensors_and_loads_either_form(kind):
    model = Wide(kind)
    optimizer, native = made(kind, model.parameters()), made(kind, Wide(kind).parameters())
    make_portable([optimizer])
    make_portable([optimizer])  # once is enough
    for one in (optimizer, native):
        for group in one.param_groups:
            for p in group["params"]:
                p.grad = torch.sin(torch.arange(p.numel())).reshape(p.shape)
        one.step()
    saved = optimizer.state_dict()
    tensors = [v for entries in saved["state"].values() for v in entries.values() if isinstance(v, torch.Tensor)]
    assert {type(t) for t in tensors} == {torch.Tensor}
    assert saved["state"][0]["exp_avg.codes"].element_size() == 1
    other = made(kind, Wide(kind).parameters())
    make_portable([other])
    for state_dict in (saved, native.state_dict()):
        other.load_state_dict(state_dict)
        for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
            assert type(mine["exp_avg"]) is type(theirs["exp_avg"])
            for name in ("exp_avg", "exp_avg_sq"):
                values = [s[name].dequantize() if is_low_bit(s[name]) else s[name] for s in (mine, theirs)]
                assert torch.equal(*values)


def test_offloaded_codes_and_scales_are_what_lies_on_the_host():
    model = Wide("AdamW8bit")
    ours = OffloadedOptimizer(made("AdamW8bit", model.parameters()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ours.step()
    numel = sum(p.numel() for p in model.parameters())
    assert 2 * numel <= ours.steps.host_bytes <= 2.3 * numel
    assert not ours.admission.parted


def test_rounding_into_weights_that_need_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^AdamW8bit has .* or leave the option out\.$"):
        check_rounding([made("AdamW8bit", Wide("AdamW8bit").parameters(), bf16_stochastic_round=True)])
    check_rounding([made("AdamW8bit", Wide("AdamW8bit").bfloat16().parameters(), bf16_stochastic_round=True)])
    module = Wide("AdamW8bit", {"bf16_stochastic_round": True}.items())
    with pytest.raises(ValueError, match="has bf16_stochastic_round=True and steps no bfloat16 weight"):
        trainer(tmp_path, plugins=[BF16Precision(weights="masters")]).fit(module, batches())


def refused_shards():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    foreign = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"Use torchao\.optim\.AdamW8bit, or a strategy that does not shard\.$"):
        make_portable([foreign(model.parameters())])
    make_portable([foreign(nn.Linear(8, 8).parameters())])


def test_bitsandbytes_steps_no_shards(ranks):
    ranks(refused_shards)


class Larger(Toy):
    """A toy whose matrices are worth few bits."""

    def __init__(self):
        super().__init__(width=512)


def test_by_yaml(tmp_path, monkeypatch):
    from lightning_ups.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # put back after the command line has set it
    options = [
        *("--model", "tests.optim.test_low_bit.Larger", "--data", "tests.cli_toys.Data"),
        *("--optimizer", "torchao.optim.AdamW8bit", "--optimizer.lr", "0.01"),
        *("--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.logger", "false"),
        *("--trainer.enable_progress_bar", "false"),
    ]
    assert main(["fit", *options]) in (0, None)
    saved = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)
    assert "exp_avg.codes" in saved["optimizer_states"][0]["state"][0]


def bytes_of_state(optimizer):
    leaves = [
        leaf for state in optimizer.state.values() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)
    ]
    averages = [leaf for leaf in leaves if leaf.dim()]  # a count of steps is on the host
    plain = [
        p for leaf in averages for p in ([getattr(leaf, n) for n in leaf.tensor_attrs] if is_low_bit(leaf) else [leaf])
    ]
    return sum(part.nbytes for part in plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_numbers_makes_as_many_bytes_of_state(kind):
    def stepped(prepared):
        module = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 3))
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer = prepared(made(kind, module.parameters()))
        optimizer.step()
        return optimizer

    real = stepped(lambda optimizer: optimizer)
    with fake_mode():
        fake = stepped(make_state_alone)
    assert bytes_of_state(fake) == bytes_of_state(real) > 0


def test_a_step_of_other_optimizers_stays():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    make_state_alone(optimizer).step()
    assert optimizer.param_groups[0]["params"][0].eq(0).all()

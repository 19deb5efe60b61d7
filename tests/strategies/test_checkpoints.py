import json
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from copy import deepcopy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ups.models.gpt import GPTModule
from lightning_ups.order import PolicyPrecision
from lightning_ups.state.checkpoint import consolidated, is_complete, newest
from lightning_ups.state.checkpoint.io import lanes
from lightning_ups.strategies import FSDP2Strategy
from tests.ranks import Ranks
from tests.state.checkpoint.io.test_lanes import interrupts
from tests.state.checkpoint.test_saver import by_slow_buffers, fill_disk
from tests.strategies.cases import two_ranks, whole
from tests.toys import Net, data, loader


def run_of(path, *, epochs=4, callbacks=(), **options):
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **{"logger": False, **options},
    )


def fit(path, *, strategy, epochs=4, ckpt_path=None, folder="checkpoints", model=None, callbacks=(), **options):
    warnings.simplefilter("ignore")
    model = model or Net()
    saver = ModelCheckpoint(path / folder, filename="{epoch}", save_top_k=-1)
    run_of(path, strategy=strategy, epochs=epochs, callbacks=[saver, *callbacks], **options).fit(
        model, loader(4), ckpt_path=ckpt_path
    )
    losses = torch.stack(model.losses)
    dist.all_reduce(losses)
    return (losses / 2).tolist()


def save_and_resume(path, options):
    whole = fit(path, strategy=FSDP2Strategy(**options))
    saved = path / "checkpoints" / "epoch=1.ckpt"
    assert is_complete(saved)
    resumed = fit(path, strategy=FSDP2Strategy(), ckpt_path=saved, folder="again")
    return whole, resumed


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"save": "full"}], ids=str)
def test_resumes_where_it_was(ranks, tmp_path, options):
    whole, resumed = ranks(save_and_resume, tmp_path, options)
    assert resumed == whole[2:]


class Noisy(Net):
    """Draws random numbers in its steps; its loader shuffles."""

    def training_step(self, batch, index):
        return super().training_step(batch + 0.1 * torch.rand(()), index)


def every_step(path, *, ckpt_path=None, folder="checkpoints", seed=7, accumulate=1, workers=0, strategy=None):
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["daemon"] = False  # a daemon, as ranks of the pool are, has no workers
    torch.manual_seed(seed)
    model = Noisy()
    torch.manual_seed(seed + dist.get_rank())
    rows = torch.arange(192.0).reshape(24, 8) / 100
    data = DataLoader(TensorDataset(rows), batch_size=3, shuffle=True, num_workers=workers, collate_fn=stacked)
    saver = ModelCheckpoint(path / folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    strategy = strategy or FSDP2Strategy()
    options = {"strategy": strategy, "epochs": 3, "accumulate_grad_batches": accumulate}
    run_of(path, callbacks=[saver], **options).fit(model, data, ckpt_path=ckpt_path)
    losses = torch.stack(model.losses)
    both = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(both, losses)
    return torch.stack(both, dim=1).tolist()


def stacked(rows):
    return torch.stack([row for (row,) in rows])


def every_step_and_resumed(path, steps, options):
    whole, resumed = every_step(path, **options), {}
    for step in steps:
        saved = path / "checkpoints" / f"step={step}.ckpt"
        resumed[step] = every_step(path, ckpt_path=saved, folder=f"again{step}", seed=99, **options)
    return whole, resumed


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"workers": 2}, marks=pytest.mark.slow), {"accumulate": 2}], ids=str
)
def test_resumes_within_an_epoch_bit_for_bit(ranks, tmp_path, options):
    whole, resumed = ranks(every_step_and_resumed, tmp_path, (3, 4), options)
    assert len(whole) == 12
    for step, losses in resumed.items():
        assert losses == whole[step * options.get("accumulate", 1) :], step


def keep_the_best(path, options):
    warnings.simplefilter("ignore")
    model, seen = Net(), []
    best = ModelCheckpoint(
        path / "best",
        monitor="score",
        mode="max",
        save_top_k=2,
        every_n_train_steps=1,
        filename="{step}",
        save_last="link",
    )
    last = ModelCheckpoint(path / "last", save_top_k=0, save_last=True, every_n_train_steps=1)
    scores = iter([1.0, 5.0, 2.0, 4.0, 3.0, 0.0])

    def check(*_):
        seen.extend(newest(path / folder) is not None for folder in ("best", "last"))

    model.on_train_batch_end = check

    class Score(Callback):
        def on_train_batch_end(self, *_):
            model.log("score", next(scores))

    run = run_of(path, strategy=FSDP2Strategy(**options), epochs=6, callbacks=[Score(), best, last])
    run.fit(model, loader(4))
    kept = sorted(entry.name for entry in (path / "best").iterdir())
    return {
        "kept": kept,
        "best": best.best_model_path.rpartition("/")[2],
        "link": os.readlink(path / "best" / "last.ckpt"),
        "whole": all(is_complete(entry) for entry in (path / "best").iterdir()),
        "last": sorted(entry.name for entry in (path / "last").iterdir()),
        "always one": all(seen[4:]),
        "last step": json.loads((path / "last" / "last.ckpt" / "complete.json").read_text())["global_step"],
    }


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=str)
def test_model_checkpoint_works_unchanged(ranks, tmp_path, options):
    assert ranks(keep_the_best, tmp_path, options) == {
        "kept": ["last.ckpt", "step=2.ckpt", "step=4.ckpt"],
        "best": "step=2.ckpt",
        "link": "step=4.ckpt",
        "whole": True,
        "last": ["last.ckpt"],
        "always one": True,
        "last step": 6,
    }


def resume_without_the_newest(path):
    fit(path, strategy=FSDP2Strategy(), epochs=2)
    folder = path / "checkpoints"
    dist.barrier()
    if dist.get_rank() == 0:  # as a kill leaves it
        (folder / "epoch=1.ckpt" / "complete.json").unlink()
        (folder / "epoch=1.ckpt" / "incomplete").touch()
        (folder / "last.ckpt").symlink_to("epoch=1.ckpt")
    dist.barrier()
    try:
        fit(path, strategy=FSDP2Strategy(), ckpt_path=folder / "epoch=1.ckpt", folder="a")
    except FileNotFoundError as error:
        refused = str(error)
    return refused, len(fit(path, strategy=FSDP2Strategy(), epochs=3, ckpt_path=folder / "last.ckpt", folder="b"))


def test_a_kill_leaves_the_last_good_one_and_says_so(ranks, tmp_path):
    refused, steps = ranks(resume_without_the_newest, tmp_path)
    assert "epoch=1.ckpt is not whole" in refused
    assert refused.endswith("epoch=0.ckpt', the newest whole one beside it.")
    assert steps == 2, "two epochs are left after the first"


class Thing:
    pass


class WithThing(Net):
    def __init__(self, thing):
        super().__init__()
        self.save_hyperparameters()


@two_ranks
def test_hyperparameters_of_any_class_do_not_stop_resuming(tmp_path):
    whole = fit(tmp_path, strategy=FSDP2Strategy(), epochs=3, model=WithThing(Thing()))
    saved = tmp_path / "checkpoints" / "epoch=0.ckpt"
    again = {"ckpt_path": saved, "folder": "b", "model": WithThing(Thing())}
    assert fit(tmp_path, strategy=FSDP2Strategy(), epochs=3, **again) == whole[1:]


class BySGD(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


@two_ranks
@pytest.mark.parametrize("save", ["sharded", "full"])
@pytest.mark.parametrize(
    ("by", "now", "text"),
    [
        (Net, BySGD, "saved by another optimizer than SGD: its groups have no momentum, dampening, which"),
        (BySGD, Net, "saved by another optimizer than AdamW: its groups have no betas, eps, which"),
    ],
)
def test_another_optimizer_is_refused_before_the_first_step(tmp_path, save, by, now, text):
    fit(tmp_path, strategy=FSDP2Strategy(save=save), epochs=1, model=by())
    saved = tmp_path / "checkpoints" / "epoch=0.ckpt"
    with pytest.raises(ValueError, match=text):
        fit(tmp_path, strategy=FSDP2Strategy(), epochs=2, model=now(), folder="again", ckpt_path=saved)


@two_ranks
def test_another_sharding_and_another_precision_resume(tmp_path):
    saved = tmp_path / "checkpoints" / "epoch=0.ckpt"
    whole = fit(tmp_path, strategy=FSDP2Strategy(), epochs=2)[1:]
    for options in ({"sharding": "gradients"}, {"sharding": "none"}, {"offload": True}):
        losses = fit(tmp_path, strategy=FSDP2Strategy(**options), epochs=2, ckpt_path=saved, folder=str(options))
        assert losses == pytest.approx(whole, rel=1e-6)
    half = {"precision": "bf16-mixed", "folder": "bf16", "ckpt_path": saved}
    assert fit(tmp_path, strategy=FSDP2Strategy(), epochs=2, **half) == pytest.approx(whole, rel=2e-2)


def from_one_device(path):
    return fit(path, strategy=FSDP2Strategy(), ckpt_path=path / "one.ckpt", folder="two")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_of_one_device_resumes_on_two(ranks, tmp_path):
    model = Net()
    saver = ModelCheckpoint(tmp_path, filename="one", enable_version_counter=False, save_top_k=1)
    run_of(tmp_path, epochs=1, callbacks=[saver]).fit(model, loader(8))
    rest = Net()
    run_of(tmp_path, epochs=4, enable_checkpointing=False).fit(rest, loader(8), ckpt_path=tmp_path / "one.ckpt")
    expected = [loss.item() for loss in rest.losses]
    assert ranks(from_one_device, tmp_path) == pytest.approx(expected, rel=1e-5)


def full_checkpoint(path):
    return fit(path, strategy=FSDP2Strategy(save="full"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_full_checkpoint_resumes_on_one_device(ranks, tmp_path):
    whole = ranks(full_checkpoint, tmp_path)
    rest = Net()
    saved = tmp_path / "checkpoints" / "epoch=0.ckpt"
    assert saved.is_file()
    run_of(tmp_path, epochs=4, enable_checkpointing=False).fit(rest, loader(8), ckpt_path=saved)
    assert [loss.item() for loss in rest.losses] == pytest.approx(whole[1:], rel=1e-5)


@two_ranks
def test_a_full_disk_stops_the_run_at_the_next_save(tmp_path):
    strategy = FSDP2Strategy(async_save=True)
    with pytest.MonkeyPatch.context() as patch:

        def fill(phase, at):
            if phase == "writing" and at.name == "epoch=1.ckpt" and dist.get_rank() == 1:
                fill_disk(patch, after=0)

        strategy.checkpoints.saver.observe = fill
        with pytest.raises(RuntimeError, match=r"(?s)epoch=1\.ckpt could not be saved.*No space left"):
            fit(tmp_path, strategy=strategy)
    assert newest(tmp_path / "checkpoints").name == "epoch=0.ckpt"


def ema():
    return EMAWeightAveraging(decay=0.5)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(8), self.head)


def averaged_and_resumed(path, options):
    found = []
    for resumed_from in (None, path / "whole" / "epoch=1.ckpt"):
        model = Normed()
        folder = "resumed" if resumed_from else "whole"
        arguments = {"ckpt_path": resumed_from, "folder": folder, "callbacks": [ema()]}
        losses = fit(path, strategy=FSDP2Strategy(**options), model=model, **arguments)
        weights = {name: whole(weight) for name, weight in model.state_dict().items()}
        found.append((losses, weights))
    (uninterrupted, averages), (resumed, again) = found
    alike = [None] * 2
    dist.all_gather_object(alike, all(torch.equal(averages[name], again[name]) for name in averages))
    return uninterrupted[-len(resumed) :] == resumed, alike


@pytest.mark.parametrize("save", ["sharded", "full"])
def test_averaged_weights_and_buffers_are_resumed_where_they_were(ranks, tmp_path, save):
    assert ranks(averaged_and_resumed, tmp_path, {"save": save}) == (True, [True, True])


def averaged_from_one_device(path):
    model = Net()
    fit(path, strategy=FSDP2Strategy(), ckpt_path=path / "one.ckpt", model=model, callbacks=[ema()])
    return {name: weight.full_tensor().tolist() for name, weight in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_averaged_weights_of_one_device_are_resumed_on_two(ranks, tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="one", enable_version_counter=False)
    run_of(tmp_path, epochs=1, callbacks=[saver, ema()]).fit(Net(), loader(8))
    rest = Net()
    options = {"callbacks": [ema()], "enable_checkpointing": False}
    run_of(tmp_path, **options).fit(rest, loader(8), ckpt_path=tmp_path / "one.ckpt")
    averages = ranks(averaged_from_one_device, tmp_path)
    for name, weight in rest.state_dict().items():
        assert torch.allclose(torch.tensor(averages[name]), weight, rtol=1e-5, atol=1e-7), name


class Teachers(Callback):
    """Keeps a whole copy of the layers, and sharded averages of them by name and by order."""

    def setup(self, trainer, pl_module, stage):
        self.whole = deepcopy(pl_module.layers)  # before anything is sharded

    def on_fit_start(self, trainer, pl_module):
        if not hasattr(self, "averages"):
            self.averages = {name: p.detach().clone() for name, p in pl_module.layers.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, p in pl_module.layers.named_parameters():
            self.averages[name].lerp_(p.detach(), 0.5)

    def state_dict(self):
        return {"whole": self.whole.state_dict(), "names": self.averages, "order": [*self.averages.values()]}

    def load_state_dict(self, state):
        self.whole.load_state_dict(state["whole"])
        self.averages, self.order = dict(state["names"]), state["order"]


def teachers_resumed(path, options):
    kept = []
    for ckpt_path in (None, path / "checkpoints" / "epoch=1.ckpt"):
        teachers, model = Teachers(), Net()
        with torch.no_grad():
            model.layers[0][0].weight.fill_(0.1 if ckpt_path else 0.2)
        fit(path, strategy=FSDP2Strategy(**options), model=model, ckpt_path=ckpt_path, callbacks=[teachers])
        kept.append([teachers.averages[name].full_tensor().tolist() for name in teachers.averages])
    assert all(isinstance(average, DTensor) for average in teachers.order)
    assert all(type(value) is torch.Tensor for value in teachers.whole.state_dict().values())
    assert (teachers.whole[0][0].weight == 0.2).all()
    return kept


@pytest.mark.parametrize("save", ["sharded", "full"])
def test_what_a_callback_keeps_whole_stays_whole_and_what_it_keeps_sharded_stays_so(ranks, tmp_path, save):
    uninterrupted, resumed = ranks(teachers_resumed, tmp_path, {"save": save})
    assert resumed == uninterrupted


class SaveInstead(Callback):
    """Saves once more when training fails."""

    def __init__(self, path):
        self.path, self.weights = path, None

    def on_exception(self, trainer, pl_module, exception):
        with torch.no_grad():
            for weight in pl_module.parameters():
                weight.add_(1)  # so that what the interrupted one has written is not right
        self.weights = {name: weight.full_tensor().clone() for name, weight in pl_module.state_dict().items()}
        trainer.save_checkpoint(self.path)


class Loaded(Net):
    """Keeps the weights that training begins with."""

    def on_train_start(self):
        self.begun = {name: weight.full_tensor().clone() for name, weight in self.state_dict().items()}


def interrupted_save(path, again):
    """Interrupt the first rank while another of its threads writes, and save in `on_exception`."""
    strategy, times = FSDP2Strategy(), []
    strategy.checkpoints.saver._lanes = lanes.Lanes(2)
    callback = SaveInstead(path / again)
    with pytest.MonkeyPatch.context() as patch, interrupts() as interrupt:
        if dist.get_rank() == 0:  # the other is ready, and the next save begins at once
            by_slow_buffers(patch, piece=16, pause_s=0.005)
        written = lanes._Buffer.content

        def content(self):
            if threading.current_thread() is not threading.main_thread() and not times and dist.get_rank() == 0:
                times.append(1)
                time.sleep(0.1)  # the main thread has written its part
                interrupt()
            return written(self)

        patch.setattr(lanes._Buffer, "content", content)
        with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
            fit(path, strategy=strategy, callbacks=[callback])
    assert len(times) == (dist.get_rank() == 0)
    assert not is_complete(path / "checkpoints" / "epoch=0.ckpt") or again.endswith("epoch=0.ckpt")
    model = Loaded()
    fit(path, strategy=FSDP2Strategy(), ckpt_path=path / again, folder="resumed", model=model)
    assert is_complete(path / again)
    return all(torch.equal(model.begun[name], weight) for name, weight in callback.weights.items())


@pytest.mark.parametrize("again", ["last.ckpt", "checkpoints/epoch=0.ckpt"])
def test_what_is_saved_after_an_interrupted_save_is_whole_and_right(ranks, tmp_path, again):
    assert ranks(interrupted_save, tmp_path, again)


class Recording(Logger):
    name, version = "recording", 0

    def __init__(self):
        super().__init__()
        self.metrics = {}

    def log_metrics(self, metrics, step=None):
        self.metrics.update(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


@two_ranks
def test_the_seconds_that_a_save_blocks_are_logged(tmp_path):
    warnings.simplefilter("ignore")
    logger = Recording()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    options = {"strategy": FSDP2Strategy(async_save=True), "epochs": 1, "callbacks": [saver]}
    run_of(tmp_path, logger=logger, log_every_n_steps=1, **options).fit(Net(), loader(4))
    assert dist.get_rank() or 0 < logger.metrics["checkpoint/blocked_s"] < 10


def test_options_and_paths_that_folders_cannot_have():
    with pytest.raises(TypeError, match=r"Leave them out\.$"):
        FSDP2Strategy().checkpoints._local("x", {"a": 1})
    with pytest.raises(ValueError, match=r"and copy from it\.$"):
        FSDP2Strategy().checkpoints._local("s3://bucket/x", None)


def on_some_ranks(path, batch_size, ckpt_path):
    """Train on rows that Lightning's sampler shuffles and divides; return the mean loss of each step."""
    warnings.simplefilter("ignore")
    model = Net()
    seed_everything(4, verbose=False)  # the sampler's too: ranks keep the one that another test of theirs has set
    rows = torch.randn(64, 8)
    saver = ModelCheckpoint(
        path / f"by_{dist.get_world_size()}", filename="{step}", save_top_k=-1, every_n_train_steps=1
    )
    run = run_of(path, strategy=FSDP2Strategy(), epochs=2, callbacks=[saver])
    run.fit(model, DataLoader(rows, batch_size=batch_size, shuffle=True), ckpt_path=ckpt_path)
    losses = torch.stack(model.losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


@pytest.mark.slow
def test_saved_on_four_ranks_it_goes_on_with_two_and_with_one(four_ranks, ranks, tmp_path, tmp_path_factory):
    whole = four_ranks(on_some_ranks, tmp_path, 2, None)
    saved = tmp_path / "by_4" / "step=3.ckpt"  # of eight steps to an epoch
    one = Ranks(1, tmp_path_factory.mktemp("one") / "store")
    try:
        results = [ranks(on_some_ranks, tmp_path, 4, saved), one(on_some_ranks, tmp_path, 8, saved)]
    finally:
        one.close()
    assert len(whole) == 16
    for losses in results:
        assert losses == pytest.approx(whole[3:], rel=1e-5)


class Scored(Net):
    def test_step(self, batch):
        self.log("score", sum(parameter.sum() for parameter in self.head.parameters()) + self.head(batch).mean() * 0)


def evaluate(path):
    warnings.simplefilter("ignore")
    restored = []
    strategy = FSDP2Strategy()
    run = run_of(path, strategy=strategy, enable_checkpointing=False)
    stock = PolicyPrecision.after_restore
    PolicyPrecision.after_restore = lambda self, module: restored.append(module)
    try:
        model = Scored()
        run.test(model, loader(4), ckpt_path=path / "w.safetensors", verbose=False)
    finally:
        PolicyPrecision.after_restore = stock
    head = model.head.weight.full_tensor() if hasattr(model.head.weight, "full_tensor") else model.head.weight
    return head.sum().item(), restored == [model]


def test_an_evaluation_reads_safetensors_and_the_precision_is_told(ranks, tmp_path):
    model = Net()
    torch.nn.init.constant_(model.head.weight, 3.0)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    assert ranks(evaluate, tmp_path) == (24.0, True)


@two_ranks
def test_what_slurm_requeues_is_whole_before_the_job_ends(tmp_path):
    warnings.simplefilter("ignore")
    model, seen = Net(), []

    def save(*_):
        model.trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
        seen.append(is_complete(tmp_path / "hpc_ckpt_1.ckpt"))

    model.on_train_batch_end = save
    run = run_of(tmp_path, strategy=FSDP2Strategy(async_save=True), epochs=1, enable_checkpointing=False)
    run.fit(model, loader(4))
    assert seen == [True]


@two_ranks
@pytest.mark.parametrize(
    ("place", "cure"),
    [("file", "or make it writable."), ("file/below", "or make it writable."), ("memory://bucket", "copy from it.")],
)
def test_a_place_where_nothing_can_be_saved_is_refused_before_the_first_step(tmp_path, place, cure):
    (tmp_path / "file").touch()
    place = place if "://" in place else tmp_path / place
    model = Net()
    with pytest.raises(ValueError, match=f"{re.escape(str(place))}.*{cure}$"):
        run_of(tmp_path, strategy=FSDP2Strategy(), epochs=1, callbacks=[ModelCheckpoint(place)]).fit(model, loader(4))
    assert not model.losses


@two_ranks
def test_a_place_where_nothing_will_be_saved_is_not(tmp_path):
    (tmp_path / "file").touch()
    saver = ModelCheckpoint(tmp_path / "file", save_top_k=0)
    run_of(tmp_path, strategy=FSDP2Strategy(), epochs=1, callbacks=[saver]).fit(Net(), loader(4))


class Signalled(Noisy):
    """Each rank gets SLURM's signal in the midst of its own step."""

    def __init__(self, steps=()):
        super().__init__()
        self.steps = steps

    def training_step(self, batch, index):
        if self.steps and len(self.losses) == self.steps[dist.get_rank()]:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, index)


def requeued_amid_steps(path, steps):
    warnings.simplefilter("ignore")
    command = path / "bin" / "scontrol"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\necho "$@" >> {path}/requeued\n')
    command.chmod(0o755)
    slurm = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "JOB_ID": 77, "JOB_NAME": "train", "NODEID": 0}
    rank = {"PROCID": dist.get_rank(), "LOCALID": dist.get_rank()}
    variables = {f"SLURM_{name}": str(value) for name, value in {**slurm, **rank}.items()}
    variables["PATH"] = f"{command.parent}:{os.environ['PATH']}"

    def losses(model, seed):
        torch.manual_seed(seed)
        run = run_of(path, strategy=FSDP2Strategy(), epochs=6, plugins=[SLURMEnvironment()], enable_checkpointing=False)
        run.fit(model, DataLoader(data(), batch_size=2, shuffle=True))
        return [loss.item() for loss in model.losses]

    dist.barrier()
    with patch.dict(os.environ, variables):
        whole = losses(Signalled(steps), 7)
        begun = path / "hpc_ckpt_2.ckpt"  # by a job that was ended amid it
        if dist.get_rank() == 0:
            begun.mkdir()
            (begun / "incomplete").touch()
        dist.barrier()
        resumed = losses(Signalled(), 8)
    return whole, resumed, is_complete(path / "hpc_ckpt_1.ckpt"), (path / "requeued").read_text()


@pytest.mark.timeout(120)
def test_slurms_signal_amid_different_steps_saves_at_one_and_the_job_goes_on_from_there(ranks, tmp_path):
    whole, resumed, is_whole, requeues = ranks(requeued_amid_steps, tmp_path, (1, 3))
    assert is_whole
    assert requeues == "requeue 77\n"
    assert 2 < len(resumed) < len(whole)
    assert resumed == whole[-len(resumed) :]


def train_gpt(path, folder, options, batch_size, ckpt_path):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = GPTModule(size="tiny", vocab_size=64, max_seq_len=16, lr=1e-2, warmup_steps=1, schedule="constant")
    losses = []
    model.on_train_batch_end = lambda outputs, *_: losses.append(outputs["loss"].detach())
    saver = ModelCheckpoint(path / folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    run = run_of(path, strategy=FSDP2Strategy(**options), epochs=6, callbacks=[saver])
    tokens = torch.arange(68).reshape(4, 17) % 64  # one batch for all ranks together
    run.fit(model, DataLoader(tokens, batch_size=batch_size), ckpt_path=ckpt_path)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


LAYOUTS = {
    "tensor parallel": ({"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt"}, 2),
    "context parallel": ({"context_parallel_size": 2}, 2),
    "replicated and sharded": ({"replicate_size": 2, "async_save": True}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_four_ranks_of_any_layout_to_two(four_ranks, ranks, tmp_path, layout):
    options, batch_size = LAYOUTS[layout]
    whole = four_ranks(train_gpt, tmp_path, "four", options, batch_size, None)
    saved = tmp_path / "four" / "step=3.ckpt"
    assert ranks(train_gpt, tmp_path, "two", {}, 2, saved) == pytest.approx(whole[3:], rel=1e-4)
    if layout == "tensor parallel":
        again = four_ranks(train_gpt, tmp_path, "again", options, batch_size, saved)
        assert again == pytest.approx(whole[3:], rel=1e-6)


def by_every_name(path):
    """Save in the background at every step, by hand and without optimizers, then come back by each name."""
    warnings.simplefilter("ignore")

    def saver():
        # Lightning writes a link last, once the save that it points to has begun.
        folder = path / "with spaces, and ümlaut"
        return ModelCheckpoint(
            folder, filename="{step}", monitor="loss", save_top_k=2, save_last="link", every_n_train_steps=1
        )

    model, strategy = Scored(), FSDP2Strategy(async_save=True)
    model.on_train_batch_end = lambda *_: model.log("loss", model.losses[-1], sync_dist=True)
    run = run_of(path, strategy=strategy, epochs=4, callbacks=[saver()])
    run.fit(model, loader(4))
    best = run.checkpoint_callback.best_model_path
    run.test(model, loader(4), ckpt_path="best", verbose=False)
    return model, saver, best


def resumed_by_name(path):
    model, saver, best = by_every_name(path)
    folder = path / "with spaces, and ümlaut"
    left = sorted(entry.name for entry in folder.iterdir() if "=" in entry.name)
    again = Scored()
    again.on_train_batch_end = lambda *_: again.log("loss", again.losses[-1], sync_dist=True)
    run = run_of(path, strategy=FSDP2Strategy(), epochs=6, callbacks=[saver()])
    run.fit(again, loader(4), ckpt_path="last")
    steps = len(model.losses), len(again.losses)
    for name, only in (("by hand.ckpt", False), ("weights.ckpt", True)):
        run.save_checkpoint(path / name if only else str(path / name), weights_only=only)
    third = Scored()
    run_of(path, strategy=FSDP2Strategy(), epochs=8).fit(third, loader(4), ckpt_path=path / "by hand.ckpt")
    with pytest.raises(ValueError, match="weights") as refused:
        run_of(path, strategy=FSDP2Strategy(), epochs=8).fit(Scored(), loader(4), ckpt_path=path / "weights.ckpt")
    tested = run_of(path, strategy=FSDP2Strategy())
    tested.test(Scored(), loader(4), ckpt_path=path / "weights.ckpt", verbose=False)
    try:
        run.save_checkpoint("memory://bucket/last.ckpt")
        remote = ""
    except ValueError as error:
        remote = str(error)
    finite = all(torch.isfinite(loss) for loss in third.losses)
    return left, is_complete(Path(best)), steps, len(third.losses), finite, str(refused.value), remote


def test_every_name_of_a_checkpoint(ranks, tmp_path):
    left, whole, steps, further, finite, refused, remote = ranks(resumed_by_name, tmp_path)
    assert len(left) == 2
    assert whole
    assert steps == (4, 2)
    assert further == 2
    assert finite
    assert "optimizer" in refused
    assert "cannot keep checkpoints at memory://" in remote


@two_ranks
def test_what_is_saved_after_fit_is_whole_when_that_returns(tmp_path):
    # In the background it would be lost with the process, which may end next.
    warnings.simplefilter("ignore")
    strategy = FSDP2Strategy(async_save=True)
    run = run_of(tmp_path, strategy=strategy, epochs=1, enable_checkpointing=False)
    run.fit(Net(), loader(4))
    strategy.checkpoints.saver.observe = lambda phase, _: time.sleep(0.3 * (phase == "written"))
    run.save_checkpoint(tmp_path / "final.ckpt")
    assert is_complete(tmp_path / "final.ckpt")


class Failing(Net):
    def training_step(self, batch, batch_idx):
        raise ValueError("the user's own")


@two_ranks
def test_a_save_that_fails_amid_an_error_does_not_hide_it(tmp_path):
    def observe(phase, _):
        if phase == "writing" and dist.get_rank() == 1:
            raise OSError("disk full")

    warnings.simplefilter("ignore")
    strategy = FSDP2Strategy(async_save=True)
    strategy.checkpoints.saver.observe = observe
    run = run_of(tmp_path, strategy=strategy, epochs=1, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(ValueError, match="the user's own"):
        run.fit(Failing(), loader(4))
    assert run.state.stage is None


def load_with_hook(path, change):
    class Changing(Net):
        def on_load_checkpoint(self, checkpoint):
            change(checkpoint)

    fit(path, strategy=FSDP2Strategy(), epochs=1)
    saved = path / "checkpoints" / "epoch=0.ckpt"
    model = Changing()
    fit(path, strategy=FSDP2Strategy(), epochs=2, ckpt_path=saved, folder="again", model=model)
    return len(model.losses)


def zero_the_bias(checkpoint):
    checkpoint["state_dict"]["head.bias"] = torch.zeros(1)


def drop_the_bias(checkpoint):
    del checkpoint["state_dict"]["head.bias"]


def forget_optimizers(checkpoint):
    checkpoint["optimizer_states"] = []


def rebuild(checkpoint):
    checkpoint["state_dict"] = {
        name.removeprefix("_orig_mod."): value for name, value in checkpoint["state_dict"].items()
    }


@two_ranks
@pytest.mark.parametrize(
    ("change", "name"),
    [(zero_the_bias, "head.bias"), (drop_the_bias, "head.bias"), (forget_optimizers, "optimizer_states")],
)
def test_what_the_hook_of_loading_changes_too_late_is_refused(tmp_path, change, name):
    with pytest.raises(ValueError, match=f"Changing.on_load_checkpoint has changed {name} in the checkpoint"):
        load_with_hook(tmp_path, change)


@two_ranks
def test_a_hook_of_loading_that_changes_nothing_is_called(tmp_path):
    assert load_with_hook(tmp_path, rebuild) == 1


class Both(torch.optim.Optimizer):
    """Steps matrices in one way and the rest in another, and saves two states under names of its own."""

    def __init__(self, parameters):
        parameters = [*parameters]
        self.matrices = torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.05, momentum=0.9)
        self.rest = torch.optim.AdamW([p for p in parameters if p.ndim < 2], lr=1e-2)
        self.calls = 0
        super().__init__(parameters, {})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.matrices.step()
        self.rest.step()
        self.calls += 1
        return loss

    def state_dict(self):
        states = ({}, self.rest.state_dict())  # a tuple, and something empty
        return {"matrices": self.matrices.state_dict(), "others": states, "calls": self.calls}

    def load_state_dict(self, state):
        _, rest = state["others"]
        self.matrices.load_state_dict(state["matrices"])
        self.rest.load_state_dict(rest)
        self.calls = state["calls"]


class Wrapping(Net):
    def configure_optimizers(self):
        return Both(self.parameters())


def wrapped(path, strategy, ckpt_path, folder, epochs=4):
    model = Wrapping()
    losses = fit(
        path, strategy=FSDP2Strategy(**strategy), model=model, ckpt_path=ckpt_path, folder=folder, epochs=epochs
    )
    return losses, model.trainer.optimizers[0].calls


def wrapped_and_resumed(path, strategy):
    whole = wrapped(path, strategy, None, "checkpoints")
    return whole, wrapped(path, {}, path / "checkpoints" / "epoch=1.ckpt", "again")


@pytest.mark.parametrize("strategy", [{}, {"save": "full"}], ids=str)
def test_an_optimizer_with_a_layout_of_its_own_resumes(ranks, tmp_path, strategy):
    (whole, calls), (resumed, again) = ranks(wrapped_and_resumed, tmp_path, strategy)
    assert resumed == whole[2:]
    assert calls == again == 4
    saved = tmp_path / "checkpoints" / "epoch=1.ckpt"
    checkpoint = consolidated(saved)[0] if saved.is_dir() else torch.load(saved)
    optimizer = Both(Wrapping().parameters())
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])  # as one device has saved it
    assert optimizer.calls == 2
    assert all("momentum_buffer" in optimizer.matrices.state[p] for p in optimizer.matrices.param_groups[0]["params"])


class Backbone(Net):
    def __init__(self):
        super().__init__()
        self.backbone = self.layers

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def unfrozen(path, strategy, ckpt_path=None, folder="checkpoints"):
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    model = Backbone()
    saver = ModelCheckpoint(path / folder, filename="{epoch}", save_top_k=-1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    run = run_of(path, strategy=strategy, callbacks=[saver, callback])
    run.fit(model, loader(8 // ranks), ckpt_path=ckpt_path)
    losses = torch.stack(model.losses)
    if ranks > 1:
        dist.all_reduce(losses)
    return (losses / ranks).tolist(), [group["lr"] for group in model.trainer.optimizers[0].param_groups]


def unfrozen_and_resumed(path, options):
    warnings.simplefilter("ignore")
    first, second = ("auto" if options is None else FSDP2Strategy(**options) for _ in range(2))
    return unfrozen(path, first), unfrozen(path, second, path / "checkpoints" / "epoch=1.ckpt", "again")


@pytest.mark.parametrize("options", [{}, {"save": "full"}], ids=str)
def test_a_run_resumes_after_a_callback_has_unfrozen_its_backbone(ranks, tmp_path, options):
    (whole, rates), (resumed, later) = ranks(unfrozen_and_resumed, tmp_path / "ours", options)
    # Not stock DDP: it reduces no gradients of what was frozen when it began.
    (stock, stock_rates), (stock_resumed, stock_later) = unfrozen_and_resumed(tmp_path / "stock", None)
    assert (whole, resumed) == (pytest.approx(stock, rel=1e-5), pytest.approx(stock_resumed, rel=1e-5))
    assert (rates, later) == (pytest.approx(stock_rates), pytest.approx(stock_later))
    assert len(later) == 2


class Odd:
    """Of a class that nobody has said to trust."""


class Remembers(Callback):
    def state_dict(self):
        return {"odd": Odd()}

    def load_state_dict(self, state):
        assert isinstance(state["odd"], Odd)


@two_ranks
def test_what_a_refusal_of_untrusted_classes_suggests_resumes(tmp_path):
    fit(tmp_path, strategy=FSDP2Strategy(), epochs=1, callbacks=[Remembers()])
    again = {"ckpt_path": tmp_path / "checkpoints" / "epoch=0.ckpt", "folder": "again"}
    with pytest.raises(ValueError, match="not trusted") as refused:
        fit(tmp_path, strategy=FSDP2Strategy(), callbacks=[Remembers()], **again)
    cure = re.search(r"FSDP2Strategy\(.*?\)", str(refused.value)).group()
    assert len(fit(tmp_path, strategy=eval(cure), epochs=2, callbacks=[Remembers()], **again)) == 1

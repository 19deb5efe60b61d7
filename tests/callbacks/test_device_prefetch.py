import multiprocessing
import random
import time
import warnings

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ups._compat.torch.device import Kernels
from lightning_ups.callbacks import AccelerationFlags, DevicePrefetch, ExactResume, RunManifest, TokenThroughput
from lightning_ups.callbacks import device_prefetch as module_under_test
from lightning_ups.order import applied
from lightning_ups.transforms.prefetch import lane_for
from tests.slow_lane import SlowLane
from tests.toys import Net
from tests.toys import loader as toy_loader
from tests.toys import trainer as toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:(?!.*DevicePrefetch)")


@pytest.fixture
def lane(monkeypatch):
    """A device whose copies are made at the last moment, in the place of a CPU that needs none."""
    lane = SlowLane()
    monkeypatch.setattr(module_under_test, "lane_for", lambda device: lane)
    return lane


class Noisy(LightningModule):
    """Draws random numbers in its steps and in the hook behind the transfer, and remembers everything."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.losses, self.said = [], []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.said.append("after")
        noise = torch.rand(()) + random.random()
        return {name: x + noise for name, x in batch.items()} if isinstance(batch, dict) else batch + noise

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = batch["a"] + batch["b"][: len(batch["a"])].mean()
        loss = (self.net(batch) * (random.random() + numpy.random.rand() + torch.rand(()))).square().mean()
        self.losses.append((batch_idx, loss.item(), batch.sum().item()))
        return loss

    def validation_step(self, batch, _):
        self.log("val", self.net(batch).mean() + torch.rand(()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rows(Dataset):
    def __init__(self, num=22, noise=False, broken=None):
        self.rows, self.noise, self.broken = torch.arange(num * 4.0).reshape(num, 4) / 100, noise, broken

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == self.broken:
            raise KeyError("this row is broken")
        return self.rows[index] + (torch.rand(()) if self.noise else 0)


class Stream(IterableDataset):
    def __init__(self, endless=False):
        self.endless = endless

    def __iter__(self):
        yield from Rows().rows
        while self.endless:
            yield from Rows().rows


def stock(dataset=None, **options):
    return lambda: DataLoader(dataset or Rows(), **{"batch_size": 4, **options})


def dictionary(**options):
    return lambda: {
        "a": DataLoader(Rows(10), batch_size=4, shuffle=True, **options),
        "b": DataLoader(Rows(22), batch_size=4, shuffle=True, **options),
    }


def fit(path, loader, callbacks, *, model=None, val=None, ckpt_path=None, seed=7, **options):
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(seed)
    model = model or Noisy()
    torch.manual_seed(seed)
    trainer = run_of(path, callbacks, **{"max_epochs": 2, "num_sanity_val_steps": 1, **options})
    data = {"datamodule": loader} if isinstance(loader, LightningDataModule) else {"train_dataloaders": loader()}
    trainer.fit(model, **data, val_dataloaders=val, ckpt_path=ckpt_path)
    return model


def drawn():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


CASES = {
    "0 workers that draw": (stock(Rows(noise=True), shuffle=True), {}),
    "a worker": (stock(shuffle=True, num_workers=1), {}),
    "a worker that lives on": (stock(shuffle=True, num_workers=1, persistent_workers=True), {}),
    "no length": (stock(Stream()), {}),
    "no length and a worker": (stock(Stream(), num_workers=1), {}),
    "no end": (stock(Stream(endless=True), num_workers=1), {"limit_train_batches": 3}),
    "two of unequal length": (dictionary(), {}),
    "two with workers": (dictionary(num_workers=1), {}),
    "fewer batches": (stock(shuffle=True, num_workers=1, persistent_workers=True), {"limit_train_batches": 2}),
    "the last step amid an epoch": (stock(shuffle=True, num_workers=1), {"max_steps": 8, "max_epochs": -1}),
    "accumulation": (stock(num_workers=1), {"accumulate_grad_batches": 4}),
    "validation amid an epoch": (stock(num_workers=1), {"val_check_interval": 2, "val": toy_loader}),
    "a precision that converts": (stock(Rows(noise=True)), {"precision": "64-true"}),
    "converts what workers read": (stock(num_workers=1), {"precision": "64-true"}),
}


def with_rows_for_validation(options):
    if "val" in options:
        return {**options, "val": DataLoader(Rows(), batch_size=4)}
    return options


@pytest.mark.parametrize("case", CASES)
def test_losses_and_random_numbers_are_the_same_bit_for_bit(tmp_path, lane, case):
    loader, options = CASES[case]
    options = with_rows_for_validation(options)
    plain, after_plain = fit(tmp_path, loader, [], **options), drawn()
    ours, after_ours = fit(tmp_path, loader, [DevicePrefetch(min_kb=0)], **options), drawn()
    assert len(plain.losses) > 3
    assert ours.losses == plain.losses
    assert ours.said == plain.said
    assert after_ours == after_plain
    assert "join" in lane.said, "copies were made on the second stream"
    assert lane.open == {}


class Order(Callback):
    """Says in which order things happen, to the lane."""

    def __init__(self, lane):
        self.lane = lane

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.lane.said.append(f"step {batch_idx}")

    def on_after_backward(self, trainer, pl_module):
        self.lane.said.append("backward")


def order_of(lane):
    return [said for said in lane.said if said not in ("memory", "wait")]


def test_with_workers_the_copy_begins_before_the_backward_of_the_step_before(tmp_path, lane):
    fit(tmp_path, stock(num_workers=1), [DevicePrefetch(min_kb=0), Order(lane)], max_epochs=1, limit_train_batches=3)
    assert order_of(lane) == [
        *("step 0", "copy", "backward"),
        *("join", "step 1", "copy", "backward"),
        *("join", "step 2", "backward"),
    ]


@pytest.mark.parametrize(
    ("workers", "options"), [(0, {}), (1, {"read_ahead": False})], ids=["no workers", "not read ahead"]
)
def test_without_them_it_begins_where_the_batch_is_moved(tmp_path, lane, workers, options):
    callbacks = [DevicePrefetch(min_kb=0, **options), Order(lane)]
    fit(tmp_path, stock(num_workers=workers), callbacks, max_epochs=1, limit_train_batches=3)
    assert order_of(lane) == [
        *("step 0", "backward"),
        *("copy", "join", "step 1", "backward"),
        *("copy", "join", "step 2", "backward"),
    ]


class Hooked(Noisy):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.said.append("before")
        return batch.mul_(1 + random.random())

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.said.append("transfer")
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch + torch.rand(())


class HookedData(LightningDataModule):
    def __init__(self, hook, **options):
        super().__init__()
        self.options = options

        def called(*args):
            random.random()
            return getattr(LightningDataModule, hook)(self, *args)

        called.__code__ = called.__code__.replace(co_name=hook)
        self.__class__ = type("HookedData", (HookedData,), {hook: lambda self, *args: called(*args)})

    def train_dataloader(self):
        return DataLoader(Rows(), batch_size=4, shuffle=True, **self.options)


@pytest.mark.parametrize("early", [True, False], ids=["early copies", "late copies"])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_modules_hooks_keep_their_places(tmp_path, lane, workers, early):
    lane.early = early
    plain = fit(tmp_path, stock(shuffle=True, num_workers=workers), [], model=Hooked())
    ours = fit(tmp_path, stock(shuffle=True, num_workers=workers), [DevicePrefetch(min_kb=0)], model=Hooked())
    assert ours.losses == plain.losses
    assert ours.said == plain.said
    assert ours.said[:3] == ["before", "transfer", "after"]
    assert "join" in lane.said


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"])
def test_the_datamodules_hooks_keep_their_places(tmp_path, lane, hook):
    plain = fit(tmp_path, HookedData(hook, num_workers=1), [])
    ours = fit(tmp_path, HookedData(hook, num_workers=1), [DevicePrefetch(min_kb=0), Order(lane)])
    assert ours.losses == plain.losses
    first_copy = order_of(lane).index("copy")
    is_ahead = order_of(lane)[first_copy + 1] == "backward"
    assert is_ahead == (hook == "on_after_batch_transfer")


class Nested(Net):
    """Batches as collate functions make them, and what the transfer leaves alone."""

    def training_step(self, batch, _):
        assert batch["name"] == "one"
        assert batch["pair"][1] == 3
        assert batch["pair"][2] is None
        return super().training_step(batch["pair"][0] + batch["ids"].float().mean(), _)


def nested(rows):
    x = torch.stack(rows)
    return {"name": "one", "pair": (torch.cat([x, x], dim=1), 3, None), "ids": torch.arange(4)}


@pytest.mark.parametrize("workers", [0, 1])
def test_nested_batches_with_things_that_are_no_tensors(tmp_path, lane, workers):
    loader = stock(collate_fn=nested, num_workers=workers)
    plain = fit(tmp_path, loader, [], model=Nested())
    ours = fit(tmp_path, loader, [DevicePrefetch(min_kb=0)], model=Nested())
    assert ours.losses == plain.losses
    assert "join" in lane.said


# Where the data stand


def checkpoints(path):
    return ModelCheckpoint(path, filename="{step}", every_n_train_steps=1, save_top_k=-1)


RESUMED = {name: CASES[name][0] for name in ("0 workers that draw", "a worker", "no length", "two of unequal length")}


@pytest.mark.parametrize("loader", RESUMED)
def test_a_run_resumes_amid_an_epoch_with_the_same_losses(tmp_path, lane, loader):
    def run(folder, **options):
        callbacks = [ExactResume(), DevicePrefetch(min_kb=0), checkpoints(tmp_path / folder)]
        return fit(tmp_path, RESUMED[loader], callbacks, enable_checkpointing=True, **options).losses

    whole = run("whole")
    alone = fit(tmp_path, RESUMED[loader], [ExactResume()]).losses
    assert whole == alone
    for step in (1, 4, 5, 7):
        again = run(f"again {step}", ckpt_path=tmp_path / "whole" / f"step={step}.ckpt", seed=99)
        assert again == whole[step:], step
    assert "copy" in lane.said


def test_a_checkpoint_knows_nothing_of_what_was_read_ahead(tmp_path, lane):
    class Positions(Callback):
        def __init__(self):
            self.found = []

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            (state,) = checkpoint["lightning_ups.resume"]["ranks"]
            loops = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            self.found.append((state["taken"], str(state["loaders"]), str(state["random"]), str(loops)))

    def positions(*callbacks):
        seen = Positions()
        fit(
            tmp_path,
            stock(shuffle=True, num_workers=1),
            [ExactResume(), *callbacks, seen, ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)],
            enable_checkpointing=True,
        )
        return seen.found

    assert positions(DevicePrefetch(min_kb=0)) == positions()


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_the_place_beside_exact_resume_in_the_list_does_not_matter(tmp_path, lane, first):
    pair = [DevicePrefetch(min_kb=0), ExactResume()]
    loader = stock(shuffle=True, num_workers=1)
    assert fit(tmp_path, loader, pair if first else pair[::-1]).losses == fit(tmp_path, loader, []).losses


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_loader_comes_at_the_same_step(tmp_path, lane, workers):
    def losses(workers, *callbacks):
        model = Noisy()
        with pytest.raises(KeyError, match="this row is broken"):
            fit(tmp_path, stock(Rows(broken=13), num_workers=workers), [*callbacks], model=model)
        return model.losses

    plain = losses(0)
    assert len(plain) == 3
    assert losses(workers, DevicePrefetch(min_kb=0)) == plain
    assert lane.open == {}


# What it leaves behind


def run_of(tmp_path, callbacks, **options):
    return toy_trainer(tmp_path, callbacks=callbacks, **{"max_epochs": 1, **options})


def test_nothing_is_left_after_fit_and_a_second_fit_works(tmp_path, lane):
    prefetch = DevicePrefetch(min_kb=0)
    trainer, model = run_of(tmp_path, [prefetch]), Noisy()
    loader = stock(num_workers=1)()
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, loader)
        assert "batch_to_device" not in vars(trainer.strategy)
        assert prefetch._copies is None
        assert lane.open == {}
    assert lane.said.count("join") == 2 * 5  # all but the first batch of each fit
    lane.said.clear()
    trainer.validate(model, DataLoader(Rows(), batch_size=4), verbose=False)
    assert lane.said == []


def test_nothing_is_left_after_an_exception(tmp_path, lane):
    class Fails(Noisy):
        def on_after_backward(self):
            if len(self.losses) == 3:
                raise RuntimeError("stop here")

    prefetch = DevicePrefetch(min_kb=0)
    trainer = run_of(tmp_path, [prefetch])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(Fails(), stock(num_workers=1)())
    assert "batch_to_device" not in vars(trainer.strategy)
    assert lane.open == {}
    assert lane.said.count("give up") == 1  # the batch that was on its way
    trainer.fit(Noisy(), stock(num_workers=1)())


def test_an_epoch_that_is_left_early_leaves_nothing_for_the_next(tmp_path, lane):
    class Leaves(Noisy):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    loader = stock(shuffle=True, num_workers=1, persistent_workers=True)
    plain = fit(tmp_path, loader, [], model=Leaves())
    ours = fit(tmp_path, loader, [DevicePrefetch(min_kb=0), Order(lane)], model=Leaves())
    assert len(plain.losses) == 4
    assert ours.losses == plain.losses
    second = order_of(lane)[order_of(lane).index("step 0", 1) :]
    assert second[:4] == ["step 0", "copy", "backward", "join"]


# What it says


def lines(caplog):
    return [record.getMessage() for record in caplog.records if "DevicePrefetch" in record.getMessage()]


@pytest.fixture
def said(caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        yield lambda: lines(caplog)


class Report(Callback):
    def on_train_end(self, trainer, pl_module):
        self.parts = applied(trainer.strategy).report.parts


def test_on_a_cpu_there_is_nothing_to_do_which_is_said_once(tmp_path, said):
    report = Report()
    fit(tmp_path, stock(), [AccelerationFlags(tf32=False), DevicePrefetch(), report])
    assert len(said()) == 1
    assert "training runs on the cpu" in said()[0]
    assert report.parts["DevicePrefetch"]["lines"] == [said()[0].removeprefix("DevicePrefetch: ")]


@pytest.mark.parametrize(
    ("loader", "model", "prefetch", "words"),
    [
        (stock(num_workers=1), Noisy, {"min_kb": 0}, "during the previous step"),
        (stock(), Noisy, {"min_kb": 0}, "if the host is ahead: DataLoader reads in this process"),
        (stock(num_workers=1), Noisy, {"min_kb": 0, "read_ahead": False}, "read_ahead=False"),
        (stock(num_workers=1), Hooked, {"min_kb": 0}, "Hooked.on_before_batch_transfer and Hooked.transfer_batch_to"),
        (stock(), Noisy, {}, "no tensor of 64 KiB or more"),
        (stock(), Noisy, {"min_kb": 0, "every": 1}, "shapes change"),
        (stock(num_workers=1), Noisy, {"min_kb": 0, "precision": "64-true"}, "are changed before they are moved"),
        (stock(num_workers=1), Noisy, {"min_kb": 0, "pinned": False}, "are not in pinned memory"),
    ],
    ids=["ahead", "no workers", "not asked", "hooks", "small", "shapes", "converted", "not pinned"],
)
def test_what_took_effect_is_said_once_and_reported(tmp_path, lane, said, loader, model, prefetch, words):
    report, options = Report(), {**prefetch}
    if options.pop("every", None):
        loader = lambda: DataLoader(list(torch.rand(10, 4).split([1, 2, 3, 4])), batch_size=None)  # noqa: E731
    lane.pinned, precision = options.pop("pinned", True), options.pop("precision", None)
    callbacks = [DevicePrefetch(**options), report, AccelerationFlags(tf32=False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, loader, callbacks, model=model(), precision=precision)
    (line,) = (line for line in said() if "pin_memory" not in line)
    assert words in line
    facts = report.parts["DevicePrefetch"]
    assert facts["lines"] == [line.removeprefix("DevicePrefetch: ")]
    assert facts["tensors"]["ahead"] > 0 or not facts["read_ahead"]


@pytest.mark.parametrize("beside", [(), (AccelerationFlags(tf32=False),)], ids=["alone", "beside a step"])
def test_it_is_in_the_manifest(tmp_path, lane, beside):
    manifest = RunManifest()
    callbacks = [manifest, *beside, DevicePrefetch(min_kb=0)]
    fit(tmp_path, stock(num_workers=1), callbacks, max_epochs=1)
    part = manifest.manifest["report"]["DevicePrefetch"]
    assert part["tensors"] == {"ahead": 5, "beside": 0, "plain": 1, "unused": 0, "unpinned": 0}


def test_batches_that_are_not_pinned_are_told_of_once(tmp_path, lane):
    lane.pinned = False
    with pytest.warns(UserWarning, match=r"Give the training DataLoader pin_memory=True\.$") as caught:
        ours = fit(tmp_path, stock(num_workers=1), [DevicePrefetch(min_kb=0)])
    assert len([w for w in caught if "DevicePrefetch" in str(w.message)]) == 1
    assert ours.losses == fit(tmp_path, stock(num_workers=1), []).losses


def test_a_step_that_takes_an_iterator_is_left_alone(tmp_path, lane, said):
    class Own(Noisy):
        def training_step(self, dataloader_iter):
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    fit(tmp_path, stock(num_workers=1), [DevicePrefetch(min_kb=0)], model=Own())
    assert lane.said == []
    assert "dataloader_iter" in said()[0]


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"Use a finite number, 0 or more\.$"):
        DevicePrefetch(min_kb=-1)
    with pytest.raises(ValueError, match=r"Use a finite number, 0 or more\.$"):
        DevicePrefetch(min_kb=float("nan"))


# What it costs


class Slow(Rows):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)


def test_the_wait_for_workers_is_still_counted_as_one_for_data(tmp_path, lane):
    throughput = TokenThroughput(unit="samples", warmup_steps=1, inspect_at=None, table=False)
    fit(tmp_path, stock(Slow(), num_workers=1), [throughput, DevicePrefetch(min_kb=0)], max_epochs=1)
    assert throughput.summary.split["data"] > 0.5
    assert throughput.summary.split["backward"] < throughput.summary.split["data"]


# Several ranks


def on_two_ranks(folder, strategy, workers):
    multiprocessing.current_process()._config["daemon"] = False  # a daemon, as ranks of the pool are, has no workers
    lane = SlowLane()

    def losses(*callbacks):
        options = {"strategy": strategy, "devices": 2, "gradient_clip_val": 1.0}
        loader = stock(shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        return fit(folder, loader, [*callbacks], **options).losses

    try:
        module_under_test.lane_for = lambda device: lane
        ours = losses(DevicePrefetch(min_kb=0), Order(lane))
    finally:
        module_under_test.lane_for = lane_for
    assert ours == losses()
    assert lane.open == {}
    return order_of(lane)[:3]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # which take long to stop in a rank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_rank_copies_beside_its_steps(ranks, tmp_path, strategy, workers):
    first = ["step 0", "copy", "backward"] if workers else ["step 0", "backward", "copy"]
    assert ranks(on_two_ranks, str(tmp_path), strategy, workers) == first


# On a GPU


class Heavy(LightningModule):
    """Some products of matrices, whose time is many times that of a copy."""

    def __init__(self, *, reads):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4096, 4096) / 64)
        self.register_buffer("start", torch.randn(4096, 4096))
        self.reads, self.losses = reads, []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + torch.rand((), device=batch.device)

    def training_step(self, batch, _):
        x = self.start
        for _ in range(4):
            x = self.weight @ x
        loss = x.square().mean() + self.weight.mean() * batch.mean()
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.reads:
            self.losses[-1].item()  # so that the host is never ahead of the device

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Big(Dataset):
    """Batches that are ready, some of them pinned already."""

    def __init__(self, num_bytes, *, pinned):
        made = [torch.full((num_bytes // 4,), n / 7.0) for n in range(4)]
        self.batches = [batch.pin_memory() for batch in made] if pinned else made

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.batches[index % 4]


def big(kind):
    if kind == "workers":  # small enough for the shared memory of a container
        return DataLoader(Big(2**23, pinned=False), batch_size=None, num_workers=1, pin_memory=True), True
    return DataLoader(Big(2**26, pinned=True), batch_size=None), False


def trained_on_gpu(tmp_path, kind, callbacks, *, steps=20):
    loader, reads = big(kind)
    torch.manual_seed(1)
    model = Heavy(reads=reads)
    torch.manual_seed(1)
    run_of(tmp_path, callbacks, accelerator="gpu", devices=1, max_epochs=-1, max_steps=steps).fit(model, loader)
    return [loss.item() for loss in model.losses]


class Seen(Callback):
    """What the device does between two steps."""

    def __init__(self, first, last):
        self.first, self.last, self.kernels = first, last, Kernels()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.first:
            torch.cuda.synchronize()
            self.kernels.start()
        elif batch_idx == self.last:
            torch.cuda.synchronize()
            self.found = self.kernels.stop()

    def hidden(self):
        """Return, for each copy from the host of some size, the part of it during which kernels ran."""
        copies = [(start, end) for name, start, end in self.found if "HtoD" in name and end - start > 50]
        work = [(start, end) for name, start, end in self.found if "Mem" not in name]
        return [sum(max(0.0, min(end, e) - max(start, s)) for s, e in work) / (end - start) for start, end in copies]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["workers", "no workers"])
class TestOnAGpu:
    def test_losses_are_the_same_bit_for_bit(self, tmp_path, kind):
        plain = trained_on_gpu(tmp_path, kind, [])
        assert len(plain) == 20
        assert trained_on_gpu(tmp_path, kind, [DevicePrefetch()]) == plain

    def test_copies_are_hidden(self, tmp_path, kind):
        plain = Seen(5, 11)
        trained_on_gpu(tmp_path, kind, [plain], steps=13)
        assert len(plain.hidden()) >= 4
        assert max(plain.hidden()) < 0.2
        for last_try in (*[False] * 7, True):  # a loader whose worker waits for a core gives nothing to copy in time
            ours = Seen(5, 11)
            trained_on_gpu(tmp_path, kind, [ours, DevicePrefetch()], steps=13)
            assert len(ours.hidden()) >= 4
            all_but_first = sorted(ours.hidden())[1:]  # before which the device was waited for
            if last_try or all_but_first[0] > 0.8:
                break
        assert all_but_first[0] > 0.8

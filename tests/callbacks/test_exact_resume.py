import logging
import random
import warnings

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ups.callbacks.exact_resume import ExactResume
from tests.toys import trainer


class Noisy(LightningModule):
    """Draws from every generator in each step, and remembers what it saw."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, _):
        if isinstance(batch, dict):
            batch = batch["a"] + batch["b"][: len(batch["a"])].mean()
        noise = random.random() + numpy.random.rand() + torch.rand(())
        loss = (self.net(batch) * noise).square().mean() + batch.sum() * 0
        self.losses.append((loss.item(), batch.sum().item()))
        return loss

    def validation_step(self, batch, _):
        self.log("val", self.net(batch).mean() + torch.rand(()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class FollowsMetric(Noisy):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class Rows(Dataset):
    def __init__(self, num=22, noise=False):
        self.rows, self.noise, self.read = torch.arange(num * 4.0).reshape(num, 4) / 100, noise, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read += 1
        return self.rows[index] + (torch.rand(()) if self.noise else 0)


def run(path, loader, *, ckpt_path=None, callbacks=None, folder="c", val=None, seed=7, kind=Noisy, every=1, **options):
    warnings.filterwarnings("ignore", "(?!A resumed run may)")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model = kind()
    torch.manual_seed(seed)
    callbacks = [ExactResume()] if callbacks is None else callbacks
    saving = ModelCheckpoint(path / folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    options = {"strategy": "auto", "devices": 1, "max_epochs": 3, **options}
    made = trainer(path, callbacks=[*callbacks, saving], enable_checkpointing=True, **options)
    made.fit(model, loader(), val, ckpt_path=ckpt_path)
    return model.losses


def whole_and_resumed(path, loader, step, **options):
    options["every"] = step
    whole = run(path, loader, **options)
    resumed = run(path, loader, ckpt_path=path / "c" / f"step={step}.ckpt", folder="again", seed=99, **options)
    return whole, resumed


def stock(dataset=None, **options):
    def make():
        return DataLoader(dataset or Rows(), batch_size=4, **{"shuffle": True, **options})

    return make


def with_own_generator():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Rows(), batch_size=4, shuffle=True, generator=generator)


def with_replacement():
    rows = Rows()
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(rows, replacement=True, num_samples=40, generator=generator)
    return DataLoader(rows, batch_size=4, sampler=sampler)


def weighted():
    return DataLoader(Rows(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(22), 22))


def subset():
    return DataLoader(Rows(), batch_size=4, sampler=SubsetRandomSampler(range(3, 20)), drop_last=True)


def that_draws_while_it_reads():
    return DataLoader(Rows(noise=True), batch_size=4, shuffle=True)


def two_of_unequal_length():
    return {
        "a": DataLoader(Rows(10), batch_size=4, shuffle=True),
        "b": DataLoader(Rows(22), batch_size=4, shuffle=True),
    }


LOADERS = {
    "0 workers": stock(),
    "in order": stock(shuffle=False),
    "own generator": with_own_generator,
    "with replacement": with_replacement,
    "weighted": weighted,
    "subset": subset,
    "noise in the dataset": that_draws_while_it_reads,
    "two of unequal length": two_of_unequal_length,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [1, 4, 6, 8, 12])  # of six to an epoch
@pytest.mark.parametrize("loader", LOADERS)
def test_the_same_losses_bit_for_bit(tmp_path, loader, step):
    whole, resumed = whole_and_resumed(tmp_path, LOADERS[loader], step)
    assert resumed == whole[step:]


class Estimates(Noisy):
    """Lets Lightning make the loaders before a strategy such as fsdp2 loads the checkpoint."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 18
        return super().configure_optimizers()


def of_loaders_that_are_made_early(path, strategy, callbacks):
    lines = []
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: lines.append(r.getMessage()) or True)
    options = {"kind": Estimates, "strategy": strategy, "callbacks": callbacks}
    whole, resumed = whole_and_resumed(path, stock(), 9, **options)
    return whole, resumed, [line for line in lines if "ExactResume" in line]


@pytest.mark.parametrize(("strategy", "callbacks"), [("auto", [ExactResume()]), ("fsdp2", [])], ids=["auto", "fsdp2"])
def test_loaders_may_be_made_before_the_checkpoint_is_loaded(fresh_process, tmp_path, strategy, callbacks):
    whole, resumed, lines = fresh_process(of_loaders_that_are_made_early, tmp_path, strategy, callbacks)
    assert whole[9:] == resumed
    assert lines == ["ExactResume: continues with batch 4 of 6 of epoch 1"]


class Several(Noisy):
    """Learns from what each loader gives, as far as it gives something."""

    def training_step(self, batch, index):
        given = [each if isinstance(each, torch.Tensor) else None for each in tree_leaves(batch)]
        self.losses.append([None if each is None else each.tolist() for each in given])
        return super().training_step(torch.cat([each for each in given if each is not None]), index)


def short_of_its_own_generator():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Rows(10), batch_size=4, shuffle=True, generator=generator)


SHORT = {
    "in order": stock(shuffle=False, dataset=Rows(10)),
    "shuffled": stock(dataset=Rows(10)),
    "own generator": short_of_its_own_generator,
    "noise in the dataset": stock(dataset=Rows(10, noise=True)),
    "a state": lambda: Stateful(num=3),
    "a state, of unknown length": lambda: Stateful(sized=False, num=3),
    "a stream": lambda: DataLoader(Streamed(), batch_size=8),
}
COLLECTIONS = {
    "list": lambda short, long: [short, long],
    "the longer first": lambda short, long: [long, short],
    "nested": lambda short, long: {"a": [long, short], "b": (DataLoader(Rows(6), batch_size=3),)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [2, 3, 4, 5, 8, 9, 11, 12])  # of six to an epoch, and three of the shorter one
@pytest.mark.parametrize("collection", COLLECTIONS)
@pytest.mark.parametrize("short", SHORT)
def test_a_loader_that_ends_before_the_others(tmp_path, short, collection, step):
    def loader():
        return CombinedLoader(
            COLLECTIONS[collection](SHORT[short](), stock(dataset=Rows(22, noise=True))()), "max_size"
        )

    whole, resumed = whole_and_resumed(tmp_path, loader, step, kind=Several)
    assert None in whole[6]
    assert resumed == whole[2 * step :]


@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_has_ended_may_be_resumed_twice_and_its_batches_counted_on(tmp_path):
    def loader():
        return CombinedLoader([SHORT["own generator"](), stock(dataset=Rows(400))()], "max_size")

    options = {"kind": Several, "every": 10}
    whole = run(tmp_path, loader, **options)
    run(tmp_path, loader, ckpt_path=tmp_path / "c" / "step=70.ckpt", folder="again", **options)
    third = run(tmp_path, loader, ckpt_path=tmp_path / "again" / "step=80.ckpt", folder="third", seed=99, **options)
    assert third == whole[160:]


@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_had_ended_and_goes_on_now_is_told(tmp_path):
    def loader(rows):
        return CombinedLoader([DataLoader(rows, batch_size=4), stock()()], "max_size")

    run(tmp_path, lambda: loader(Rows(8)), kind=Several)
    with pytest.warns(UserWarning, match="does not give the samples that it gave before the checkpoint"):
        run(
            tmp_path,
            lambda: loader(Rows(12)),
            ckpt_path=tmp_path / "c" / "step=4.ckpt",
            folder="again",
            kind=Several,
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [3, 4, 7])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_workers_that_ends_before_the_others(tmp_path, persistent, step):
    def loader():
        short = stock(dataset=Rows(10), num_workers=1, persistent_workers=persistent)()
        return CombinedLoader([short, stock(num_workers=1, persistent_workers=persistent)()], "max_size")

    whole, resumed = whole_and_resumed(tmp_path, loader, step, kind=Several, max_epochs=2)
    assert resumed == whole[2 * step :]


@pytest.mark.filterwarnings("ignore")
def test_without_it_other_samples_are_taken(tmp_path):
    whole, resumed = whole_and_resumed(tmp_path, stock(), 4, callbacks=[])
    assert [samples for _, samples in resumed[:2]] != [samples for _, samples in whole[4:6]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [4, 6, 8])
@pytest.mark.parametrize("persistent", [False, True])
def test_with_workers(tmp_path, persistent, step):
    loader = stock(num_workers=2, persistent_workers=persistent)
    whole, resumed = whole_and_resumed(tmp_path, loader, step, max_epochs=2)
    assert resumed == whole[step:]


class Stateful:
    """A loader with a state, in an order that only it knows."""

    def __init__(self, sized=True, num=9):
        self.num, self.position, self.order = num, 0, random.Random(5)
        self.taken_up = False
        if sized:
            self.__class__ = SizedStateful

    def __iter__(self):
        if not self.taken_up:
            self.position = 0
        self.taken_up = False
        while self.position < self.num:
            self.position += 1
            yield torch.full((2, 4), self.order.random()) + torch.rand(())
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "order": self.order.getstate()}

    def load_state_dict(self, state):
        self.position, self.taken_up = state["position"], state["position"] > 0
        version, numbers, gauss = state["order"]
        self.order.setstate((version, tuple(numbers), gauss))


class SizedStateful(Stateful):
    def __len__(self):
        return self.num


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [1, 4, 9, 11])
@pytest.mark.parametrize("sized", [True, False])
def test_a_loader_with_a_state(tmp_path, sized, step):
    whole, resumed = whole_and_resumed(tmp_path, lambda: Stateful(sized), step, max_epochs=2)
    assert len(whole) == 18
    assert resumed == whole[step:]


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.randn(20, 4)


@pytest.mark.filterwarnings("ignore")
def test_validation_within_the_epoch(tmp_path):
    val = DataLoader(Rows(6), batch_size=2)
    options = {"val": val, "val_check_interval": 3, "num_sanity_val_steps": 2}
    whole, resumed = whole_and_resumed(tmp_path, stock(), 4, **options)
    assert resumed == whole[4:]


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_stream_is_read_again(tmp_path, step):
    loader = lambda: DataLoader(Stream(), batch_size=4)  # noqa: E731
    with pytest.warns(UserWarning, match="DataLoader of Stream cannot skip samples and has no state"):
        whole, resumed = whole_and_resumed(tmp_path, loader, step, max_epochs=2)
    assert len(whole) == 10
    assert resumed == whole[step:]


def under_ddp(path):
    warnings.simplefilter("ignore")
    loader = stock(num_workers=0)
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 2}
    whole, resumed = whole_and_resumed(path, loader, 2, **options)
    return resumed == whole[2:], len(whole)


def test_under_ddp_on_every_rank(ranks, tmp_path):
    assert ranks(under_ddp, tmp_path) == (True, 6)


def of_a_loader_that_ends_under_ddp(path):
    warnings.simplefilter("ignore")
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 2, "kind": Several}

    def loader():
        return CombinedLoader([stock(dataset=Rows(10))(), stock()()], "max_size")

    whole = run(path, loader, **options)
    right = []
    for step in (1, 2, 3, 5):  # of three to an epoch, and two of the shorter one
        saved = path / "c" / f"step={step}.ckpt"
        right.append(run(path, loader, ckpt_path=saved, folder="again", seed=99, **options) == whole[2 * step :])
    return right, None in whole[4]


def test_a_loader_that_ends_before_the_others_on_every_rank(ranks, tmp_path):
    assert ranks(of_a_loader_that_ends_under_ddp, tmp_path) == ([True] * 4, True)


def of_trials_under_ddp(path):
    warnings.simplefilter("ignore")
    options = {"strategy": "ddp", "devices": 2, "kind": Tuned, "max_epochs": 2}
    runs = []
    for ours in ([], [ExactResume()]):
        tuner = FindsAtAnEpoch(num_training_steps=3)
        runs.append(run(path, lambda: None, callbacks=[tuner, *ours], folder=f"{len(runs)}", **options))
    return runs[0] == runs[1], len(runs[0])


def test_trials_of_values_on_every_rank(ranks, tmp_path):
    assert ranks(of_trials_under_ddp, tmp_path) == (True, 6)


def under_another_global_seed(path, step, policy, options):
    warnings.simplefilter("ignore")
    options = {"strategy": "ddp", "devices": 2, "callbacks": [ExactResume(on_unreplayable=policy)], **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "1")
        whole = run(path, stock(), **options)
        patch.setenv("PL_GLOBAL_SEED", "77")
        resumed = run(path, stock(), ckpt_path=path / "c" / f"step={step}.ckpt", folder="again", seed=99, **options)
    return resumed == whole[step:], len(whole)


@pytest.mark.parametrize(
    ("step", "policy", "options"),
    [(2, "refuse", {}), (3, "refuse", {}), (2, "warn", {"reload_dataloaders_every_n_epochs": 1})],
    ids=str,
)
def test_under_another_global_seed_on_every_rank(ranks, tmp_path, step, policy, options):
    # 3 batches are an epoch. Lightning seeds the sampler of each rank by the global seed.
    assert ranks(under_another_global_seed, tmp_path, step, policy, options) == (True, 9)


def saved_by_two(path):
    warnings.simplefilter("ignore")
    run(path, stock(shuffle=False), strategy="ddp", devices=2)


def of_the_same_global_batch():
    return DataLoader(Rows(), batch_size=8)


@pytest.mark.parametrize("step", [2, 3])  # of 3 to an epoch
def test_a_single_device_that_goes_on_for_two_in_another_order_is_told(ranks, tmp_path, step):
    ranks(saved_by_two, tmp_path)
    with pytest.warns(UserWarning, match="SequentialSampler and not by DistributedSampler.*go on with the strategy"):
        run(tmp_path, of_the_same_global_batch, ckpt_path=tmp_path / "c" / f"step={step}.ckpt", folder="again")


def test_what_cannot_be_replayed_is_refused_by_choice(tmp_path):
    loader = lambda: DataLoader(Stream(), batch_size=4)  # noqa: E731
    with pytest.raises(ValueError, match=r"or set on_unreplayable='warn'\.$"):
        run(tmp_path, loader, callbacks=[ExactResume(on_unreplayable="refuse")])


def test_an_unknown_choice():
    with pytest.raises(ValueError, match=r"Use one of \('warn', 'refuse'\)\.$"):
        ExactResume(on_unreplayable="ignore")


def test_the_trainer_is_left_as_it_was(tmp_path):
    loader = stock()()
    run(tmp_path, lambda: loader)
    assert type(loader) is DataLoader


def test_a_run_that_it_follows_is_the_run_that_it_would_have_been(tmp_path):
    followed = run(tmp_path, stock())
    assert run(tmp_path, stock(), callbacks=[], folder="other") == followed


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(Rows())


@pytest.mark.parametrize("loader", [stock(shuffle=False), lambda: DataLoader(Streamed(), batch_size=4)])
@pytest.mark.parametrize("step", [2, 8])
@pytest.mark.filterwarnings("ignore:A resumed run may")
def test_a_checkpoint_of_a_run_without_it(tmp_path, loader, step):
    # 6 batches are an epoch. Nobody knows where the data stood; from then on it is known.
    run(tmp_path, loader, callbacks=[], max_epochs=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = run(tmp_path, loader, ckpt_path=tmp_path / "c" / f"step={step}.ckpt", folder="again")
    assert any("has no position in the data" in str(each.message) for each in said)
    resumed = run(tmp_path, loader, ckpt_path=tmp_path / "again" / f"step={step + 2}.ckpt", folder="third", seed=99)
    assert resumed == first[2:]


@pytest.mark.parametrize("loader", [stock(shuffle=False), lambda: DataLoader(Streamed(), batch_size=4)])
@pytest.mark.filterwarnings("ignore:A resumed run may")
def test_a_checkpoint_of_a_run_without_it_at_the_end_of_an_epoch(tmp_path, loader):
    run(tmp_path, loader, callbacks=[], max_epochs=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = run(tmp_path, loader, ckpt_path=tmp_path / "c" / "step=6.ckpt", folder="again")
    assert any("has no position in the data" in str(each.message) for each in said)
    assert len(first) == 12
    resumed = run(tmp_path, loader, ckpt_path=tmp_path / "again" / "step=8.ckpt", folder="third", seed=99)
    assert resumed == first[2:]


def test_a_checkpoint_of_a_run_without_it_may_be_refused(tmp_path):
    run(tmp_path, stock(), callbacks=[], max_epochs=1)
    refusing = [ExactResume(on_unreplayable="refuse")]
    with pytest.raises(ValueError, match=r"has no position in the data.*Trainer.save_checkpoint after fit"):
        run(tmp_path, stock(), ckpt_path=tmp_path / "c" / "step=2.ckpt", folder="again", callbacks=refusing)


@pytest.mark.filterwarnings("ignore:(?!A resumed run may)")
def test_a_second_fit_begins_its_epoch_anew(tmp_path):
    callbacks = [ExactResume(), ModelCheckpoint(tmp_path, every_n_train_steps=1)]
    options = {"devices": 1, "limit_train_batches": 3, "enable_checkpointing": True}
    made = trainer(tmp_path, callbacks=callbacks, epochs=1, **options)
    made.fit(Noisy(), stock()())
    made.fit_loop.max_epochs = 2
    made.fit(Noisy(), stock()())
    assert made.global_step == 6


def test_a_run_resumed_at_the_end_of_an_epoch_may_be_resumed_again(tmp_path):
    whole = run(tmp_path, stock())
    run(tmp_path, stock(), ckpt_path=tmp_path / "c" / "step=6.ckpt", folder="again")
    third = run(tmp_path, stock(), ckpt_path=tmp_path / "again" / "step=8.ckpt", folder="third", seed=99)
    assert third == whole[8:]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_the_epoch_after_the_one_that_ended_may_have_more_batches_or_fewer(tmp_path, batch_size):
    run(tmp_path, stock(), max_epochs=1)

    def other():
        return DataLoader(Rows(), batch_size=batch_size, shuffle=True)

    resumed = run(tmp_path, other, ckpt_path=tmp_path / "c" / "step=6.ckpt", folder="again", max_epochs=2)
    assert len(resumed) == len(other())


class AtEnd(ModelCheckpoint):
    """Saves when an epoch has ended; a class of its own, since a Trainer tells callbacks apart by their class."""

    def __init__(self, folder):
        super().__init__(folder, filename="end-{step}", save_top_k=-1, save_on_train_epoch_end=True)


@pytest.mark.parametrize("loader", [stock(), stock(num_workers=2, persistent_workers=True)])
@pytest.mark.parametrize("options", [{"max_steps": 14}, {"max_steps": 7, "accumulate_grad_batches": 2}], ids=str)
@pytest.mark.filterwarnings("ignore:A resumed run may")  # the other saver saves amid accumulation
def test_a_run_of_so_many_steps_is_resumed_at_the_end_of_an_epoch(tmp_path, loader, options):
    def fit(folder, ckpt_path=None, seed=7):
        callbacks = [ExactResume(), AtEnd(tmp_path / folder)]
        options_now = {"callbacks": callbacks, "folder": folder, "ckpt_path": ckpt_path, "seed": seed, **options}
        return run(tmp_path, loader, max_epochs=-1, **options_now)

    whole, step = fit("c"), 6 // options.get("accumulate_grad_batches", 1)
    resumed = fit("again", tmp_path / "c" / f"end-step={step}.ckpt", seed=99)
    third = fit("third", tmp_path / "again" / f"end-step={2 * step}.ckpt", seed=98)
    assert (resumed, third) == (whole[6:], whole[12:])


@pytest.mark.parametrize("loader", [stock(), stock(num_workers=2, persistent_workers=True)])
@pytest.mark.parametrize("stop", [2, 9])  # in the first and in the second epoch
def test_a_run_that_max_steps_stopped_within_an_epoch_goes_on_in_that_epoch(tmp_path, loader, stop):
    def fit(folder, steps, ckpt_path=None, seed=7):
        callbacks = [ExactResume(), AtEnd(tmp_path / folder)]
        return run(
            tmp_path, loader, max_epochs=-1, max_steps=steps, callbacks=callbacks, folder=folder, ckpt_path=ckpt_path,
            seed=seed,
        )  # fmt: skip

    whole = fit("whole", 16)
    first = fit("c", stop)
    resumed = fit("again", stop + 2, tmp_path / "c" / f"end-step={stop}.ckpt", seed=99)
    third = fit("third", 16, tmp_path / "again" / f"end-step={stop + 2}.ckpt", seed=98)
    assert [*first, *resumed, *third] == whole


def test_the_checkpoint_that_a_run_resumes_from_is_not_saved_again_within_the_next_step(tmp_path):
    options = {"every": 2, "accumulate_grad_batches": 2, "max_epochs": 1}
    whole = run(tmp_path, stock(Rows(40)), **options)
    path = tmp_path / "c" / "step=2.ckpt"
    saved = path.read_bytes()
    for seed in (98, 99):
        assert run(tmp_path, stock(Rows(40)), ckpt_path=path, seed=seed, **options) == whole[4:]
        assert path.read_bytes() == saved


class AmidAStep(Callback):
    """Saves in a hook that comes before the step of a batch, or within it."""

    def __init__(self, path, hook, steps):
        self.path, self.steps = path, steps
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("loader", [stock(), stock(num_workers=2)])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_zero_grad"])
@pytest.mark.parametrize("steps", [2, 5])
def test_a_batch_whose_step_was_not_made_is_trained_on_again(tmp_path, loader, hook, steps):
    # As a checkpoint of OnExceptionCheckpoint is saved. 6 batches are an epoch.
    saved = tmp_path / "amid.ckpt"
    with pytest.warns(UserWarning, match="a step that a checkpoint is saved amid"):
        whole = run(tmp_path, loader, callbacks=[ExactResume(), AmidAStep(saved, hook, steps)], max_epochs=2)
    resumed = run(tmp_path, loader, ckpt_path=saved, folder="again", seed=99, max_epochs=2)
    assert [samples for _, samples in resumed[: 6 - steps]] == [samples for _, samples in whole[steps:6]]
    assert len(resumed) == 12 - steps


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"val_check_interval": 2}, "Lightning leaves out a validation that follows the step.*Save after another step"),
        (
            {},
            "Lightning leaves out a validation that follows the step.*Save after another step",
        ),  # at the end of an epoch
        (
            {"val_check_interval": 0.5, "kind": FollowsMetric},
            "Lightning leaves out the next step of the schedule.*Use a schedule",
        ),
        (
            {"val": None, "reload_dataloaders_every_n_epochs": 1},
            "Lightning makes the loaders .* at other times.*Leave reload",
        ),
        (
            {"val": None, "reload_dataloaders_every_n_epochs": 2},
            "Lightning makes the loaders .* at other times.*Leave reload",
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:A resumed run may")  # for a second reason
def test_what_lightning_leaves_out_of_a_resumed_run_is_told(tmp_path, options, reason):
    options = {"val": DataLoader(Rows(6), batch_size=2), "max_epochs": 1, **options}
    with pytest.warns(UserWarning, match=f"A resumed run may differ.*{reason}"):
        run(tmp_path, stock(), **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"kind": FollowsMetric}, "Use a schedule"), ({"reload_dataloaders_every_n_epochs": 2}, "Leave reload")],
    ids=["schedule", "loaders"],
)
def test_what_no_checkpoint_could_make_exact_is_refused_before_the_first_step(tmp_path, options, reason):
    options = {"val": DataLoader(Rows(6), batch_size=2), "max_epochs": 1, **options}
    unsaved = [ExactResume(on_unreplayable="refuse"), CountedSteps()]
    with pytest.raises(ValueError, match=rf"A resumed run may differ.*{reason}.*, or set on_unreplayable='warn'\.$"):
        run(tmp_path, stock(), callbacks=unsaved, **options)
    assert unsaved[1].steps == 0


class CountedSteps(Callback):
    steps = 0

    def on_train_batch_start(self, *_):
        self.steps += 1


@pytest.mark.filterwarnings("ignore:A resumed run may")
def test_a_position_that_was_loaded_is_known_when_loaders_are_made_anew(tmp_path):
    options = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    run(tmp_path, stock(), **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(tmp_path, stock(), ckpt_path=tmp_path / "c" / "step=6.ckpt", folder="again", **options)
    assert not any("has no position" in str(each.message) for each in said)


class Tuned(Noisy):
    """Can be given a learning rate and a batch size, and notes what it saw beyond the trials."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 1e-2, 4
        self.own = torch.Generator().manual_seed(3)

    def train_dataloader(self):
        return DataLoader(Rows(), batch_size=self.batch_size, shuffle=True, generator=self.own)

    def val_dataloader(self):
        return DataLoader(Rows(6), batch_size=2)

    def training_step(self, batch, index):
        if not any(isinstance(each, ModelCheckpoint) for each in self.trainer.callbacks):  # in a trial
            return super().training_step(batch, index) + self.losses.pop()[0] * 0
        return super().training_step(batch, index)


class FindsAtAnEpoch(LearningRateFinder):
    def on_fit_start(self, *_):
        pass

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


TUNERS = {
    "learning rate": lambda: LearningRateFinder(num_training_steps=3),
    "learning rate, at an epoch": lambda: FindsAtAnEpoch(num_training_steps=3),
    "batch size": lambda: BatchSizeFinder(max_trials=1, init_val=4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tuner", TUNERS)
def test_what_tries_values_leaves_the_random_numbers_as_without_it(tmp_path, tuner):
    right = run(tmp_path, lambda: None, callbacks=[TUNERS[tuner]()], kind=Tuned)
    mine = run(tmp_path, lambda: None, callbacks=[TUNERS[tuner](), ExactResume()], kind=Tuned, folder="mine")
    assert mine == right
    rates = torch.load(tmp_path / "mine" / "step=4.ckpt", weights_only=False)["optimizer_states"]
    first = Tuned()
    first.lr = rates[0]["param_groups"][0]["lr"]
    if tuner != "learning rate, at an epoch":
        resumed = run(
            tmp_path,
            lambda: None,
            kind=lambda: first,
            ckpt_path=tmp_path / "mine" / "step=4.ckpt",
            folder="again",
            seed=99,
        )
        assert resumed == mine[4:]


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_that_tries_values_begins_its_epoch_anew_and_says_so(tmp_path):
    run(tmp_path, lambda: None, kind=Tuned)
    tuner = LearningRateFinder(num_training_steps=3, update_attr=False)
    options = {"kind": Tuned, "ckpt_path": tmp_path / "c" / "step=4.ckpt", "folder": "again", "seed": 99}
    with pytest.warns(UserWarning, match="what tries values.*begin anew.*Leave it out of the resumed run"):
        resumed = run(tmp_path, lambda: None, callbacks=[tuner, ExactResume()], **options)
    assert len(resumed) == 18
    refusing = ExactResume(on_unreplayable="refuse")
    with pytest.raises(ValueError, match=r"what tries values.*Leave it out of the resumed run, or set"):
        run(tmp_path, lambda: None, callbacks=[tuner, refusing], **options)

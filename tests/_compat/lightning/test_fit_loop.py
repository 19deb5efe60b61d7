import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ups._compat.lightning.fit_loop import (
    batches_taken,
    begin_epoch_anew,
    follow_loaders,
    in_accumulation,
    is_epoch_over,
    restarted_loaders,
)
from tests.toys import Net, data, trainer


class Watching(Net):
    def __init__(self):
        super().__init__()
        self.facts = []

    def on_train_batch_end(self, *_):
        self.facts.append((batches_taken(self.trainer), is_epoch_over(self.trainer), in_accumulation(self.trainer)))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_where_the_loop_stands(tmp_path):
    model = Watching()
    trainer(tmp_path, epochs=2, accumulate_grad_batches=2).fit(model, DataLoader(data(), batch_size=2))
    epoch = [(1, False, True), (2, False, False), (3, False, True), (4, True, False)]
    assert model.facts == epoch * 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_loaders_are_followed_until_undone(tmp_path):
    run, model, seen = trainer(tmp_path, epochs=2), Net(), []
    loader = DataLoader(data(), batch_size=4)

    def before(loaders):
        seen.append(loaders)
        return loaders

    undo = follow_loaders(run, before=before, epoch=lambda: seen.append("epoch"))
    run.fit(model, loader)
    assert seen == [[loader], "epoch", "epoch"]
    undo()
    assert type(run.fit_loop._combined_loader).__iter__.__module__.startswith("lightning")
    assert "_load_combined_loader_states" not in vars(run.fit_loop)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_which_loaders_began_again(tmp_path):
    run, model, seen = trainer(tmp_path, epochs=1), Net(), []
    model.training_step = lambda batch: model.head(batch["long"]).mean()
    model.on_train_batch_end = lambda *_: seen.append(restarted_loaders(run))
    loaders = {"short": DataLoader(data()[:2], batch_size=2), "long": DataLoader(data(), batch_size=4)}
    run.fit(model, loaders)
    assert seen == [[False, False], [True, False]]


@pytest.mark.parametrize("most", [2, 3, 5, float("inf")])
def test_only_an_epoch_that_lightning_would_go_on_with_is_begun_anew_here(tmp_path, most):
    run = trainer(tmp_path)
    progress = run.fit_loop.epoch_loop.batch_progress
    progress.current.ready = progress.current.started = progress.current.processed = 3
    progress.current.completed, progress.is_last_batch = 2, True
    run.fit_loop.max_batches = most
    begin_epoch_anew(run)
    assert progress.is_last_batch is (most <= 3)
    assert (progress.current.ready, progress.current.completed) == ((3, 2) if most <= 3 else (0, -1))
    assert torch.is_grad_enabled()

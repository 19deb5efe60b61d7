import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ups.data import PackedTokens, StreamedTokens, tune_workers
from lightning_ups.data import workers as module
from lightning_ups.data.fields import GeneratedFields
from lightning_ups.data.workers import fewest_workers, measured_options, prefetch_factor, worker_options
from tests.token_files import random_documents, token_folder


class Sleepy(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor(index)


@pytest.mark.parametrize(
    ("rates", "workers"), [({1: 10.0}, 1), ({1: 10.0, 2: 20.0, 4: 21.0}, 2), ({1: 10.0, 2: 10.5}, 1), ({1: 0.0}, 1)]
)
def test_the_fewest_workers_of_about_the_best_rate_are_taken(rates, workers):
    assert fewest_workers(rates) == workers


@pytest.mark.parametrize(
    ("intervals", "workers", "factor"),
    [([1.0] * 9, 1, 2), ([1.0] * 9 + [11.0], 1, 6), ([0.1] * 99 + [50], 2, 8), ([], 1, 2)],
)
def test_workers_are_so_far_ahead_that_the_slowest_batch_is_ready(intervals, workers, factor):
    assert prefetch_factor(intervals, workers=workers) == factor


def test_more_workers_are_tried_until_they_give_no_more(monkeypatch):
    rates, tried = {1: 10, 2: 20, 4: 40, 8: 41}, []

    def intervals(loader, seconds):
        tried.append(loader.num_workers)
        return [1 / rates[loader.num_workers]] * 9

    monkeypatch.setattr(module, "_intervals", intervals)
    options = measured_options(lambda **options: SimpleNamespace(**options), max_workers=16)
    assert options == {"num_workers": 4, "prefetch_factor": 2}
    assert tried == [1, 2, 4, 8]
    measured_options(lambda **options: SimpleNamespace(**options), max_workers=3)
    assert tried[4:] == [1, 2]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*worker processes in total")
def test_a_loader_of_the_user_is_tuned_in_a_line_and_random_numbers_stay(caplog):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        loader = tune_workers(
            lambda **options: DataLoader(Sleepy(), shuffle=True, **options), max_workers=2, seconds=0.2
        )
    assert torch.equal(torch.rand(3), expected)
    assert loader.num_workers in (1, 2)
    assert [line for line in caplog.messages if "batches/s" in line and "num_workers=" in line]


def test_a_loader_that_ends_early_is_measured(tmp_path):
    assert measured_options(lambda **options: DataLoader(range(1), **options), max_workers=1)["num_workers"] == 1


def test_ranks_choose_what_rank_0_chooses(monkeypatch):
    monkeypatch.setattr(module, "measured_options", lambda make, **options: options)
    monkeypatch.setattr(module, "usable_cores", lambda: 9)
    strategy = SimpleNamespace(broadcast=lambda options: {**options, "from": 0})
    trainer = SimpleNamespace(num_devices=4, strategy=strategy)
    assert worker_options("auto", None, trainer) == {"max_workers": 2, "from": 0}
    assert worker_options(3, None, trainer) == {"num_workers": 3}


def test_datamodules_take_auto(monkeypatch, tmp_path):
    monkeypatch.setattr("lightning_ups.data.workers.usable_cores", lambda: 1)
    folder = token_folder(tmp_path, random_documents(200))
    packed = PackedTokens(folder, seq_len=32, batch_size=1, val_fraction=0.1, num_workers="auto")
    packed.setup("fit")
    assert packed.train_dataloader().num_workers == packed.val_dataloader().num_workers == 1
    fields = GeneratedFields(
        equation="burgers", points=16, trajectories=2, val_trajectories=1, frames=4, batch_size=2,
        num_workers="auto", cache_dir=str(tmp_path),
    )  # fmt: skip
    fields.setup("fit")
    assert fields.train_dataloader().num_workers == fields.val_dataloader().num_workers == 1
    pytest.importorskip("tokenizers")
    texts = [f"text {index} " * 5 for index in range(99)]
    streamed = StreamedTokens([texts], tokenizer="bytes", seq_len=32, batch_size=1, num_workers="auto")
    streamed.setup("fit")
    assert streamed.train_dataloader().num_workers == 1

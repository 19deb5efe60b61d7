import errno
import os

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ups.callbacks import DevicePrefetch, ExactResume
from lightning_ups.data import PrecomputedLatents
from lightning_ups.data.latents import datamodule, store

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]


class Images(Dataset):
    def __init__(self, count, *, scale=1.0, noise=False):
        self.count, self.scale, self.noise, self.read = count, scale, noise, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        image = torch.full((3, 4, 4), float(index)) * self.scale
        return image + torch.rand(1) if self.noise else image, index


class Data(LightningDataModule):
    def __init__(self, count=12, *, workers=0, shuffle=False, **options):
        super().__init__()
        self.train, self.val = Images(count, **options), Images(4)
        self.workers, self.shuffle = workers, shuffle

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=3, shuffle=self.shuffle, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=4)


class Encoder(nn.Module):
    def __init__(self, weight=2.0, size=5):
        super().__init__()
        self.weight, self.size, self.calls = nn.Parameter(torch.tensor(weight)), size, 0

    def forward(self, images):
        if self.training:  # an assert has other code in ranks, where pytest does not rewrite it
            raise RuntimeError("training")
        self.calls += len(images)
        return (images.mean((1, 2, 3)) * self.weight)[:, None].expand(-1, self.size).contiguous()

    def extra_repr(self):
        return f"size={self.size}"


class Head(LightningModule):
    def __init__(self, at=None, stop_at=None):
        super().__init__()
        self.linear, self.seen, self.stop_at = nn.Linear(5, 1), [], stop_at
        self.at = at or (lambda batch: batch)

    def training_step(self, batch, batch_idx):
        if self.stop_at == self.global_step:
            raise RuntimeError("interrupted")
        latents, labels = self.at(batch)
        self.seen += [*zip(labels.tolist(), latents[:, 0].tolist(), strict=True)]
        return self.linear(latents.to(self.linear.weight)).square().mean()

    def validation_step(self, batch, batch_idx):
        latents, _ = batch
        self.log("val_loss", self.linear(latents.to(self.linear.weight)).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(data, module=None, *, epochs=1, **options):
    module = module or Head()
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    return module


@pytest.fixture
def latents(tmp_path):
    def make(data=None, encoder=None, **options):
        return PrecomputedLatents(data or Data(), encoder or Encoder(), folder=str(tmp_path / "latents"), **options)

    return make


EXPECTED = [(index, 2.0 * index) for index in range(12)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_second_pass_calls_neither_the_encoder_nor_the_dataset(latents, shuffle):
    data = latents(Data(shuffle=shuffle))
    module = fit(data, epochs=3)
    assert sorted(module.seen) == sorted(EXPECTED * 3)
    assert data.encoder.calls == 12 + 4  # of training and validation
    again = latents(Data(shuffle=shuffle))
    assert sorted(fit(again).seen) == sorted(EXPECTED)
    assert again.encoder.calls == 0
    probed = set(range(12)) - {*again.data.train.read}
    assert probed, "only some samples are read, for the name of the folder"


def test_workers_find_what_is_written_during_the_run(latents):
    data = latents(Data(workers=2))
    assert sorted(fit(data, epochs=2).seen) == sorted(EXPECTED * 2)
    assert data.encoder.calls <= 16 + 12  # workers read ahead into the second epoch
    again = latents(Data(workers=2))
    fit(again)
    assert again.encoder.calls == 0


def test_an_interrupted_pass_continues_with_the_samples_that_are_missing(latents):
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(latents(), Head(stop_at=2))
    data = latents(Data(shuffle=True))
    assert sorted(fit(data).seen) == EXPECTED
    assert data.encoder.calls == 12 - 9 + 4  # the third batch was encoded


@pytest.mark.parametrize(
    ("data", "encoder", "options", "why"),
    [
        (Data, lambda: Encoder(weight=3.0), {}, "the encoder's weights changed"),
        (lambda: Data(scale=0.5), Encoder, {}, "the samples or their transform changed"),
        (lambda: Data(count=15), Encoder, {}, "the samples or their transform and the number of samples changed"),
        (Data, Encoder, {"dtype": "bfloat16"}, "the settings changed"),
        (Data, Encoder, {"version": "2"}, "the settings changed"),
        (Data, lambda: nn.Sequential(Encoder()), {}, "the encoder's weights and the encoder's code or configuration"),
    ],
)
def test_what_changed_is_named_and_latents_are_written_anew(latents, caplog, tmp_path, data, encoder, options, why):
    fit(latents())
    other = latents(data(), encoder(), **options)
    with caplog.at_level("INFO"):
        fit(other)
    (line,) = [message for message in caplog.messages if "is not used" in message and "train" in message]
    assert why in line
    assert len([*(tmp_path / "latents").glob("train-*")]) == 2
    again = latents()
    fit(again)
    assert again.encoder.calls == 0


def test_a_changed_collate_fn_or_batch_hook_is_named(latents, caplog):
    class Changed(Data):
        def __init__(self, shift=0.0, collate=None):
            super().__init__()
            self.shift, self.collate = shift, collate

        def train_dataloader(self):
            return DataLoader(self.train, batch_size=3, collate_fn=self.collate)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [self.shifted(batch[0]), batch[1]]

        def shifted(self, images):
            return images + self.shift

    def halved(samples):
        return [torch.stack([image for image, _ in samples]) / 2, torch.tensor([label for _, label in samples])]

    fit(latents(Changed()), limit_val_batches=0)
    for data, factor, shift in ((Changed(shift=1.0), 1, 1), (Changed(collate=halved), 0.5, 0)):
        with caplog.at_level("INFO"):
            module = fit(latents(data), limit_val_batches=0)
        assert module.seen == [(index, 2.0 * (factor * index + shift)) for index in range(12)]
        assert "collate_fn or the batch hooks" in [line for line in caplog.messages if "is not used" in line][-1]
        caplog.clear()


def test_random_batch_hooks_are_warned_of(latents):
    class Noisy(Data):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            batch[0].add_(torch.rand(1))
            return batch

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="the batch hooks of Noisy depend on random numbers"):
        module = fit(latents(Noisy()), limit_val_batches=0)
    assert all(2 * index <= found < 2 * index + 2 for index, found in module.seen), "the probe changes no batch"


def test_a_reused_folder_logs_what_is_not_checked(latents, caplog):
    for expected in (0, 2):
        caplog.clear()
        with caplog.at_level("INFO"):
            fit(latents())
        assert len([line for line in caplog.messages if "set another version" in line]) == expected


def test_random_samples_are_warned_of_and_do_not_change_the_folder(latents):
    for _ in range(2):
        data = latents(Data(noise=True))
        with pytest.warns(UserWarning, match="depend on random numbers"):
            fit(data)
    assert data.encoder.calls == 0


def test_the_name_of_the_folder_takes_no_random_numbers(latents):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    latents().train_dataloader()
    assert torch.equal(torch.rand(3), expected)


def test_latents_are_stored_in_a_dtype_and_the_first_pass_has_their_values(latents):
    data = latents(encoder=Encoder(weight=1.0009765625), dtype="bfloat16")
    first, second = fit(data).seen, fit(latents(encoder=Encoder(weight=1.0009765625), dtype="bfloat16")).seen
    assert first == second
    assert first[11] == (11, 11.0)


def test_the_disk_may_be_full(latents, monkeypatch):
    written, write = [], os.write

    def full(file, content):
        written.append(len(content))
        if len(written) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(store.os, "write", full)
    data = latents()
    with pytest.warns(UserWarning, match="No space left on device"):
        module = fit(data, epochs=2, limit_val_batches=0)
    assert module.seen == EXPECTED * 2
    assert data.encoder.calls == 24 - 3
    monkeypatch.undo()
    again = latents()
    assert fit(again, limit_val_batches=0).seen == EXPECTED
    assert again.encoder.calls == 9


def test_the_folder_has_a_size(latents, monkeypatch):
    monkeypatch.setattr(datamodule, "_size", lambda folder: 0)
    data = latents(max_gigabytes=200e-9)  # a sample has 28 bytes
    with pytest.warns(UserWarning, match="max_gigabytes=2e-07 is reached"):
        module = fit(data, epochs=2, limit_val_batches=0)
    assert module.seen == EXPECTED * 2
    assert data.encoder.calls == 24 - 6


def test_damaged_rows_are_encoded_again(latents, tmp_path):
    fit(latents())
    (path,) = (tmp_path / "latents").glob("train-*/*.0")
    content = bytearray(path.read_bytes())
    content[20 * 4] ^= 1  # of sample 4
    path.write_bytes(content[:-20])  # the last sample is lost
    again = latents()
    assert fit(again).seen == EXPECTED
    assert again.encoder.calls == 2
    third = latents()
    fit(third)
    assert third.encoder.calls == 0


@pytest.mark.parametrize("kind", ["dict", "combined"])
def test_several_loaders_have_folders_of_their_own(latents, tmp_path, kind):
    class Several(Data):
        def train_dataloader(self):
            loaders = {"a": DataLoader(Images(6), batch_size=2), "b": DataLoader(Images(6, scale=3.0), batch_size=2)}
            return loaders if kind == "dict" else CombinedLoader(loaders, "max_size_cycle")

    for calls in (16, 0):
        data = latents(Several())
        seen = fit(data, Head(at=lambda batch: batch["b"])).seen
        assert seen == [(index, 6.0 * index) for index in range(6)]
        assert data.encoder.calls == calls
    assert len([*(tmp_path / "latents").iterdir()]) == 3


def test_fields_have_names_and_the_hooks_of_the_datamodule_come_first(latents):
    class Named(Data):
        def train_dataloader(self):
            def collate(samples):
                images, labels = zip(*samples, strict=True)
                return {"image": torch.stack(images), "label": torch.tensor(labels)}

            return DataLoader(self.train, batch_size=3, collate_fn=collate)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return {**batch, "image": batch["image"] + 1}

    for _ in range(2):
        head = Head(at=lambda batch: (batch["image"], batch["label"]))
        module = fit(latents(Named(), field="image"), head, limit_val_batches=0)
        assert module.seen == [(index, 2.0 * (index + 1)) for index in range(12)]


def test_precisions_see_the_same_latents_in_each_pass(latents):
    module = Head()
    data = latents()
    fit(data, module, epochs=2, precision="bf16-true", limit_val_batches=0)
    assert data.encoder.weight.dtype == torch.float32
    assert module.seen == EXPECTED * 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("loader", [DataLoader(Stream(), batch_size=2), DataLoader(Images(3), batch_size=None)])
def test_loaders_without_an_index_are_refused(latents, loader):
    data = latents()
    data.data.train_dataloader = lambda: loader
    with pytest.raises(ValueError, match="needs a dataset with an index and a batch_size"):
        fit(data)


class Wrong(Encoder):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, images):
        return {"name": "text", "shape": images.mean(), "size": images[:, 0, 0, : 1 + int(images[0, 0, 0, 0])]}[
            self.kind
        ]


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("name", TypeError, "cannot store a str"),
        ("shape", ValueError, "needs the samples in front"),
        ("size", ValueError, "samples of one shape"),
    ],
)
def test_what_cannot_be_stored_is_an_error(latents, kind, error, match):
    with pytest.raises(error, match=match):
        fit(latents(encoder=Wrong(kind)), Head(at=lambda batch: (torch.zeros(3, 5), batch[1])))


def test_a_datamodule_without_validation_has_none(latents):
    class Train(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Images(3), batch_size=3)

        def state_dict(self):
            return {"a": 1}

    data = latents(Train())
    with pytest.warns(UserWarning, match="have no `val_dataloader`"):
        assert len(fit(data).seen) == 3
    assert data.state_dict() == {"a": 1}
    assert data.data.trainer is data.trainer


def test_batches_can_be_had_without_a_trainer(latents):
    for calls in (12, 0):
        data = latents()
        batches = [data.on_after_batch_transfer(batch, 0) for batch in data.train_dataloader()]
        assert torch.equal(torch.cat([labels for _, labels in batches]), torch.arange(12))
        assert torch.equal(torch.cat([found for found, _ in batches])[:, 0], 2.0 * torch.arange(12))
        assert data.encoder.calls == calls


def test_a_run_resumes_within_an_epoch(latents, tmp_path):
    def trained(folder, **options):
        module = Head()
        callbacks = [
            ExactResume(),
            DevicePrefetch(),
            ModelCheckpoint(tmp_path / folder, save_last=True, every_n_train_steps=1),
        ]
        torch.manual_seed(1)
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, limit_val_batches=0, callbacks=callbacks, default_root_dir=tmp_path / folder,
            max_steps=options["max_steps"],
        )  # fmt: skip
        trainer.fit(module, latents(Data(shuffle=True)), ckpt_path=options.get("ckpt_path"))
        return module.seen

    whole = trained("a", max_steps=7)
    first = trained("b", max_steps=3)
    assert first + trained("b", max_steps=7, ckpt_path=tmp_path / "b" / "last.ckpt") == whole


def on_ranks(folder, shuffle):
    data = PrecomputedLatents(Data(shuffle=shuffle), Encoder(), folder=folder)
    module = Head()
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, data)
    found = [None, None]
    torch.distributed.all_gather_object(found, (module.seen, data.encoder.calls))
    return found


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_a_folder(latents, ranks, tmp_path, shuffle):
    (first, calls), (second, others) = ranks(on_ranks, str(tmp_path / "latents"), shuffle)
    assert sorted(first + second) == sorted(EXPECTED * 2)
    assert calls + others == 12 + 4
    one = latents()
    assert fit(one).seen == EXPECTED
    assert one.encoder.calls == 0

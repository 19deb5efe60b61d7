import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ups.data.latents.fingerprints import of_code, of_hooks, of_samples, of_weights


def test_weights_and_buffers_count():
    def encoder():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    one, other = encoder(), encoder()
    assert of_weights(one) == of_weights(other)
    other[1].running_mean[0] = 1e-3
    assert of_weights(one) != of_weights(other)
    assert of_weights(one) != of_weights(encoder().double())
    one.register_buffer("scale", torch.ones(1), persistent=False)
    before = of_weights(one)
    one.scale.fill_(2)
    assert of_weights(one) != before


def test_code_and_configuration_count():
    def scaled(text):
        names = {"nn": nn}
        exec(text, names)
        return names["Scaled"]

    assert of_code(nn.Dropout(0.1)) != of_code(nn.Dropout(0.2))
    assert of_code(nn.Sequential(nn.ReLU())) != of_code(nn.Sequential(nn.GELU()))
    assert of_code(scaled("class Scaled(nn.Module): pass")()) == of_code(scaled("class Scaled(nn.Module): pass")())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_some_samples_of_each_kind_count(workers):
    def digest(*tensors, **options):
        return of_samples(DataLoader(TensorDataset(*tensors), num_workers=workers, **options))

    images = torch.arange(60.0).reshape(20, 3)
    found, is_fixed = digest(images)
    assert is_fixed
    assert digest(images.clone(), shuffle=True, batch_size=4) == (found, True)
    assert digest(images + 1)[0] != found
    assert digest(images.double())[0] != found
    assert digest(images[:1])[0] != found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ("text", b"text"),
        ((1, (2, 3)), (1, (2, 4))),
        (torch.ones(2).numpy(), torch.zeros(2).numpy()),
        (None, 0),
    ],
)
def test_different_samples_have_different_digests(one, other):
    class Same(list):
        pass

    first, second = (of_samples(DataLoader(Same([value] * 3), collate_fn=list))[0] for value in (one, other))
    assert first != second
    assert of_samples(DataLoader(Same([one] * 3), collate_fn=list))[0] == first


def test_random_samples_are_found():
    class Noise(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(1)

    assert not of_samples(DataLoader(Noise(torch.zeros(3))))[1]
    assert not of_samples(DataLoader(TensorDataset(torch.zeros(3)), collate_fn=lambda samples: torch.rand(1)))[1]


SCALE = 1.0
SETTINGS = {"scale": (1.0, None)}


def helper(x):
    return x * SCALE * SETTINGS["scale"][0]


class Scaled(nn.Module):
    def __init__(self, **values):
        super().__init__()
        vars(self).update(values)
        self.inner = nn.MultiheadAttention(8, values.get("heads", 1))

    @torch.no_grad()
    def forward(self, x):
        return [helper(each) for each in x]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"scale": 1.0}, {"scale": 0.18215}),
        ({"scale": 1}, {"scale": True}),
        ({"heads": 2}, {"heads": 4}),
        ({"shift": torch.zeros(2)}, {"shift": torch.ones(2)}),
        ({"options": {"a": [1, (2, None)]}}, {"options": {"a": [1, (2, "")]}}),
        ({"act": torch.relu}, {"act": torch.tanh}),
        ({"act": lambda x: x + 1}, {"act": lambda x: x + 2}),
        ({"act": partial(helper, x=1)}, {"act": partial(helper, x=2)}),
        ({"config": SimpleNamespace(scale=1)}, {"config": SimpleNamespace(scale=2)}),
    ],
)
def test_attributes_of_the_encoder_count(one, other):
    assert of_code(Scaled(**one)) != of_code(Scaled(**other))
    assert of_code(Scaled(**one)) == of_code(Scaled(**one))


@pytest.mark.parametrize(
    ("name", "value"),
    [("SCALE", 2.0), ("SETTINGS", {"scale": (2.0, None)}), ("helper", lambda x: x)],
)
def test_globals_that_the_code_reads_count(monkeypatch, name, value):
    before = of_code(Scaled()), of_hooks(helper, LightningDataModule())
    monkeypatch.setitem(globals(), name, value)
    assert of_code(Scaled()) != before[0]
    assert of_hooks(globals()["helper"], LightningDataModule()) != before[1]


def test_values_that_collate_fn_and_the_hooks_read_count():
    class Data(LightningDataModule):
        def __init__(self, scale, lr=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.scale, self.rate = scale, lr

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return super().on_before_batch_transfer(self.scaled(batch), dataloader_idx)

        def scaled(self, batch):
            return batch * self.scale

        def collate(self, samples):
            return self.hparams["scale"]

    def shifted(by):
        return lambda samples: samples[0] + by

    class Collate:
        def __init__(self, by):
            self.by = by

        def __call__(self, samples):
            return samples[0] + self.by

    plain = LightningDataModule()
    assert of_hooks(list, Data(1)) == of_hooks(list, Data(1, lr=0.2)) != of_hooks(list, Data(2))
    assert of_hooks(Data(1).collate, plain) == of_hooks(Data(1).collate, plain) != of_hooks(Data(2).collate, plain)
    assert of_hooks(shifted(1), plain) == of_hooks(shifted(1), plain) != of_hooks(shifted(2), plain)
    assert of_hooks(Collate(1), plain) == of_hooks(Collate(1), plain) != of_hooks(Collate(2), plain)


def test_digests_are_the_same_in_another_process(tmp_path):
    code = """
import logging, random, threading
from enum import Enum
import numpy as np, torch
from torch import nn
from lightning.pytorch import LightningDataModule, LightningModule
from lightning_ups.data.latents.fingerprints import of_code, of_hooks
log, lock, draws = logging.getLogger("x"), threading.Lock(), random.Random()
class Kind(Enum):
    ONE = 1
class Encoder(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.names, self.kind, self.log_, self.me = {"a", "b", "c", Kind.ONE}, Kind.ONE, log, [self]
        self.draws = np.random.default_rng()
    def forward(self, x):
        log.info("%s %s", lock, draws.random())
        return x if x in {"d", "e", "f"} else sorted(x, key=lambda each: each in {"g", "h"})
for _ in range(3):
    print(of_code(Encoder()), of_hooks(Encoder().forward, LightningDataModule()))
    Encoder()("d")
"""
    root = Path(__file__).parents[3]
    (tmp_path / "script.py").write_text(code)
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed}
        command = [sys.executable, str(tmp_path / "script.py")]
        found |= {*subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()}
    assert len(found) == 1

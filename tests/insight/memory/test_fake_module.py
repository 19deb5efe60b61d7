import threading
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_ups._compat.torch.rehearsal import FakeTensor, fake_mode
from lightning_ups.insight.memory.fake_module import batch_size, fake_batch, resized, sequence_length, twin


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.zeros(3, dtype=torch.int32))
        self.loose = [torch.zeros(2)]
        self.lock = threading.Lock()  # cannot be copied
        self.trainer = object()

    def forward(self, x):
        return self.b(self.a(x))


def test_shapes_types_ties_and_flags_are_those_of_the_module():
    module = Tied()
    module.a.bias.requires_grad_(False)
    module.a.weight.no_decay = True
    other = twin(module, mode=fake_mode(), without=module.trainer)
    for name, p in module.named_parameters():
        fake = other.get_parameter(name)
        assert isinstance(fake, FakeTensor)
        assert isinstance(fake, nn.Parameter)
        assert (fake.shape, fake.dtype, fake.requires_grad) == (p.shape, p.dtype, p.requires_grad)
    assert other.a.weight is other.b.weight
    assert other.a.weight.no_decay is True
    assert isinstance(other.table, FakeTensor)
    assert isinstance(other.loose[0], FakeTensor)
    assert other.lock is module.lock
    assert other.trainer is None
    assert module.trainer is not None


class Noisy(LightningModule):
    """Makes new tensors where it believes to be."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x + torch.randn(x.shape, device=self.device))


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
@pytest.mark.parametrize("fakes", [True, False])
def test_new_tensors_are_where_those_of_the_twin_are(built_on, fakes):
    with torch.device(built_on):
        module = nn.Sequential(Noisy())
    mode = fake_mode() if fakes else None
    other = twin(module, mode=mode)
    with mode or nullcontext():
        assert other(torch.empty(2, 4, device="cpu" if fakes else "meta")).shape == (2, 4)
    assert module[0].device.type == built_on


def test_the_module_stays_as_it_is():
    module = Tied()
    before = {name: p.clone() for name, p in module.named_parameters()}
    other = twin(module, mode=fake_mode(), dtype=torch.bfloat16)
    other.a.weight.data = other.a.weight.data.half()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert other.b.bias.dtype is torch.bfloat16


def test_a_module_on_meta_has_a_twin_that_computes():
    with torch.device("meta"):
        module = Tied()
    mode = fake_mode()
    other = twin(module, mode=mode)
    with mode:
        loss = other(torch.empty(2, 4)).sum()
        loss.backward()
    assert other.a.weight.grad.shape == (4, 4)


def test_without_a_mode_it_is_on_meta():
    assert {p.device.type for p in twin(Tied(), mode=None).parameters()} == {"meta"}


def test_a_recurrent_layer_has_its_weights_twice():
    mode = fake_mode()
    other = twin(nn.LSTM(3, 4), mode=mode)
    with mode:
        assert other(torch.empty(5, 2, 3))[0].shape == (5, 2, 4)


def test_batches():
    batch = {"tokens": torch.zeros(4, 9, dtype=torch.long), "mask": torch.ones(4, 9), "label": torch.zeros(4), "n": 3}
    assert (batch_size(batch), sequence_length(batch)) == (4, 9)
    other = resized(batch, samples=6, tokens=17)
    assert [tuple(other[name].shape) for name in ("tokens", "mask", "label")] == [(6, 17), (6, 17), (6,)]
    assert other["n"] == 3
    assert other["tokens"].dtype is torch.long
    assert isinstance(fake_batch([batch], mode=fake_mode())[0]["mask"], FakeTensor)


def test_batches_without_a_sequence():
    images = (torch.zeros(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))
    assert (batch_size(images), sequence_length(images)) == (8, None)
    assert resized(images, samples=2)[0].shape == (2, 3, 16, 16)
    assert batch_size("nothing") is None


def test_a_sharded_module_is_refused(ranks):
    assert "has not been given to a strategy" in ranks(_refusal)


def _refusal():
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(4, 4)
    fully_shard(module)
    with pytest.raises(ValueError, match="not been given to a strategy") as caught:
        twin(module, mode=fake_mode())
    return str(caught.value)

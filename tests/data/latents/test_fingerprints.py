import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ups.data.latents.fingerprints import of_code, of_samples, of_weights


def test_weights_and_buffers_count():
    def encoder():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    one, other = encoder(), encoder()
    assert of_weights(one) == of_weights(other)
    other[1].running_mean[0] = 1e-3
    assert of_weights(one) != of_weights(other)
    assert of_weights(one) != of_weights(encoder().double())


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
    assert of_samples(DataLoader(Same([one] * 3)))[0] == first


def test_random_samples_are_found():
    class Noise(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(1)

    assert not of_samples(DataLoader(Noise(torch.zeros(3))))[1]

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from lightning_ups.transforms.clip import clip_by_value, clip_coefficient, gradients_of, scale_gradients, total_norm


def model_with_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2))
    model(torch.linspace(-3, 3, 32).reshape(8, 4)).square().sum().backward()
    return model


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_it_is_what_torch_does(max_norm):
    model, expected = model_with_gradients(), model_with_gradients()
    norm = total_norm(gradients_of(model.parameters()))
    scale_gradients(gradients_of(model.parameters()), clip_coefficient(norm, max_norm=max_norm))
    assert norm.item() == pytest.approx(clip_grad_norm_(expected.parameters(), max_norm).item(), rel=1e-6)
    for p, e in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, e.grad)


def test_parameters_without_a_gradient_are_left_out():
    none = gradients_of([nn.Parameter(torch.ones(2))])
    assert none == []
    assert total_norm(none).item() == 0
    scale_gradients(none, torch.tensor(0.5))
    clip_by_value(none, limit=1.0)


def test_the_norm_of_low_precision_has_the_bits_of_float32():
    torch.manual_seed(0)
    gradients = [torch.randn(1000, dtype=torch.bfloat16) for _ in range(3)]
    exact = torch.linalg.vector_norm(torch.cat(gradients).double())
    assert total_norm(gradients).item() == pytest.approx(exact.item(), rel=1e-6)
    mixed = [*gradients, torch.randn(1000)]
    exact = torch.linalg.vector_norm(torch.cat([g.double() for g in mixed]))
    assert total_norm(mixed).item() == pytest.approx(exact.item(), rel=1e-6)


def test_the_norm_of_double_precision_has_all_its_bits():
    torch.manual_seed(0)
    gradients = [torch.randn(1000, dtype=torch.float64) for _ in range(3)]
    exact = torch.linalg.vector_norm(torch.cat(gradients))
    norm = total_norm(gradients)
    assert norm.item() == pytest.approx(exact.item(), rel=1e-14)
    scale_gradients(gradients, clip_coefficient(norm, max_norm=1.0))
    assert torch.linalg.vector_norm(torch.cat(gradients)).item() == pytest.approx(
        (exact / (exact + 1e-6)).item(), rel=1e-14
    )
    assert total_norm([*gradients, torch.randn(10)]).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_sparse_gradient_counts_as_it_would_be_dense():
    model, expected = nn.Embedding(8, 4, sparse=True), nn.Embedding(8, 4)
    expected.load_state_dict(model.state_dict())
    for each in (model, expected):
        each(torch.tensor([1, 3, 3, 5])).pow(3).sum().backward()
    norm = total_norm([model.weight.grad, torch.ones(3)])
    torch.testing.assert_close(norm, total_norm([expected.weight.grad, torch.ones(3)]))
    scale_gradients([model.weight.grad], clip_coefficient(norm, max_norm=0.1))
    scale_gradients([expected.weight.grad], clip_coefficient(norm, max_norm=0.1))
    torch.testing.assert_close(model.weight.grad.to_dense(), expected.weight.grad)


def test_by_value():
    model = model_with_gradients()
    clip_by_value(gradients_of(model.parameters()), limit=0.01)
    assert max(p.grad.abs().max().item() for p in model.parameters()) == pytest.approx(0.01)


def norms_of_a_mixture():
    whole = model_with_gradients()
    expected = total_norm(gradients_of(whole.parameters())).item()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2))
    # One layer over one mesh, one over another mesh of the same ranks, and one left whole.
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("a",)))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("b", "c")))
    model(torch.linspace(-3, 3, 32).reshape(8, 4)).square().sum().backward()
    norm = total_norm(gradients_of(model.parameters()))
    scale_gradients(gradients_of(model.parameters()), clip_coefficient(norm, max_norm=1.0))
    return norm.item(), expected, total_norm(gradients_of(model.parameters())).item()


def test_the_norm_over_two_meshes_and_a_whole_layer_is_the_true_one(ranks):
    norm, expected, after = ranks(norms_of_a_mixture)
    assert norm == pytest.approx(expected, rel=1e-6)
    assert after == pytest.approx(1.0, rel=1e-4)

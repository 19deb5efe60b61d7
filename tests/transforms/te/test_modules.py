import pytest
import torch
from torch import nn

from lightning_ups.transforms.te.modules import (
    Norm,
    Slot,
    joined,
    lay_together,
    linear_for,
    norm_for,
    norm_linear_for,
    norm_mlp_for,
)
from tests import fake_te


@pytest.fixture(autouse=True)
def engine():
    with fake_te.installed() as module:
        yield module


def slots(*tensors):
    owners = [nn.Module() for _ in tensors]
    for owner, tensor in zip(owners, tensors, strict=True):
        owner.weight = nn.Parameter(tensor)
    return [Slot(owner=owner, attribute="weight", name=str(i)) for i, owner in enumerate(owners)]


def randomised(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def same(expected, found, parameters, *, width=16):
    """Compare a forward and every gradient."""
    results = []
    for run in (expected, found):
        torch.manual_seed(1)
        value = torch.randn(2, 4, width, requires_grad=True)
        for parameter in parameters:
            parameter.grad = None
        run(value).square().sum().backward()
        results.append([run(value), value.grad, *(p.grad.clone() for p in parameters)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(bias):
    linear = randomised(nn.Linear(16, 32, bias=bias))
    borrower = linear_for(linear, name="a", sharded=False)
    same(linear, borrower, [*linear.parameters()])
    assert borrower.slots["weight"][0].name == "a.weight"


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-3)], ids=["LayerNorm", "RMSNorm"])
def test_a_norm(norm):
    norm = randomised(norm)
    same(norm, norm_for(norm, name="n", sharded=False), [*norm.parameters()])


class Llama(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-2

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


Llama.__name__ = "LlamaRMSNorm"


class Gemma(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-2

    def forward(self, x):
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


Gemma.__name__ = "GemmaRMSNorm"


@pytest.mark.parametrize("kind", [Llama, Gemma])
def test_norms_of_transformers(kind):
    norm = randomised(kind(16))
    same(norm, norm_for(norm, name="n", sharded=False), [*norm.parameters()])


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-3), Gemma(16)], ids=lambda n: type(n).__name__
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_a_norm_and_the_layers_that_read_it(norm, bias, together):
    norm = randomised(norm)
    linears = {name: randomised(nn.Linear(16, size, bias=bias)) for name, size in (("q", 32), ("k", 16))}
    borrower = norm_linear_for(("n", norm), linears, sharded=False)
    if together:
        for of in borrower.slots.values():
            if len(of) > 1:
                lay_together(of)
    parameters = [p for m in (norm, *linears.values()) for p in m.parameters()]
    same(lambda x: torch.cat([linear(norm(x)) for linear in linears.values()], -1), borrower, parameters)
    assert [slot.name for slot in borrower.slots["weight"]] == ["q.weight", "k.weight"]
    assert borrower.slots["layer_norm_weight"][0].name == "n.weight"


@pytest.mark.parametrize(
    ("activation", "compute"),
    [
        ("swiglu", lambda a, b: nn.functional.silu(a) * b),
        ("geglu", lambda a, b: nn.functional.gelu(a, approximate="tanh") * b),
        ("gelu", lambda a: nn.functional.gelu(a, approximate="tanh")),
        ("relu", torch.relu),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_and_a_feed_forward_network(activation, compute, bias):
    norm, gated = randomised(nn.RMSNorm(16, eps=1e-3)), activation.endswith("glu")
    first = {name: randomised(nn.Linear(16, 32, bias=bias)) for name in (("gate", "up") if gated else ("up",))}
    first["up"].weight.data.mul_(-2)  # so that the halves differ
    last = randomised(nn.Linear(32, 16, bias=bias))
    borrower = norm_mlp_for(("n", norm), first, ("down", last), activation=activation, sharded=False)
    parameters = [p for m in (norm, *first.values(), last) for p in m.parameters()]

    def expected(x):
        return last(compute(*(linear(norm(x)) for linear in first.values())))

    same(expected, borrower, parameters)
    assert borrower.num_products == 2
    if gated:
        assert [slot.name for slot in borrower.slots["fc1_weight"]] == ["gate.weight", "up.weight"]


def test_a_parameter_that_is_replaced_is_looked_up_anew():
    linear = nn.Linear(16, 16)
    borrower = linear_for(linear, name="a", sharded=False)
    linear.weight = nn.Parameter(torch.zeros(16, 16))
    assert torch.equal(borrower(torch.randn(8, 16)), linear.bias.expand(8, 16))


def test_a_joined_weight_is_let_go_after_each_call_and_after_an_error():
    linears = {name: nn.Linear(16, 16, bias=False) for name in ("q", "k")}
    borrower = norm_linear_for(("n", nn.RMSNorm(16, eps=1e-5)), linears, sharded=False)
    assert [*borrower.module.parameters()] == []
    borrower(torch.randn(8, 16))
    assert [name for name, _ in borrower.module.named_parameters()] == ["layer_norm_weight"]
    with pytest.raises(RuntimeError):
        borrower(torch.randn(8, 4))
    assert borrower.module._parameters["weight"] is None


def test_a_sharded_module_keeps_no_copies_for_backward():
    assert linear_for(nn.Linear(16, 16), name="a", sharded=True).module.is_fsdp2
    assert not linear_for(nn.Linear(16, 16), name="a", sharded=False).module.is_fsdp2


class TestJoined:
    def test_what_lies_together_is_not_copied(self):
        of = slots(torch.randn(4, 8), torch.randn(2, 8))
        before = [slot.value.detach().clone() for slot in of]
        assert joined([s.value for s in of]).data_ptr() != of[0].value.data_ptr()
        lay_together(of)
        assert all(torch.equal(slot.value, value) for slot, value in zip(of, before, strict=True))
        whole = joined([slot.value for slot in of])
        assert whole.data_ptr() == of[0].value.data_ptr()
        assert torch.equal(whole, torch.cat(before))

    def test_gradients_reach_each_part(self):
        of = slots(torch.randn(4, 8), torch.randn(2, 8))
        lay_together(of)
        weight = torch.randn(6, 8)
        (joined([slot.value for slot in of]) * weight).sum().backward()
        assert torch.equal(torch.cat([slot.value.grad for slot in of]), weight)

    def test_the_other_order_and_a_gap_are_copied(self):
        base = torch.randn(9, 8)
        a, b, c = base[:4], base[4:6], base[7:]
        for parts in ([b, a], [a, c], [a, b.clone()], [a, b.double()]):
            whole = joined([*parts])
            assert whole.data_ptr() != parts[0].data_ptr()
            assert torch.equal(whole, torch.cat(parts))

    def test_a_write_into_one_part_is_seen(self):
        of = slots(torch.randn(4, 8), torch.randn(2, 8))
        lay_together(of)
        with torch.no_grad():
            of[1].value.zero_()
        assert not joined([slot.value for slot in of])[4:].any()

    def test_what_cannot_lie_together_stays_apart(self):
        of = slots(torch.randn(4, 8), torch.randn(2, 8).double())
        lay_together(of)
        assert of[1].value.dtype is torch.float64

    def test_a_bias(self):
        of = slots(torch.randn(4), torch.randn(2))
        lay_together(of)
        assert joined([slot.value for slot in of]).data_ptr() == of[0].value.data_ptr()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.LayerNorm(4, elementwise_affine=False), "without weight or bias"),
        (nn.LayerNorm(4, bias=False), "without weight or bias"),
        (nn.RMSNorm(4, elementwise_affine=False, eps=1e-5), "without a weight"),
        (nn.RMSNorm(4), "eps is None"),
    ],
)
def test_norms_that_are_not_there(module, why):
    assert why in Norm.of(module)


def test_what_is_no_norm():
    assert Norm.of(nn.Linear(2, 2)) is None
    assert Norm.of(nn.BatchNorm1d(2)) is None

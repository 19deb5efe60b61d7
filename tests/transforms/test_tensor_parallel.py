import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.transforms.tensor_parallel import PLANS, parallelize, plan_of, styles_of


def gpt(**options):
    torch.manual_seed(0)
    return GPT(
        GPTConfig(
            dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=32, vocab_size=32, max_seq_len=8, **options
        )
    )


class Holder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.model = gpt(**options)


def test_a_ready_plan_has_the_names_of_the_model():
    plan = plan_of(Holder(), "gpt")
    assert plan["model.layers.*.attention.qkv"] == "colwise"
    assert plan_of(gpt(), "gpt")["head"] == "colwise_from_sequence"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("bert", "Use one of .*'gpt'"),
        ("llama", "is for a LlamaForCausalLM, and Holder has none"),
        ({"model.head": "diagonal"}, "Use one of .*'colwise'"),
    ],
)
def test_an_unknown_plan_or_style_is_refused(plan, text):
    with pytest.raises(ValueError, match=rf"(?s){text}"):
        plan_of(Holder(), plan)


def test_every_style_of_the_plans_exists():
    for name, (_, styles) in PLANS.items():
        assert styles, name
        plan_of(nn.Linear(1, 1), dict(styles))


def split(options, plan=None):
    model, whole = Holder(**options), Holder(**options)
    styles = parallelize(model, plan=plan or plan_of(model, "gpt"), mesh=init_device_mesh("cpu", (2,)))
    tokens = torch.arange(16).view(2, 8)
    loss, expected = model.model(tokens, tokens), whole.model(tokens, tokens)
    loss.backward()
    expected.backward()
    right = []
    for p, e in zip(model.parameters(), whole.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        right.append(torch.allclose(grad, e.grad, rtol=1e-4, atol=1e-5))
    tied = model.model.head.weight is model.model.embedding.weight
    return (
        len(styles),
        torch.allclose(loss, expected),
        right,
        tied,
        list(model.state_dict()) == list(whole.state_dict()),
    )


@pytest.mark.parametrize("options", [{}, {"tie": True}, {"qk_norm": True}], ids=repr)
def test_loss_and_gradients_are_those_of_the_whole(ranks, options):
    count, loss, gradients, tied, names = ranks(split, options)
    assert count > 20
    assert loss
    assert all(gradients)
    assert tied is options.get("tie", False)
    assert names


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"model.heads": "colwise"}, "matches no submodule"),
        ({"model.embedding": "embedding", "model.head": "rowwise"}, "are one weight.*Give both the same split"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(ranks, plan, text):
    with pytest.raises(AssertionError, match=rf"(?s){text}"):
        ranks(split, {"tie": True}, plan)


def uneven():
    model = nn.ModuleDict({"a": nn.Linear(4, 3)})
    parallelize(model, plan={"a": "colwise"}, mesh=init_device_mesh("cpu", (2,)))


def test_a_weight_that_does_not_divide_is_refused(ranks):
    with pytest.raises(AssertionError, match=r"(?s)weight of a, of shape \(3, 4\).*divides 3"):
        ranks(uneven)


class Attention(nn.Module):
    """As those of transformers."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.k_proj = 4, nn.Linear(8, 4)


@pytest.mark.parametrize(
    ("model", "plan", "text"),
    [
        (Holder(), "gpt", r"attention.qkv.*in parts of 16 that belong together, as heads do, over 4.*divides 2"),
        (nn.ModuleDict({"a": Attention()}), {"a.k_proj": "colwise"}, r"a.k_proj.*in parts of 4 .*divides 1"),
    ],
)
def test_heads_are_not_cut(model, plan, text):
    with pytest.raises(ValueError, match=rf"(?s){text}"):
        styles_of(model, plan=plan_of(model, plan), size=4)


def odd_sequence():
    model = Holder()
    parallelize(model, plan=plan_of(model, "gpt"), mesh=init_device_mesh("cpu", (2,)))
    model.model(torch.arange(14).view(2, 7))


def test_a_sequence_that_does_not_divide_is_refused_before_devices_wait_for_one_another(ranks):
    with pytest.raises(AssertionError, match=r"A sequence of 7 positions was given to model.embedding.*multiple of 2"):
        ranks(odd_sequence)

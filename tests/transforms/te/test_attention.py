import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.optional.te import autocast
from lightning_ups.transforms.te import RECIPES, Recipe
from lightning_ups.transforms.te import attention as te_attention
from tests import fake_te


@pytest.fixture(autouse=True)
def engine():
    with fake_te.installed() as module:
        yield module


class Block(nn.Module):
    """Two attentions in a row, the second over fewer heads of keys and values."""

    def __init__(self, **options):
        super().__init__()
        self.options = {"is_causal": True} | options
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = F.scaled_dot_product_attention(x, x, x, **self.options)
        k = x[:, :2] * self.scale
        return F.scaled_dot_product_attention(x, k, k, enable_gqa=True, **self.options)


def made(name="current"):
    return RECIPES[name].make(amax_history=1, attention=True)


def fp8(name="current"):
    return autocast(made(name), group=None)


def engine_attention(blocks, name="current"):
    return te_attention.engine_attention(blocks, RECIPES[name], made(name))


def value():
    torch.manual_seed(0)
    return torch.randn(2, 4, 8, 16, requires_grad=True)


def test_it_is_near_torchs_and_has_gradients():
    block, results = Block(), []
    with engine_attention({"b": block}) as attention:
        for context in (fp8, lambda: torch.enable_grad()):
            x = value()
            with context():
                out = block(x)
            out.square().sum().backward()
            results.append((out, x.grad))
    assert attention.total == 2
    assert [*attention.modules] == [("b", 1), ("b", 2)]
    for a, b in zip(*results, strict=True):
        assert not torch.equal(a, b)
        assert (a - b).norm() / b.norm() < 0.1


def test_the_next_call_uses_the_same_modules():
    block = Block()
    with engine_attention({"b": block}) as attention, fp8():
        block(value())
        before = [*attention.modules.values()]
        block(value())
        assert [*attention.modules.values()] == before


@pytest.mark.parametrize(
    "options", [{"is_causal": False}, {"is_causal": False, "attn_mask": torch.ones(8, 8).bool()}, {"dropout_p": 0.1}]
)
def test_other_attention_is_refused(options):
    block = Block(**options)
    with (
        engine_attention({"b": block}),
        fp8(),
        pytest.raises(ValueError, match=r"b calls attention that float8 does not support.*fp8_attention=False"),
    ):
        block(value())


def test_delayed_scaling_begins_with_scales_that_lose_no_gradients():
    for name in ("current", "delayed"):
        block = Block()
        with engine_attention({"b": block}, name) as attention, fp8(name):
            block(value())
        for module in attention.modules.values():
            scales = module.fp8_meta.get("scaling_fwd")
            assert (scales is None) == (name == "current")
            if scales is not None:
                assert scales.scale.tolist() == [1.0] * 8 + [256.0]  # weights of attention are 1 at most
                assert module.fp8_meta["scaling_bwd"].scale.tolist() == [65536.0] * 6


def test_heads_that_have_no_kernel_are_refused(monkeypatch):
    asked = []

    def why_not(recipe, device, *, width):
        asked.append((recipe.name, device.type, width))
        return "heads are too narrow"

    monkeypatch.setattr(Recipe, "why_no_attention", why_not)
    block = Block()
    with (
        engine_attention({"b": block}),
        fp8(),
        pytest.raises(
            ValueError,
            match=r"b calls attention.*: heads are too narrow\. Use TEPrecision\(fp8_attention=False\)\.$",
        ),
    ):
        block(value())
    assert asked == [("current", "cpu", 16)]


def test_what_transformer_engine_has_no_kernel_for_names_the_block(monkeypatch):
    def forward(*_):
        raise ValueError("No dot product attention backend is available for the provided inputs.")

    monkeypatch.setattr(fake_te.DotProductAttention, "forward", forward)
    block = Block()
    with (
        engine_attention({"b": block}),
        fp8(),
        pytest.raises(
            RuntimeError, match=r"b calls .* queries \(2, 4, 8, 16\).*No dot product.*fp8_attention=False\.$"
        ),
    ):
        block(value())


def test_it_is_undone():
    block = Block()
    with engine_attention({"b": block}):
        pass
    assert "forward" not in vars(block)

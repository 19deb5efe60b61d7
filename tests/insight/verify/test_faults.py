import pytest
import torch
from torch import nn

from lightning_ups.insight.verify.faults import FAULTS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def run(block):
    torch.manual_seed(1)
    result = block(torch.randn(32, 8))
    (1e-4 * result.square().sum()).backward()
    gradients = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    return result.detach(), gradients


EFFECTS = {
    "a skipped block": lambda out, right: torch.equal(out[0], torch.randn(32, 8)) and not out[1][0].any(),
    "a gradient scaled by 2": lambda out, right: (
        torch.equal(out[0], right[0]) and all(torch.equal(g, 2 * r) for g, r in zip(out[1], right[1], strict=True))
    ),
    "a layer in the wrong type": lambda out, right: (
        0.002 < (out[0] - right[0]).norm() / right[0].norm() < 0.1 and (out[1][0] - right[1][0]).norm() > 0
    ),
    "a stale scale": lambda out, right: (out[0] - right[0]).norm() > 0.1 * right[0].norm(),
}


class Conv1D(nn.Module):
    """As that of transformers: a linear layer that is none of torch's, its weight turned."""

    def __init__(self, width, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out) / width**0.5), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Turned(Block):
    def __init__(self):
        super().__init__()
        self.up, self.down = Conv1D(8, 16), Conv1D(16, 8)


class Convolved(Block):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv1d(8, 16, 1), nn.Conv1d(16, 8, 1)

    def forward(self, x):
        return super().forward(x[..., None])[..., 0]


class Adapted(Block):
    """With an adapter whose product is zero when training begins, as LoRA's is."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False))
        nn.init.zeros_(self.adapter[1].weight)

    def forward(self, x):
        return super().forward(x) + self.adapter(x)


class Attending(Block):
    """What comes last is a layer that is never called: its weight is read."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x):
        h = torch.tanh(self.up(x))
        return x + self.down(h + self.attention(h, h, h)[0])


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", [Block, Turned, Convolved, Adapted, Attending])
def test_a_fault_has_its_effect_and_goes(kind, name):
    block = kind()
    right = run(block)
    with FAULTS[name](block):
        found = run(block)
        torch.manual_seed(1)
        assert EFFECTS[name](found, right)
    again = run(block)
    assert torch.equal(again[0], right[0])
    assert all(torch.equal(a, b) for a, b in zip(again[1], right[1], strict=True))


class Narrowing(nn.Linear):
    """Called by keyword, and its result has another shape than what it is given."""

    def forward(self, *, x):
        return {"states": super().forward(x), "count": len(x)}


def test_a_skipped_block_with_another_output_shape_returns_zeros():
    block, x = Narrowing(8, 4), torch.randn(2, 8)
    with FAULTS["a skipped block"](block):
        found = block(x=x)
    assert torch.equal(found["states"], torch.zeros(2, 4))
    assert found["count"] == 2
    assert block(x=x)["states"].any()


def test_a_block_without_matrix_products_is_an_error():
    with (
        pytest.raises(ValueError, match=r"LayerNorm .*--no_faults"),
        FAULTS["a stale scale"](nn.LayerNorm(4)),
    ):
        pass

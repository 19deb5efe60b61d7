import copy

import pytest
import torch
from torch import nn

from lightning_ups.transforms.casting.in_float32 import computing_in_float32, kept_in_float32, within
from lightning_ups.transforms.compile.compiler import Compiler, compiled


class Spectral(nn.Module):
    """A layer as physicists write it: bfloat16 knows no Fourier transform."""

    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.out = nn.Linear(4, 4)
        self.seen, self.watched = [], True

    def forward(self, x, *, inner=None):
        if self.watched:
            self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        real = self.out(torch.fft.irfft(torch.fft.rfft(x) * self.modes))
        return {"real": real, "modes": self.modes, "double": x.double(), "whole": x.long(), "inner": inner}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Spectral(), nn.Linear(4, 4)) for _ in range(2)])
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(sum(block[0](x)["real"] for block in self.blocks))


def test_patterns_name_modules_and_the_outermost_count():
    net = Net()
    kept = kept_in_float32(net, ["blocks.*.0", "blocks.0.0.out", "head"])
    assert [*kept] == ["blocks.0.0", "blocks.1.0", "head"]
    assert within(kept.values()) == {
        net.blocks[0][0],
        net.blocks[0][0].out,
        net.blocks[1][0],
        net.blocks[1][0].out,
        net.head,
    }
    assert kept_in_float32(net, []) == {}
    with pytest.raises(ValueError, match=r"'blocks\.9' matches no submodule"):
        kept_in_float32(net, ["blocks.9"])


def test_a_weight_that_is_shared_with_the_rest_is_refused():
    net = Net()
    net.head.weight = net.blocks[1][0].out.weight
    with pytest.raises(ValueError, match=r"blocks\.1\.0\.out\.weight is also a parameter of 'head'.*Name both"):
        kept_in_float32(net, ["blocks.1.0"])
    assert [*kept_in_float32(net, ["blocks.1.0", "head"])] == ["blocks.1.0", "head"]


def test_they_are_given_float32_and_what_they_return_is_cast_back():
    part, x = Spectral(), torch.randn(2, 4).bfloat16()
    with pytest.raises(RuntimeError, match="BFloat16"):
        part(x)
    with computing_in_float32([part], outputs=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        found = part(x, inner=[x, {"a": x.half()}])
        copied = copy.deepcopy(part)
    expected = part(x.float())
    assert part.seen[1:] == [(torch.float32, False), (torch.float32, False)]
    assert torch.equal(found["real"], expected["real"].bfloat16())
    assert [found[name].dtype for name in ("modes", "double", "whole")] == [torch.complex64, torch.float64, torch.int64]
    assert (found["inner"][0].dtype, found["inner"][1]["a"].dtype) == (torch.bfloat16, torch.bfloat16)
    assert "forward" not in vars(part)
    assert copied(x.float())["real"].dtype is torch.float32  # nobody would undo it there


def test_equal_ones_share_a_compilation():
    net, x = Net(), torch.randn(2, 4).bfloat16()
    net.head.bfloat16()
    parts = {f"blocks.{i}.0": block[0] for i, block in enumerate(net.blocks)}
    for part in parts.values():
        part.watched = False
    with computing_in_float32(parts.values(), outputs=torch.bfloat16):
        expected = net(x)
        with compiled(parts, compiler=Compiler(backend="aot_eager", fullgraph=True)) as run:
            found = net(x)
            found.float().sum().backward()
    torch.testing.assert_close(found, expected)
    assert [group.facts["graphs"] for group in run.groups] == [1]

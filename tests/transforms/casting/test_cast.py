import copy
import pickle
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from lightning_ups.transforms.casting.cast import (
    cast_around,
    cast_tensors,
    computing_in_float32,
    is_wide,
    kept_in_float32,
    telling_rounded_losses,
    within,
)
from lightning_ups.transforms.compile.compiler import Compiler, compiled


class Talkative(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2).to(torch.bfloat16), []

    def forward(self, x, *, extra):
        self.seen.append((x.dtype, extra["mask"].dtype, extra["ids"].dtype))
        return {"out": [self.layer(x)], "ids": extra["ids"]}


def test_floating_tensors_are_cast_in_any_nesting_and_others_are_not():
    model, x = Talkative(), torch.ones(1, 2)
    extra = {"mask": torch.ones(1), "ids": torch.ones(1, dtype=torch.long)}
    with cast_around([model], inputs=torch.bfloat16, outputs=torch.float32):
        result = model(x, extra=extra)
    assert model.seen == [(torch.bfloat16, torch.bfloat16, torch.long)]
    assert result["out"][0].dtype is torch.float32
    assert result["ids"].dtype is torch.long
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@dataclass(frozen=True)
class Fields:
    values: torch.Tensor
    parts: dict
    ids: torch.Tensor
    count: int = field(default=0, init=False)


@dataclass
class Outcome:
    loss: torch.Tensor


class Solver(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2).to(torch.bfloat16), []

    def forward(self, fields):
        self.seen.append((fields.values.dtype, fields.parts["edge"].dtype, fields.ids.dtype, fields.count))
        return Fields(self.layer(fields.values), {"edge": fields.parts["edge"]}, fields.ids)


def test_fields_of_dataclasses_are_cast():
    model, x = Solver(), torch.ones(1, 2)
    given = Fields(x, {"edge": x}, torch.ones(1, dtype=torch.long))
    object.__setattr__(given, "count", 3)
    with cast_around([model], inputs=torch.bfloat16, outputs=torch.float32):
        result = model(given)
    assert model.seen == [(torch.bfloat16, torch.bfloat16, torch.long, 3)]
    assert (result.values.dtype, result.parts["edge"].dtype) == (torch.float32, torch.float32)
    assert result.ids is given.ids
    assert given.values is x, "what was given is left as it is"


def test_what_has_nothing_to_cast_is_the_same_object():
    """A module may write to it, as to a cache of keys."""
    settings = Outcome(torch.ones(1, dtype=torch.long))
    assert cast_tensors(settings, torch.bfloat16) is settings
    cache = Outcome([torch.ones(1, dtype=torch.bfloat16), {}])
    assert cast_tensors(cache, torch.bfloat16) is cache
    given = {"caches": [cache]}
    assert cast_tensors(given, torch.bfloat16)["caches"] is given["caches"]


@dataclass
class Named(OrderedDict):
    """As outputs of libraries are that have fields and keys."""

    loss: torch.Tensor | None = None

    def __post_init__(self):
        self["loss"] = self.loss

    def __setattr__(self, name, value):
        self[name] = value
        super().__setattr__(name, value)


def test_a_dataclass_that_is_a_mapping_is_cast_as_both():
    result = cast_tensors(Named(torch.ones(1)), torch.bfloat16)
    assert (result.loss.dtype, result["loss"].dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_rounded_loss_in_a_dataclass_is_told():
    told, model = [], Solver()
    model.forward = lambda x: Outcome(model.layer(x).sum())
    with telling_rounded_losses([model], dtype=torch.bfloat16, cure="", tell=told.append):
        model(torch.ones(1, 2, dtype=torch.bfloat16))
    assert len(told) == 1


def test_what_is_wide():
    low, double, phase = nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2, dtype=torch.complex64)
    assert is_wide(nn.Sequential(double, phase, nn.Tanh()))
    assert not any(map(is_wide, (low, nn.Sequential(low, double), nn.Tanh())))


def test_what_is_given_as_is_is_cast_on_its_way_out_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    seen = []
    with cast_around(net, inputs=torch.bfloat16, outputs=torch.float64, given_as_is={net[0]}):
        for layer in net:
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        assert [layer(torch.ones(1, 2)).dtype for layer in net] == [torch.float64] * 2
    assert seen == [torch.float32, torch.bfloat16]


def test_gradients_pass_and_the_type_is_that_of_the_input():
    layer, x = nn.Linear(2, 2).to(torch.bfloat16), torch.ones(1, 2, requires_grad=True)
    with cast_around([layer], inputs=torch.bfloat16, outputs=torch.float32):
        layer(x).sum().backward()
    assert x.grad.dtype is torch.float32


def test_a_module_within_another_casts_only_where_it_is_called_alone():
    """As `self.backbone = self.net[0]` makes it: between two layers nothing may be cast."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    seen = []
    net[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with cast_around([net, net[0]], inputs=torch.bfloat16, outputs=torch.float32):
        assert net(torch.ones(1, 2)).dtype is torch.float32
        assert net[0](torch.ones(1, 2)).dtype is torch.float32
        with pytest.raises(TypeError):
            net(torch.ones(1, 2), "no such argument")
        assert net[0](torch.ones(1, 2)).dtype is torch.float32
        twin = copy.deepcopy(net)
        assert twin(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert seen == [torch.bfloat16] * 2
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in (net, net[0]))


def test_the_outputs_of_transformers():
    from transformers.modeling_outputs import BaseModelOutput

    class Foreign(nn.Linear):
        def forward(self, x):
            return BaseModelOutput(last_hidden_state=super().forward(x))

    model = Foreign(2, 2).to(torch.bfloat16)
    with cast_around([model], inputs=torch.bfloat16, outputs=torch.float32):
        assert model(torch.ones(1, 2)).last_hidden_state.dtype is torch.float32


def test_packed_sequences_and_tuples_with_names():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    found = cast_tensors({"packed": packed, "named": torch.ones(2, 2).max(0)}, torch.bfloat16)
    assert type(found["packed"]) is type(packed)
    assert found["packed"].data.dtype is torch.bfloat16
    assert found["packed"].batch_sizes.dtype is torch.long
    assert (found["named"].values.dtype, found["named"].indices.dtype) == (torch.bfloat16, torch.long)


def pickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_a_copy_does_not_cast_and_keeps_no_hooks(clone):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.float64)
    with cast_around([layer], inputs=torch.float32, outputs=torch.float64):
        twin = clone(layer)
        with pytest.raises(RuntimeError, match="dtype"):
            twin(x)
        assert twin(x.float()).dtype is torch.float32, "neither way"
        assert not twin._forward_pre_hooks
        assert not twin._forward_hooks
        assert layer(x).dtype is torch.float64, "the original goes on"
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks


def test_a_copy_is_cast_by_its_own():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.float64)
    with cast_around([layer], inputs=torch.float32, outputs=torch.float64):
        twin = copy.deepcopy(layer)
    with cast_around([twin], inputs=torch.float32, outputs=torch.float64):
        assert twin(x).dtype is torch.float64
    assert twin(x.float()).dtype is torch.float32


def test_a_copy_compiles_as_one_graph():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with cast_around([layer], inputs=torch.float32, outputs=torch.float64):
        twin = nn.Sequential(copy.deepcopy(layer))
    assert torch.compile(twin, backend="eager", fullgraph=True)(x).dtype is torch.float32


class Losing(nn.Module):
    """Returns a loss beside what it is of, as models of transformers do."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.layer = nn.Linear(2, 2).to(dtype)

    def forward(self, x):
        y = self.layer(x.to(self.layer.weight.dtype))
        return {"loss": y.square().mean(), "logits": y}


def test_a_loss_of_low_precision_is_told_once_and_not_by_a_copy():
    told, model = [], Losing()
    with (
        cast_around([model], inputs=torch.bfloat16, outputs=torch.float32),
        telling_rounded_losses([model], dtype=torch.bfloat16, cure="Do this.", tell=told.append),
    ):
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert not told
        copied = copy.deepcopy(model)
        assert model(torch.ones(1, 2))["loss"].dtype is torch.float32
        model(torch.ones(1, 2))
        copied(torch.ones(1, 2))
    assert not model._forward_hooks
    assert len(told) == 1
    assert told[0].startswith("Losing computes its loss in bfloat16, whose numbers have eight bits")
    assert told[0].endswith("Do this.")


def test_what_is_no_loss_of_low_precision_is_not():
    told, models = [], [Losing(torch.float32), nn.Linear(2, 2).to(torch.bfloat16)]
    with telling_rounded_losses(models, dtype=torch.bfloat16, cure="", tell=told.append):
        for model in models:
            model(torch.ones(1, 2, dtype=models[1].weight.dtype))
    assert not told


class Scoring(nn.Module):
    """Returns scores, and the temperature by which they were divided."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.layer(x), self.scale.exp()


def test_a_number_that_comes_after_others_is_no_loss():
    told, model = [], Scoring().to(torch.bfloat16)
    with telling_rounded_losses([model], dtype=torch.bfloat16, cure="", tell=told.append):
        model(torch.ones(1, 2, dtype=torch.bfloat16))
    assert not told


def test_a_loss_is_no_break_of_a_whole_graph():
    model = Losing()
    with telling_rounded_losses([model], dtype=torch.bfloat16, cure="", tell=warnings.warn):
        model.compile(fullgraph=True, backend="eager")
        assert model(torch.ones(1, 2))["loss"].dtype is torch.bfloat16


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

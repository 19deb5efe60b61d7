from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_ups.insight.report.dtypes import _SHAPES, dtype_name, layer_dtypes

CPU = torch.device("cpu")
autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Scale(nn.Module):
    """Computes as it likes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


def model():
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), Scale(), nn.Linear(4, 4), nn.GELU())


@pytest.mark.parametrize("context", [nullcontext, autocast])
def test_compute_dtypes_are_those_of_real_outputs(context):
    net, seen = model(), {}

    def note(module, _, out):
        seen[type(module).__name__] = dtype_name(out.dtype)

    for layer in net:
        layer.register_forward_hook(note)
    with context():
        net[:2](torch.tensor([1]))  # the norm is given its own type, since a mixture is torch's affair
        net[2](torch.ones(1, 4))
    said = layer_dtypes(net, device=CPU, context=context)
    for name in ("Embedding", "Linear", "LayerNorm"):
        assert said[name] == {f"param float32, compute {seen[name]}": 2 if name == "Linear" else 1}
    assert said["Scale"] == {"param float32" + (", autocast bfloat16" if context is autocast else ""): 1}
    assert "GELU" not in said


class Initialised(nn.Linear):
    """Starts differently, and computes as torch does."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x.double()) * 2


def test_a_subclass_with_its_own_forward_has_no_known_compute_dtype():
    net = nn.Sequential(Initialised(2, 2), Doubled(2, 2))
    assert layer_dtypes(net, device=CPU, context=autocast) == {
        "Doubled": {"param float32, autocast bfloat16": 1},
        "Initialised": {"param float32, compute bfloat16": 1},
    }


def test_a_tied_layer_counts_once_and_nothing_is_drawn_or_changed():
    linear = nn.Linear(2, 2)
    net, state = nn.Sequential(linear, linear), torch.get_rng_state()
    assert layer_dtypes(net, device=CPU, context=nullcontext) == {"Linear": {"param float32, compute float32": 1}}
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", _SHAPES, ids=lambda kind: kind.__name__)
def test_every_kind_in_the_table_can_be_asked(kind):
    said = layer_dtypes(kind(*_SHAPES[kind][0]), device=CPU, context=autocast)
    assert next(iter(said[kind.__name__])).startswith("param float32, compute ")


def test_a_float8_layer_says_its_type():
    torchao = pytest.importorskip("torchao.float8")
    config = torchao.Float8LinearConfig(emulate=True)
    net = torchao.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=config)
    assert layer_dtypes(net, device=CPU, context=nullcontext) == {
        "Float8Linear": {"param float32, compute float8_e4m3fn": 1}
    }


def sharded():
    net, mesh = model(), init_device_mesh("cpu", (2,))  # by itself it would take the GPUs of a machine that has them
    fully_shard(net[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    return layer_dtypes(net, device=CPU, context=nullcontext)


def test_fsdp2_casts_by_the_policy_of_the_nearest_sharded_module(ranks):
    said = ranks(sharded)
    assert said["Linear"] == {"param float32, compute bfloat16": 1, "param float32, compute float32": 1}

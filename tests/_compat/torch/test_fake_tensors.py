import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributions import Distribution, Normal
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_ups._compat.torch.fake_tensors import (
    NEEDS_VALUES,
    FakeTensor,
    RecomputeCounter,
    fake_mesh,
    fake_mode,
    forget_compiled,
    is_fused,
    is_tracing,
    is_view,
    partitioning_backend,
    run_backward,
    without_checks,
)

aten = torch.ops.aten


def test_fakes_have_no_values():
    with fake_mode(), pytest.raises(NEEDS_VALUES):
        torch.empty(3).sum().item()
    with fake_mode(), pytest.raises(NEEDS_VALUES):
        torch.empty(3).nonzero()
    with fake_mode():
        assert isinstance(torch.empty(3) + torch.zeros(3), FakeTensor)


def test_views():
    assert all(map(is_view, (aten.view.default, aten.t.default, aten.expand.default, aten.slice.Tensor)))
    assert is_view(aten._unsafe_view.default)
    assert not any(map(is_view, (aten.add.Tensor, aten.add_.Tensor, aten.mm.default, len)))


def test_what_the_compiler_fuses():
    fused = (aten.add.Tensor, aten.exp.default, aten.sum.dim_IntList, aten.cat.default, aten.where.self)
    assert all(map(is_fused, fused))
    assert is_fused(torch.ops.prims.convert_element_type.default)
    assert is_fused(aten.scatter.value)
    opaque = (aten.mm.default, aten.convolution.default, aten.sort.default, aten.scatter.src, len)
    assert not any(map(is_fused, opaque))


def test_the_backend_splits_as_inductor_does():
    graphs, tracing = [], []

    def make(graph):
        graphs.append(graph)
        tracing.append(is_tracing())

        def run(args):
            tracing.append(is_tracing())
            return torch.fx.Interpreter(graph).boxed_run(args)

        return run

    forget_compiled()
    weight = torch.randn(4, 4, requires_grad=True)
    function = torch.compile(lambda x: (x @ weight).exp().sin().sum(), backend=partitioning_backend(make))
    x = torch.randn(3, 4)
    loss = function(x)
    loss.backward()
    forget_compiled()
    assert torch.allclose(loss, (x @ weight).exp().sin().sum())
    assert len(graphs) == 2
    # One intermediate is kept, though eager keeps two: the product, from which the others are computed again.
    outputs = next(node for node in graphs[0].graph.nodes if node.op == "output").args[0]
    assert "mm" in {getattr(node, "name", "") for node in outputs}
    assert tracing[0] is True
    assert tracing[-1] is False
    assert not is_tracing()


def test_nothing_is_checked_while_it_is_open(monkeypatch):
    bad = torch.tensor([-1.0])
    monkeypatch.setattr(Distribution, "_validate_args", True)  # Dynamo turns it off for good when it is first used
    with without_checks():
        Normal(torch.zeros(1), bad)
        Normal(torch.zeros(2, device="meta"), torch.ones(2, device="meta")).rsample()
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), bad)


def test_what_is_recomputed_is_counted_apart():
    weight = torch.randn(4, 4, requires_grad=True)
    with RecomputeCounter(display=False) as counter:
        loss = checkpoint(lambda x: (x @ weight).relu() @ weight, torch.randn(2, 4), use_reentrant=False).sum()
        loss.backward()
    once = 2 * 2 * 4 * 4
    # Forward twice; gradients of the weight twice, of what lies between once; the second product is not made again.
    assert (counter.get_total_flops(), counter.recomputed) == (once * (2 + 3 + 1), once)


def test_modes_stay_on_in_backward():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Mode():
        loss = checkpoint(lambda x: torch.softmax(x, 0).square(), x, use_reentrant=False).sum()
        run_backward(loss)
    assert seen.count(torch.softmax) == 2
    assert x.grad is not None


def test_a_mesh_of_devices_that_do_not_exist():
    with fake_mesh(4) as mesh:
        assert mesh.size() == 4
        linear = parallelize_module(torch.nn.Linear(8, 12, bias=False), mesh, ColwiseParallel())
        assert linear.weight.to_local().shape == (3, 8)
        assert linear(torch.randn(2, 8)).shape == (2, 3)
    assert not torch.distributed.is_initialized()

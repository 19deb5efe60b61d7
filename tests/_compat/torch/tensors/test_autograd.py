import pytest
import torch
from torch._functorch import config  # noqa: TID251
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_ups._compat.torch.tensors.autograd import (
    activation_memory_budget,
    changing_function_inputs,
    differentiated_by_torch_func,
    in_backward,
    keeps_graph,
    operators_seen_by,
    saved_at_any_version,
    saves_seen_by,
    storages,
)


def sin(x):
    return x.sin().sin()


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_saved_is_seen_and_left_to_the_hooks_in_force(recomputed):
    x, seen = torch.ones(2, requires_grad=True), []

    def run(x):
        with saves_seen_by(lambda tensor: seen.append(tensor.clone())):
            return sin(x)

    y = checkpoint(run, x, use_reentrant=False) if recomputed else run(x)
    assert len(seen) == 2
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().cos())


@pytest.mark.parametrize("copies", [False, True])
def test_only_what_is_named_may_be_written_to_before_backward(copies):
    x, named, other = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2)
    with saved_at_any_version([named], copies=copies):
        y, z = x * named, x * other
    named.add_(1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 1.0 if copies else 2.0))
    other.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_views_share_a_storage_and_memory_used_anew_is_another():
    x = torch.ones(4)
    assert dict(storages(x)) == dict(storages(x[1:])) == {next(iter(dict(storages(x)))): 16}
    seen = dict(storages(torch.ones(1000)))
    for _ in range(8):  # the allocator gives the same memory again
        seen |= dict(storages(torch.ones(1000)))
    assert len(seen) == 9


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # by the first jvp
def test_what_maps_is_not_taken_for_what_differentiates():
    found = []

    def look(x):
        found.append(differentiated_by_torch_func())
        return x.sum()

    look(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    torch.vmap(torch.func.jacrev(look))(torch.ones(2, 2))
    assert found == [False, False, True, True, True]


def bytes_on_a_rank():
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    whole = distribute_tensor(torch.ones(8), mesh, [Replicate()])
    return [sum(dict(storages(t)).values()) for t in (sharded, whole)]


def test_a_dtensor_counts_what_this_rank_holds(ranks):
    assert ranks(bytes_on_a_rank) == [16, 32]


def test_a_budget_is_none_under_which_torch_has_cached_a_graph_that_it_split_by_itself():
    for budget in (0.0, 0.5):
        with activation_memory_budget(budget):
            assert config.activation_memory_budget != budget
            assert config.activation_memory_budget == pytest.approx(budget)
    with activation_memory_budget(1.0):
        assert config.activation_memory_budget == 1.0


def test_equal_budgets_may_be_closed_in_any_order():
    before = config.activation_memory_budget
    first, second = activation_memory_budget(0.5), activation_memory_budget(0.5)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert config.activation_memory_budget == pytest.approx(0.5)
    second.__exit__(None, None, None)
    assert config.activation_memory_budget == before


def test_a_second_budget_is_refused_and_says_what_to_do():
    with (
        activation_memory_budget(0.5),
        pytest.raises(RuntimeError, match=r"=0\.0 cannot be set while.*0\.5.*End the first fit"),
    ):
        activation_memory_budget(0.0).__enter__()
    assert config.activation_memory_budget == 1.0


def test_backward_is_recognised():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            seen.append(in_backward())
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(in_backward())
            return gradient

    Look.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [False, True]
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(in_backward()))
    x.sum().backward()
    assert (seen[2:], in_backward()) == ([True], False)


def test_a_backward_that_keeps_its_graph_is_recognised():
    seen, x = [], torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [True, False]


def test_operators_are_seen_and_writes_through_views_that_versions_do_not_count_on():
    seen, ran, x, weight = [], [], torch.ones(2, 3, 4, requires_grad=True), torch.ones(4, 4)
    with operators_seen_by(lambda op, result: ran.append((op.name(), result)), writes=seen.append):
        product = torch.matmul(x, weight)
        product *= 2
        torch.add(x.detach(), 1, out=torch.empty(2, 3, 4))
        torch._foreach_mul_([torch.ones(1), torch.ones(2)], 2.0)
        product + 1
    assert [tuple(tensor.shape) for tensor in seen] == [(2, 3, 4), (2, 3, 4), (1,), (2,)]
    assert ("aten::add.Tensor", (2, 3, 4)) in [(name, tuple(getattr(result, "shape", ()))) for name, result in ran]
    assert seen[0].untyped_storage().data_ptr() == product.untyped_storage().data_ptr()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(("module", "expected"), [(__name__, 20.0), ("torch.distributed.tensor._api", 2.0)])
def test_inputs_of_functions_of_users_are_changed_and_of_distributed_ones_not(monkeypatch, module, expected):
    monkeypatch.setattr(Doubled, "__module__", module)
    with changing_function_inputs(lambda values: values if isinstance(values, dict) else [10 * v for v in values]):
        assert Doubled.apply(torch.tensor(1.0)).item() == expected
    assert Doubled.apply(torch.tensor(1.0)).item() == 2

import sys

import pytest
import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.custom_ops import define_operator, seen_by_nothing

SEEN = []


def product_impl(x: Tensor, other: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    SEEN.append(torch.compiler.is_compiling())
    return x * factor if other is None else x * other * factor, x.detach().clone()


def gradient_impl(grad: Tensor, x: Tensor, other: Tensor | None, factor: float) -> Tensor:
    SEEN.append(torch.compiler.is_compiling())
    return grad * factor if other is None else grad * other * factor


def keep(ctx, inputs, output):
    x, other, ctx.factor = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, other)


def differentiate(ctx, grad, _):
    x, other = ctx.saved_tensors
    return gradient(grad, x, other, ctx.factor), None, None


def empty(x, other, factor):
    return torch.empty_like(x), torch.empty_like(x)


gradient = define_operator(gradient_impl, name="tests_gradient", fake=lambda grad, *_: torch.empty_like(grad))
product = define_operator(product_impl, name="tests_product", fake=empty, keep=keep, differentiate=differentiate)


@torch.library.custom_op("lightning_ups::tests_custom_product", mutates_args=())
def custom_product(x: Tensor, other: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    return x * factor if other is None else x * other * factor, x.detach().clone()


custom_product.register_autograd(differentiate, setup_context=keep)


def inputs():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(3, 4, dtype=torch.float64), 2.5


def test_it_is_torchs_operator_with_a_gradient():
    x, other, factor = inputs()
    assert product is torch.ops.lightning_ups.tests_product.default
    torch.testing.assert_close(product(x, other, factor)[0], x * other * factor)
    for second in (other, None):
        torch.library.opcheck(product, (x, second, factor))
        assert torch.autograd.gradcheck(lambda x, second=second: product(x, second, factor)[0], x)
    with torch.no_grad():
        assert not product(x, other, factor)[0].requires_grad
    with torch.inference_mode():
        assert product(x, other, factor)[0].is_inference()


def test_a_compiled_function_has_it_in_its_graph():
    x, other, factor = inputs()
    compiled = torch.compile(lambda x: product(x, other, factor)[0].sin(), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).sum(), x)[0]
    torch.testing.assert_close(found, torch.autograd.grad((x * other * factor).sin().sum(), x)[0])


@torch.compiler.disable()
def told():
    pass


def test_where_a_function_is_left_uncompiled_what_it_runs_is_not_traced():
    x, other, factor = inputs()

    def left(x):
        for _ in range(1):
            told()  # a break within a loop
            x = product(x, other, factor)[0]
        return x

    SEEN.clear()
    torch.testing.assert_close(torch.compile(left, backend="eager")(x), x * other * factor)
    with torch.inference_mode():
        torch.compile(left, backend="eager")(x.detach())
    assert SEEN == [False, False]


def test_a_gradient_of_what_has_none_is_refused():
    x, other, factor = inputs()
    (grad,) = torch.autograd.grad(product(x, other, factor)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"tests_gradient.* Leave create_graph=True out"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # which torch's jvp calls
def test_what_would_be_lost_in_forward_mode_is_refused():
    x, other, factor = inputs()
    x = x.detach()

    def squared(x):
        return product(x, other, factor)[0].square()

    for call in (
        lambda: torch.func.jvp(squared, (x,), (x,)),
        lambda: torch.func.jacfwd(squared)(x),
        lambda: torch.func.vmap(lambda x: torch.func.jvp(lambda x: product(x, None, 2.0)[0], (x,), (x,)))(x),
    ):
        with pytest.raises(RuntimeError, match="Use backward, or compute this part by torch's own"):
            call()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="Use backward, or compute this part by torch's own"):
            squared(dual)
        torch.testing.assert_close(squared(x), (x * other * factor).square())  # which has no tangent
    given, _ = torch.func.jvp(lambda y: y * squared(x), (x,), (x,))
    torch.testing.assert_close(given, x * squared(x))


def test_a_gradient_by_torch_func_is_refused():
    x, other, factor = inputs()
    for call in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match=r"torch.func.*Use backward or torch.autograd.grad"):
            call(lambda x: product(x, other, factor)[0].sum())(x.detach())
    wanted = torch.func.grad(lambda y: (y * x.detach() * factor).sum())(x.detach())
    found = torch.func.grad(lambda y: (y * product(x.detach(), None, factor)[0]).sum())(x.detach())
    torch.testing.assert_close(found, wanted)


class Watched(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_what_sees_an_operator_is_known():
    x = torch.randn(3)
    assert not seen_by_nothing(x), "a gradient may be asked for"
    with torch.no_grad():
        assert seen_by_nothing(x, None, x)
        assert not seen_by_nothing(x, x.to("meta"))
        assert not seen_by_nothing(torch.nn.Parameter(x), x)
        with torch._subclasses.FakeTensorMode() as mode:
            assert not seen_by_nothing(x)
        assert not seen_by_nothing(mode.from_tensor(x))
        with Watched():
            assert not seen_by_nothing(x)
        with torch.autograd.profiler.profile():
            assert not seen_by_nothing(x)
        found = []
        torch.func.vmap(lambda row: found.append(seen_by_nothing(row)) or row)(x)
        torch._vmap_internals._vmap(lambda row: found.append(seen_by_nothing(row)) or row)(x)  # by is_grads_batched
        assert found == [False, False]
        assert seen_by_nothing(x)


@pytest.mark.parametrize(("recorded", "share"), [(True, 0.9), (False, 1)])
def test_a_call_takes_less_python_than_torchs_own(recorded, share):
    with torch.set_grad_enabled(recorded):
        assert instructions(product) < share * instructions(custom_product)


def instructions(operator):
    """Return how many instructions of Python a call runs, which are the same on a machine that is busy."""
    given, count = inputs(), 0

    def follow(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return follow

    operator(*given)
    before = sys.gettrace()
    sys.settrace(follow)
    try:
        operator(*given)
    finally:
        sys.settrace(before)
    return count

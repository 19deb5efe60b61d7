import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ups.kernels.attention import flash_attention, routed_attention, routing, support
from tests.kernels.attention.cases import Case, worst
from tests.kernels.attention.test_flash_attention import Package
from tests.kernels.attention.test_sdpa import Names

ORIGINAL = F.scaled_dot_product_attention
OPERATOR = "attention_forward"
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def by_torch(*tensors, held=(ORIGINAL,), **options):
    return held[0](*tensors, **options)  # a name in this module would be routed, too


@pytest.fixture
def fa4_on_cpu(monkeypatch):
    """Let backend fa4 do what eager formulas do, wherever the tensors are."""
    package = Package()
    monkeypatch.setattr(flash_attention, "load_fa4", lambda feature: package)
    monkeypatch.setattr(support, "load_fa4", lambda feature: package)
    monkeypatch.setattr(support, "missing_package", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    softened = [
        rule._replace(backends=tuple(set(rule.backends) - {"fa4"})) if "only" in rule.why else rule
        for rule in support._RULES
    ]
    monkeypatch.setattr(support, "_RULES", tuple(softened))
    forget()
    yield package
    forget()


def forget():
    routing._first_that_can.cache_clear()
    support.check.cache_clear()


def model(q, k, v, mask=None, *, dropout=0.0, causal=True, gqa=True):
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=gqa)


def inputs():
    return [tensor.transpose(1, 2).requires_grad_() for tensor in Case("", seq=40).tensors()]


def ran(function, *args, **kwargs):
    with Names() as names:
        function(*args, **kwargs)
    fused = {name for name in names.seen if "attention" in name}
    return fused or {"math"}


def test_each_call_goes_where_it_is_sent(fa4_on_cpu):
    assert ran(model, *inputs()) == {CPU_FLASH}
    with routed_attention("math"):
        assert ran(model, *inputs()) == {"math"}
    with routed_attention("fa4"):
        assert ran(model, *inputs()) == {OPERATOR}
    assert ran(model, *inputs()) == {CPU_FLASH}


@pytest.mark.parametrize("backend", ["math", "flash", "reference", "auto", "fa4"])
def test_output_and_gradients_are_torchs(fa4_on_cpu, backend):
    def run():
        tensors = inputs()
        out = model(*tensors)
        (out * out.detach().sin()).sum().backward()
        return [out.detach(), *(tensor.grad for tensor in tensors)]

    wanted = run()
    with routed_attention(backend):
        found = run()
    assert worst(found, [tensor.double() for tensor in wanted]) < 3e-6
    assert found[0].shape == wanted[0].shape


def kernels_of_graphs():
    """Return a list that grows by the kernels of each graph below autograd, and the backend that sees to it."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd  # noqa: TID251  (the graph below autograd)

    seen = []

    def compiler(graph, _):
        names = {node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"}
        seen.append(" ".join(sorted(name for name in names if "attention" in name or "bmm" in name)))
        return make_boxed_func(graph.forward)

    return seen, aot_autograd(fw_compiler=compiler)


def test_compiled_code_follows_and_is_never_stale(fa4_on_cpu):
    seen, backend = kernels_of_graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    tensors = [tensor.detach() for tensor in inputs()]
    compiled(*tensors)
    with routed_attention("fa4"):
        compiled(*tensors)
        with routed_attention("math"):
            compiled(*tensors)
        compiled(*tensors)
    compiled(*tensors)
    assert seen == [f"{CPU_FLASH}.default", f"{OPERATOR}.default", "bmm.default"]  # and then those found again
    with routed_attention("fa4"):
        compiled(*tensors)
    assert len(seen) == 3


def test_put_back_after_exceptions_and_nesting():
    with pytest.raises(KeyError), routed_attention("math"), routed_attention("flash"):
        raise KeyError
    assert F.scaled_dot_product_attention is ORIGINAL
    with routed_attention("math"):
        outer = F.scaled_dot_product_attention
        with routed_attention("reference"):
            assert F.scaled_dot_product_attention is not outer
        assert F.scaled_dot_product_attention is outer


def test_modules_that_were_imported_meanwhile_are_put_back_too(monkeypatch):
    foreign = ModuleType("foreign")
    monkeypatch.setitem(sys.modules, "foreign", foreign)
    with routed_attention("math"):
        outer = F.scaled_dot_product_attention
        with routed_attention("flash"), routed_attention("math"):
            exec("from torch.nn.functional import scaled_dot_product_attention as sdpa", foreign.__dict__)
            assert foreign.sdpa is outer
        assert foreign.sdpa is outer
    assert foreign.sdpa is ORIGINAL


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "sdpa"])
def test_modules_that_imported_the_function_are_routed_too(monkeypatch, name):
    foreign = ModuleType("foreign")
    setattr(foreign, name, ORIGINAL)
    exec(f"def f(*tensors): return {name}(*tensors)", foreign.__dict__)
    monkeypatch.setitem(sys.modules, "foreign", foreign)
    with routed_attention("math"):
        assert ran(foreign.f, *inputs()[:1] * 3) == {"math"}
    assert ran(foreign.f, *inputs()[:1] * 3) == {CPU_FLASH}


def test_multi_head_attention_is_routed():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 10, 32)
    with routed_attention("math"):
        assert ran(layer, x, x, x, need_weights=False) == {"math"}
    assert ran(layer, x, x, x, need_weights=False) == {CPU_FLASH}


def test_an_explicit_choice_does_not_fall_back():
    with routed_attention("fa4"), pytest.raises(ValueError, match="Move the tensors to a GPU"):
        model(*inputs())
    mask = torch.zeros(40, 40)
    with routed_attention("reference"), pytest.raises(ValueError, match="takes no mask tensor"):
        model(*inputs(), mask, causal=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["one head of keys", "last axis not dense"])
def test_what_torch_copies_does_not_make_it_fall_back(fa4_on_cpu, kind, compiled):
    q, k, v = (torch.randn(2, heads, 24, 16) for heads in (4, 1, 1))
    if kind == "last axis not dense":
        q, k, v = (tensor.mT.contiguous().mT for tensor in (q, q, q))
    wanted = model(q, k, v, gqa=False)
    call = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else model
    with routed_attention(["fa4", "math"]):
        torch.testing.assert_close(call(q, k, v, gqa=False), wanted)
        assert compiled or ran(call, q, k, v, gqa=False) == {OPERATOR}


def unusual(kind):
    q, k, v = (torch.randn(2, 4, 24, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = None
    if kind == "no heads":
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
    elif kind == "two leading axes":
        q, k, v = (tensor[None] for tensor in (q, k, v))
    elif kind == "3d mask":
        mask = torch.rand(4, 24, 24) > 0.3
    elif kind == "other heads of values":
        v = v[:, :1]
    elif kind == "one row of keys":
        k, v = k[:1], v[:1]
    elif kind == "last axis not dense":
        q, k, v = (tensor.mT.contiguous().mT for tensor in (q, k, v))
    return q, k, v, mask


UNUSUAL = ["no heads", "two leading axes", "3d mask", "other heads of values", "one row of keys"]


@pytest.mark.parametrize("kind", UNUSUAL)
def test_other_shapes_are_for_those_of_torchs_kernels_that_are_named(fa4_on_cpu, kind):
    tensors = unusual(kind)
    wanted = model(*tensors, causal=False, gqa=False)
    for backends in ("math", ["fa4", "math"]):
        with routed_attention(backends):
            torch.testing.assert_close(model(*tensors, causal=False, gqa=False), wanted)
    told = r"keys, values and mask .*\), \(4, 24, 24\)\..*" if kind == "3d mask" else "keys and values .*"
    with routed_attention("fa4"), pytest.raises(ValueError, match=f"{told}add 'auto' at the end"):
        model(*tensors, causal=False, gqa=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # which math makes of them
def test_nested_tensors_are_for_those_of_torchs_kernels_that_are_named(fa4_on_cpu):
    rows = [torch.randn(3, 16), torch.randn(5, 16)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).unflatten(-1, [2, 8]).transpose(1, 2)
    wanted = model(nested, nested, nested, causal=False, gqa=False).values()
    with routed_attention("fa4"), pytest.raises(ValueError, match="add 'auto' at the end"):
        model(nested, nested, nested, causal=False, gqa=False)
    for backends in ("math", ["fa4", "math"], ["fa4", "auto"]):
        with routed_attention(backends):
            torch.testing.assert_close(model(nested, nested, nested, causal=False, gqa=False).values(), wanted)


@pytest.mark.parametrize("backends", ["math", "auto", ["fa4", "math"]], ids=str)
def test_of_a_mistake_torch_says_what_it_is(fa4_on_cpu, backends):
    q, k, v = (torch.randn(2, 6, 24, 16) for _ in range(3))
    with routed_attention(backends):
        with pytest.raises(RuntimeError, match="must match"):
            model(q, k[:, :4], v[:, :4], gqa=False)
        with pytest.raises(RuntimeError, match="must divide"):
            model(q, k[:, :4], v[:, :4], gqa=True)


def test_of_several_the_first_that_can():
    with routed_attention(["fa4", "cudnn", "flash", "math"]):
        assert ran(model, *inputs()) == {CPU_FLASH}
        assert ran(model, *inputs(), dropout=0.5) == {"math"}
    with routed_attention(["fa4", "auto"]):
        assert ran(model, *inputs()) == {CPU_FLASH}
    with routed_attention(["fa4", "cudnn"]), pytest.raises(ValueError, match=r"fa4: .*cudnn: .*Add another"):
        model(*inputs())


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_a_float32_mask_under_autocast_is_cast_as_torch_casts_it(trains, dense, monkeypatch):
    given = []
    by_torch = routing.scaled_dot_product_attention
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(routing, name, lambda *args, **options: (given.append(args), by_torch(*args, **options))[1])
    (q, k, v), (bias,) = inputs(), [torch.randn(1, 4, 40, 40).requires_grad_(trains)]
    mask = bias if dense else bias.mT
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(q, k, v, mask, causal=False)
        with routed_attention("auto"):
            found = model(q, k, v, mask, causal=False)
    assert torch.equal(found, wanted)
    ((query, *_, found_mask, _, _),) = given
    assert query.dtype == found_mask.dtype == (torch.bfloat16 if dense else torch.float32)  # torch casts the others


@pytest.mark.parametrize("backends", ["auto", ["fa4", "auto"]], ids=str)
@pytest.mark.parametrize("kind", [*UNUSUAL, "last axis not dense"])
def test_with_auto_other_shapes_stay_with_torch(fa4_on_cpu, backends, kind):
    tensors = unusual(kind)
    wanted = model(*tensors, causal=False, gqa=False)
    with routed_attention(backends):
        torch.testing.assert_close(model(*tensors, causal=False, gqa=False), wanted)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["auto", "fa4"])
def test_compiled_code_serves_many_lengths(fa4_on_cpu, backend, dynamic):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with routed_attention(backend):
        for batch, seq in ((2, 10), (2, 12), (3, 17), (4, 23)):
            tensors = [t.transpose(1, 2).requires_grad_() for t in Case("", batch=batch, seq=seq).tensors()]
            found, wanted = compiled(*tensors), by_torch(*tensors, is_causal=True, enable_gqa=True)
            for ours, torchs in zip(*(torch.autograd.grad(o.sum(), tensors) for o in (found, wanted)), strict=True):
                torch.testing.assert_close(ours, torchs)


def by_math(*tensors):
    with sdpa_kernel(SDPBackend.MATH):
        return model(*tensors)


def test_an_eager_call_that_torch_would_answer_alike_is_routed_once(monkeypatch):
    routed = []
    monkeypatch.setattr(
        routing, "_routed", lambda *args, _call=routing._routed, **options: routed.append(1) or _call(*args, **options)
    )
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for _ in range(2):
        routed.clear()
        with routed_attention("auto"):
            found = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(3)]
            assert len(routed) == 1
            assert all(torch.equal(each, expected) for each in found)
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q[:, :, :8], k, v)
            assert len(routed) == 3
        assert routing.has_routed("auto")


@pytest.mark.parametrize("backends", ["flash", "fa4", "auto", ["fa4", "auto"]], ids=str)
def test_a_choice_of_torchs_own_inside_counts(fa4_on_cpu, monkeypatch, backends):
    monkeypatch.setattr(routing, "_CALLED", {})
    tensors = inputs()
    with routed_attention(backends):
        assert ran(by_math, *tensors) == {"math"}
        gradients = torch.autograd.grad(by_math(*tensors).sin().sum(), tensors, create_graph=True)
        assert all(gradient.requires_grad for gradient in gradients), "which math alone gives"
        assert not routing.has_routed(backends)
        model(*tensors)
        assert routing.has_routed(backends)


def test_a_choice_of_torchs_own_inside_counts_in_compiled_code(fa4_on_cpu):
    seen, backend = kernels_of_graphs()
    tensors = [tensor.detach() for tensor in inputs()]
    with routed_attention("fa4"):
        torch.compile(by_math, backend=backend, fullgraph=True)(*tensors)
        torch.compile(model, backend=backend, fullgraph=True)(*tensors)
    assert seen == ["bmm.default", f"{OPERATOR}.default"]


def test_what_model_chose_kernels_before_is_no_choice_inside(fa4_on_cpu):
    with sdpa_kernel(SDPBackend.MATH), routed_attention("fa4"):
        assert ran(model, *inputs()) == {OPERATOR}


@pytest.mark.parametrize("compiled", [False, True])
def test_whether_anything_was_routed_is_known(compiled, monkeypatch):
    monkeypatch.setattr(routing, "_CALLED", {})
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with routed_attention(["reference", "math"]):
        assert not routing.has_routed(["reference", "math"])
        call(*inputs())
    assert routing.has_routed(["reference", "math"])
    assert not routing.has_routed("math")
    with routed_attention(["reference", "math"]):  # compiled code that is there makes the call untold
        assert routing.has_routed(["reference", "math"]) == compiled


def test_autocast():
    with routed_attention("reference"), torch.autocast("cpu", torch.bfloat16):
        assert model(*inputs()).dtype == torch.bfloat16


@pytest.mark.parametrize("backends", ["fa5", ["flash", "fa5"], []])
def test_what_is_no_backend_is_refused(backends):
    with pytest.raises(ValueError, match="Use names of 'auto'"), routed_attention(backends):
        pass


def test_what_would_never_be_used_is_refused():
    with (
        pytest.raises(ValueError, match="Put 'auto' at the end"),
        routed_attention(["auto", "fa4"]),
    ):
        pass


def test_a_transformers_model_is_routed(fa4_on_cpu):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(24).view(2, 12)
    wanted = llama(tokens).logits
    with routed_attention("fa4"):
        assert OPERATOR in ran(llama, tokens)
        torch.testing.assert_close(llama(tokens).logits, wanted)


@pytest.mark.parametrize("backend", ["math", "flash", "auto", ["flash", "math"]])
def test_a_float32_mask_beside_float64_is_read_as_what_it_is(backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 17, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(17, 17)
    wanted = (q @ k.mT / 2 + mask).softmax(-1) @ v
    with routed_attention(backend):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, mask), wanted)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first that inductor captures on a GPU is
@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("backend", ["cudnn", "flash", "fa4", "auto"])
def test_on_a_gpu_cuda_graphs_replay_it(backend):
    if backend == "fa4" and support.missing_package("fa4"):
        pytest.skip("flash-attn-4 is not installed")
    shape = Case("", seq=512, dim=128, heads=(8, 2)).tensors(torch.bfloat16, "cuda")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for turn in range(4):  # run as it is, recorded, and replayed twice
        tensors = [(t.detach() * 0.9**turn).transpose(1, 2).requires_grad_() for t in shape]
        doubles = [t.detach().double().requires_grad_() for t in tensors]
        wanted = ORIGINAL(*doubles, is_causal=True, enable_gqa=True)
        with routed_attention(backend):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(*tensors)
        assert worst([found], [wanted]) < 1.5e-2
        found.backward(torch.ones_like(found))
        wanted.backward(torch.ones_like(wanted))
        assert worst([t.grad for t in tensors], [t.grad for t in doubles]) < 1.5e-2


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "math", "fa4", "auto"])
def test_on_a_gpu_compiled(backend):
    if backend == "fa4" and support.missing_package("fa4"):
        pytest.skip("flash-attn-4 is not installed")
    tensors = [t.transpose(1, 2) for t in Case("", seq=512, dim=128, heads=(8, 2)).tensors(torch.bfloat16, "cuda")]
    wanted = ORIGINAL(*(tensor.double() for tensor in tensors), is_causal=True, enable_gqa=True)
    compiled = torch.compile(model, fullgraph=True)
    with routed_attention(backend):
        assert worst([compiled(*tensors)], [wanted]) < 1.5e-2

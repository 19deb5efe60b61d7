import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_ups.kernels.attention import Documents, attention, reference_attention
from tests.kernels.attention.cases import BAND, CASES, Case, expected, gradients, worst

ON_CPU = ["reference", "math", "flash", "auto"]


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_and_gradients_are_the_references(backend, case):
    if case.softcap and backend in ("math", "flash"):
        pytest.skip("it has no softcap: test_support")
    tensors, options = case.tensors(), case.options()
    found = gradients(attention, tensors, {**options, "backend": backend})
    assert worst(found, expected(tensors, options)) < BAND


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "cross"], ids=lambda case: case.name)
def test_flex_without_gradients(case):
    case = Case(**{**case.__dict__, "seq": case.seq + 200})
    tensors, options = case.tensors(), case.options()
    with torch.no_grad():
        found = attention(*tensors, **options, backend="flex")
    assert worst([found], expected(tensors, options)[:1]) < BAND


@pytest.mark.parametrize("backend", ON_CPU)
def test_views_of_a_fused_product_go_in_as_they_are(backend):
    qkv = torch.randn(2, 50, 8, 16, requires_grad=True)
    q, k, v = qkv.split((4, 2, 2), dim=2)
    out = attention(q, k, v, backend=backend)
    out.sum().backward()
    found = [out.detach(), qkv.grad]
    double = qkv.detach().double().requires_grad_()
    out = attention(*double.split((4, 2, 2), dim=2), backend="reference")
    out.sum().backward()
    assert worst(found, [out.detach(), double.grad]) < BAND


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("case", [CASES[0], CASES[11]], ids=lambda case: case.name)
def test_compiles_without_a_break(backend, case):
    tensors, options = case.tensors(), case.options()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found = gradients(compiled, tensors, {**options, "backend": backend})
    assert worst(found, expected(tensors, options)) < BAND


def test_flex_compiles_without_a_break():
    case = Case("", seq=200, packed=True, window=30)
    tensors, options = case.tensors(), case.options()
    with torch.no_grad():
        found = torch.compile(attention, backend="aot_eager", fullgraph=True)(*tensors, **options, backend="flex")
    assert worst([found], expected(tensors, options)[:1]) < BAND


def test_autocast_casts_as_torch_does():
    tensors = Case("").tensors()
    with torch.autocast("cpu", torch.bfloat16):
        outs = [attention(*tensors, backend=backend) for backend in ON_CPU]
    assert {out.dtype for out in outs} == {torch.bfloat16}


@pytest.mark.parametrize("backend", [*ON_CPU, "flex", "fa4", "cudnn"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_meta_every_backend_has_shapes_and_costs(backend, case):
    tensors = [tensor.requires_grad_() for tensor in case.tensors(device="meta")]
    with FlopCounterMode(display=False) as counter:
        out = attention(*tensors, **case.options("meta"), backend=backend)
        out.sum().backward()
    assert out.shape == (*tensors[0].shape[:3], case.dim)
    assert {tensor.grad.device.type for tensor in tensors} == {"meta"}
    assert counter.get_total_flops() > 0


def test_an_unknown_backend_is_refused_on_meta_too():
    with pytest.raises(ValueError, match="Use one of 'auto', 'reference'"):
        attention(*Case("").tensors(device="meta"), backend="fa5")


def test_a_list_of_backends_is_refused():
    with pytest.raises(ValueError, match=r"backend=\['flash', 'math'\] is not a kernel of attention\. Use one of"):
        attention(*Case("").tensors(), backend=["flash", "math"])


Q, K = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 2, 16)


@pytest.mark.parametrize(
    ("tensors", "options", "cure"),
    [
        ((Q, K[:, :, 0], K[:, :, 0]), {}, "transpose\\(1, 2\\)"),
        ((Q, K, K[:, :4]), {}, "transpose\\(1, 2\\)"),
        ((Q, K[..., :8], K), {}, "multiple of key heads"),
        ((Q[:, :, :3], K, K), {}, "multiple of key heads"),
        ((Q, K[:, :, :0], K[:, :, :0]), {}, "multiple of key heads"),
        ((Q, K[:, :4], K[:, :4]), {}, "causal=False"),
        ((Q, K, K), {"window": 0}, "window of 1 or more"),
        ((Q, K, K), {"documents": Documents.from_ids(torch.zeros(2, 9))}, "as the tokens are cut"),
        ((Q, K, K), {"backend": "fa5"}, "Use one of 'auto', 'reference'"),
        ((Q, K, K), {"scale": -0.5}, "scale=-0.5 is not above 0"),
        ((Q, K, K), {"softcap": float("inf")}, "softcap=inf"),
    ],
)
def test_what_does_not_fit_is_refused(tensors, options, cure):
    with pytest.raises(ValueError, match=cure):
        attention(*tensors, **options)


@pytest.mark.parametrize("backend", ["auto", "reference", "math"])
@pytest.mark.parametrize(
    "tensors",
    [(Q, K, K.bfloat16()), (Q.bfloat16(), K, K), (Q.long(), K.long(), K.long()), (Q, K.to("meta"), K.to("meta"))],
    ids=["values in bfloat16", "queries in bfloat16", "whole numbers", "two devices"],
)
def test_tensors_that_differ_in_type_or_device_are_refused(tensors, backend):
    with pytest.raises(TypeError, match=r"Cast and move them"):
        attention(*tensors, backend=backend)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_learned_number_would_have_no_gradient(name):
    with pytest.raises(TypeError, match="Multiply the queries"):
        attention(Q, K, K, **{name: torch.ones((), requires_grad=True)})


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [Case("causal"), Case("softcap", softcap=30.0), Case("window", window=5)], ids=lambda case: case.name
)
def test_compiled_code_serves_many_lengths(case, dynamic):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, window=case.window, softcap=case.softcap)

    compiled = torch.compile(Block(), backend=count, fullgraph=True, dynamic=dynamic)
    for batch, seq in ((2, 10), (2, 12), (3, 17), (4, 23)):
        shaped = Case(**{**case.__dict__, "batch": batch, "seq": seq})
        wanted = expected(shaped.tensors(), shaped.options())[:1]
        assert worst([compiled(*shaped.tensors())], wanted) < BAND
    assert len(graphs) < 4


@pytest.mark.parametrize("backend", ["auto", "math", "reference"])
def test_causal_may_be_a_comparison_of_lengths(backend):
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(q, k):
        return attention(q, k, k, causal=q.shape[1] == k.shape[1], backend=backend)

    for queries, keys in ((9, 9), (7, 11)):
        q, k = torch.randn(2, queries, 4, 16), torch.randn(2, keys, 4, 16)
        torch.testing.assert_close(attend(q, k), reference_attention(q, k, k, causal=queries == keys))


@pytest.mark.parametrize("backend", ON_CPU)
def test_a_last_axis_that_is_not_dense_is_copied(backend):
    tensors = Case("").tensors()
    apart = [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in tensors]
    assert apart[0].stride(-1) != 1
    assert worst(gradients(attention, apart, {"backend": backend}), expected(tensors, {"causal": True})) < BAND

import inspect
import sys
from types import ModuleType

import pytest
import torch

from lightning_ups._compat.torch.tensors import attention as compat
from lightning_ups.kernels.attention import Documents, attention
from lightning_ups.kernels.attention.backends import eager, fa4
from lightning_ups.kernels.attention.request import Request
from tests.kernels.attention.cases import BAND, CASES, Case, expected, gradients, worst


class Package:
    """Takes what flash-attn-4 takes (4.0.0b36, by its signatures), and computes it by the formulas in eager torch."""

    def __init__(self):
        self.calls = []

    def _flash_attn_fwd(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False,
        softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        self.calls.append("forward")
        assert return_lse
        assert softcap is None or softcap > 0
        request = self.request(
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            causal,
            softcap,
            softmax_scale,
            window_size_left,
            window_size_right,
        )
        rows = [self.rows(tensor, cu_seqlens_q) for tensor in (q, k, v)]
        out, lse = eager.forward(*rows, request)
        return out.view(q.shape), lse, None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        self.calls.append("deterministic backward" if deterministic else "backward")
        assert dq.is_contiguous()
        request = self.request(
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            causal,
            softcap,
            softmax_scale,
            window_size_left,
            window_size_right,
        )
        rows = [self.rows(tensor, cu_seqlens_q) for tensor in (dout, q, k, v, out)]
        for place, grad in zip((dq, dk, dv), eager.backward(*rows, lse, request), strict=True):
            place.copy_(grad.view(place.shape))
        return dq, dk, dv

    @staticmethod
    def rows(tensor, cu_seqlens):
        assert tensor.dim() == (4 if cu_seqlens is None else 3)
        return tensor if cu_seqlens is None else tensor.unsqueeze(0)

    @staticmethod
    def request(cu_q, cu_k, longest, causal, softcap, scale, left, right):
        assert cu_q is cu_k
        if left is not None and causal:
            assert right == 0
        if left is not None and not causal:
            assert right == left
        if cu_q is not None:
            assert cu_q.dtype == torch.int32
            assert int(cu_q.diff().max()) <= longest
        return Request(cu_q, longest or 0, causal, 0 if left is None else left + 1, softcap or 0.0, scale)


@pytest.fixture
def package(monkeypatch):
    package = Package()
    monkeypatch.setattr(fa4, "load_fa4", lambda feature: package)
    return package


def by_fa4(q, k, v, *, causal, window, documents, softcap, scale):
    cu_seqlens = None if documents is None else documents.cu_seqlens
    longest = q.shape[1] if documents is None else documents.max_seqlen
    scale = scale or q.shape[-1] ** -0.5
    operator = torch.ops.lightning_ups.attention_forward
    return operator(q, k, v, cu_seqlens, longest, causal, window or 0, softcap or 0.0, scale, "fa4")[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_package_is_asked_for_what_the_reference_says(package, case):
    tensors, options = case.tensors(), case.options()
    assert worst(gradients(by_fa4, tensors, options), expected(tensors, options)) < BAND
    assert package.calls == ["forward", "backward"]


def test_deterministic_where_torch_is_told_to_be(package):
    torch.use_deterministic_algorithms(True)
    try:
        gradients(by_fa4, Case("").tensors(), Case("").options())
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.calls == ["forward", "deterministic backward"]


def test_is_imported_from_the_package_when_it_runs(monkeypatch):
    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = Package()._flash_attn_fwd
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setattr(compat, "require", lambda name, **_: sys.modules[name])
    compat.load_fa4.cache_clear()
    q, k, v = Case("").tensors()
    try:
        assert by_fa4(q, k, v, **Case("").options()).shape == q.shape
    finally:
        compat.load_fa4.cache_clear()


HOPPER = pytest.mark.gpu(capability=(9, 0))


def needs_fa4():
    if missing := compat.missing_package("fa4"):
        pytest.skip(missing)


# Each kind of attention is compiled by the package, for seconds: other widths only for two of them.
ON_GPU = [(case, 128) for case in CASES if case.name != "cross"]
ON_GPU += [(case, dim) for case in CASES if case.name in ("odd", "documents") for dim in (64, 256)]


@HOPPER
@pytest.mark.parametrize(("case", "dim"), ON_GPU, ids=lambda value: getattr(value, "name", str(value)))
def test_on_a_gpu_it_is_the_reference(case, dim):
    needs_fa4()
    case = Case(**{**case.__dict__, "dim": dim, "seq": case.seq * 3 + 1})
    tensors, options = case.tensors(torch.bfloat16, "cuda"), case.options("cuda")
    found = gradients(attention, tensors, {**options, "backend": "fa4"})
    assert worst(found, expected(tensors, options)) < 1.5e-2


@HOPPER
def test_on_a_gpu_it_compiles_first_thing():
    needs_fa4()
    case = Case("", seq=512, dim=128, heads=(8, 2))
    tensors, options = case.tensors(torch.bfloat16, "cuda"), case.options("cuda")
    compiled = torch.compile(attention, fullgraph=True)
    found = gradients(compiled, tensors, {**options, "backend": "fa4"})
    assert worst(found, expected(tensors, options)) < 1.5e-2


@HOPPER
def test_on_a_gpu_torchs_checks_of_the_operator():
    needs_fa4()
    q, k, v = Case("", seq=256, dim=64).tensors(torch.bfloat16, "cuda")
    documents = Documents.from_ids(torch.tensor([[0] * 100 + [1] * 156] * 2)).to("cuda")
    for cu_seqlens in (None, documents.cu_seqlens):
        request = (cu_seqlens, 256, True, 0, 0.0, 0.125, "fa4")
        torch.library.opcheck(
            torch.ops.lightning_ups.attention_forward.default,
            (q, k, v, *request),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


@HOPPER
def test_on_a_gpu_the_package_has_the_arguments_we_pass():
    needs_fa4()
    interface = compat.load_fa4(feature="this test")
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        ours = inspect.signature(getattr(Package, name)).parameters
        assert set(ours) - {"self"} <= set(inspect.signature(getattr(interface, name)).parameters)

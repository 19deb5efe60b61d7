import inspect
import sys
from types import ModuleType

import pytest
import torch

from lightning_ups._compat.torch.tensors import attention as compat
from lightning_ups.kernels.attention import Documents, attention, flash_attention
from lightning_ups.kernels.attention.reference import Request, eager_backward, eager_forward
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
        assert cu_seqlens_q is cu_seqlens_k
        assert softcap is None or softcap > 0
        request = self.request(
            cu_seqlens_q, max_seqlen_q, causal, softcap, softmax_scale, window_size_left, window_size_right
        )
        rows = [self.rows(tensor, cu_seqlens_q) for tensor in (q, k, v)]
        out, lse = eager_forward(*rows, request)
        return out.view(q.shape), lse, None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        self.calls.append("deterministic backward" if deterministic else "backward")
        assert dq.is_contiguous()
        request = self.request(
            cu_seqlens_q, max_seqlen_q, causal, softcap, softmax_scale, window_size_left, window_size_right
        )
        rows = [self.rows(tensor, cu_seqlens_q) for tensor in (dout, q, k, v, out)]
        for place, grad in zip((dq, dk, dv), eager_backward(*rows, lse, request), strict=True):
            place.copy_(grad.view(place.shape))
        return dq, dk, dv

    @staticmethod
    def rows(tensor, cu_seqlens):
        assert tensor.dim() == (4 if cu_seqlens is None else 3)
        return tensor if cu_seqlens is None else tensor.unsqueeze(0)

    @staticmethod
    def request(cu_q, longest, causal, softcap, scale, left, right):
        if left is not None and causal:
            assert right == 0
        if left is not None and not causal:
            assert right == left
        if cu_q is not None:
            assert cu_q.dtype == torch.int32
            assert int(cu_q.diff().max()) <= longest
        return Request(cu_q, longest or 0, causal, 0 if left is None else left + 1, softcap or 0.0, scale)


class Operators:
    """Takes what ``torch.nn.attention._fa3`` passes to the package's operators, and computes it in eager torch."""

    def fwd(
        self, q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk,
        softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    ):  # fmt: skip
        assert (k_new, out, seqused_k, page_table, rotary_cos, q_descale, v_descale, pack_gqa) == (None,) * 8
        assert (attention_chunk, rotary_interleaved, num_splits, sm_margin) == (0, True, 0, 0)
        request = self.request(cu_seqlens_q, causal, window_size_left, window_size_right, softcap, softmax_scale)
        out, lse = eager_forward(*(self.rows(tensor, cu_seqlens_q) for tensor in (q, k, v)), request)
        return out.view(q.shape), lse, None, None

    def bwd(
        self, dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic, sm_margin,
    ):  # fmt: skip
        assert (seqused_q, deterministic, sm_margin) == (None, False, 0)
        request = self.request(cu_seqlens_q, causal, window_size_left, window_size_right, softcap, softmax_scale)
        rows = [self.rows(tensor, cu_seqlens_q) for tensor in (dout, q, k, v, out)]
        for place, grad in zip((dq, dk, dv), eager_backward(*rows, lse, request), strict=True):
            place.copy_(grad.view(place.shape))

    @staticmethod
    def rows(tensor, cu_seqlens):
        return tensor if cu_seqlens is None else tensor.unsqueeze(0)

    @staticmethod
    def request(cu_seqlens, causal, left, right, softcap, scale):
        assert right == (-1 if left < 0 else 0 if causal else left)
        return Request(cu_seqlens, 0, causal, left + 1, softcap, scale)


@pytest.fixture
def package(monkeypatch):
    package = Package()
    monkeypatch.setattr(flash_attention, "load_fa4", lambda feature: package)
    monkeypatch.setattr(flash_attention, "load_fa3", lambda feature: Operators())
    return package


def by_package(q, k, v, *, causal, window, documents, softcap, scale, kernel="fa4"):
    cu_seqlens = None if documents is None else documents.cu_seqlens
    longest = q.shape[1] if documents is None else documents.max_seqlen
    scale = scale or q.shape[-1] ** -0.5
    operator = torch.ops.lightning_ups.attention_forward
    return operator(q, k, v, cu_seqlens, longest, causal, window or 0, softcap or 0.0, scale, kernel)[0]


@pytest.mark.parametrize("kernel", ["fa3", "fa4"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_package_is_asked_for_what_the_reference_says(package, case, kernel):
    tensors, options = case.tensors(), case.options()
    found = gradients(by_package, tensors, {**options, "kernel": kernel})
    assert worst(found, expected(tensors, options)) < BAND
    assert package.calls == (["forward", "backward"] if kernel == "fa4" else [])


def test_deterministic_where_torch_is_told_to_be(package):
    torch.use_deterministic_algorithms(True)
    try:
        gradients(by_package, Case("").tensors(), Case("").options())
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
        assert by_package(q, k, v, **Case("").options()).shape == q.shape
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


def test_a_package_without_torchs_operators_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "find_spec", lambda _: object())
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_interface", object())
    with pytest.raises(ImportError, match="Rebuild it"):
        compat.load_fa3(feature="This")


@pytest.mark.gpu(capability=(9, 0))
def test_on_a_gpu_it_is_the_reference_or_says_what_is_missing():
    case = Case("", dim=64, seq=300)
    tensors, options = case.tensors(torch.bfloat16, "cuda"), case.options("cuda")
    if compat.missing_package("fa3"):
        with pytest.raises(ModuleNotFoundError, match="Build it"):
            attention(*tensors, backend="fa3")
    else:
        found = gradients(attention, tensors, {**options, "backend": "fa3"})
        assert worst(found, expected(tensors, options)) < 1.5e-2

import pytest
import torch

from lightning_ups._compat.torch.tensors import attention as compat
from lightning_ups.kernels.attention import attention
from lightning_ups.kernels.attention.backends import eager, fa3
from lightning_ups.kernels.attention.request import Request
from tests.kernels.attention.cases import BAND, CASES, Case, expected, gradients, worst


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
        out, lse = eager.forward(*(self.rows(tensor, cu_seqlens_q) for tensor in (q, k, v)), request)
        return out.view(q.shape), lse, None, None

    def bwd(
        self, dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic, sm_margin,
    ):  # fmt: skip
        assert (seqused_q, deterministic, sm_margin) == (None, False, 0)
        request = self.request(cu_seqlens_q, causal, window_size_left, window_size_right, softcap, softmax_scale)
        rows = [self.rows(tensor, cu_seqlens_q) for tensor in (dout, q, k, v, out)]
        for place, grad in zip((dq, dk, dv), eager.backward(*rows, lse, request), strict=True):
            place.copy_(grad.view(place.shape))

    @staticmethod
    def rows(tensor, cu_seqlens):
        return tensor if cu_seqlens is None else tensor.unsqueeze(0)

    @staticmethod
    def request(cu_seqlens, causal, left, right, softcap, scale):
        assert right == (-1 if left < 0 else 0 if causal else left)
        return Request(cu_seqlens, 0, causal, left + 1, softcap, scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_package_is_asked_for_what_the_reference_says(monkeypatch, case):
    monkeypatch.setattr(fa3, "load_fa3", lambda feature: Operators())

    def by_fa3(q, k, v, *, causal, window, documents, softcap, scale):
        cu_seqlens = None if documents is None else documents.cu_seqlens
        longest = q.shape[1] if documents is None else documents.max_seqlen
        request = (cu_seqlens, longest, causal, window or 0, softcap or 0.0, scale or q.shape[-1] ** -0.5)
        return torch.ops.lightning_ups.attention_forward(q, k, v, *request, "fa3")[0]

    tensors, options = case.tensors(), case.options()
    assert worst(gradients(by_fa3, tensors, options), expected(tensors, options)) < BAND


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
        with pytest.raises(ModuleNotFoundError, match="Build it with"):
            attention(*tensors, backend="fa3")
    else:
        found = gradients(attention, tensors, {**options, "backend": "fa3"})
        assert worst(found, expected(tensors, options)) < 1.5e-2

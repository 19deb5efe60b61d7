import pytest
import torch

from lightning_ups.kernels.attention import reference_attention
from lightning_ups.kernels.attention.backends import eager
from lightning_ups.kernels.attention.request import Request
from tests.kernels.attention.cases import CASES, gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_formulas_of_the_backward_pass_are_autograds(case):
    q, k, v = case.tensors(torch.float64)
    options = case.options()
    documents = options["documents"]
    request = Request(
        None if documents is None else documents.cu_seqlens,
        case.seq,
        case.causal,
        case.window or 0,
        case.softcap or 0.0,
        case.scale or case.dim**-0.5,
    )
    out, lse = eager.forward(q, k, v, request)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    found = out, *eager.backward(grad, q, k, v, out, lse, request)
    for a, b in zip(found, gradients(reference_attention, (q, k, v), options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the log-sum-exp is kept in float32
    shape = (case.batch, case.heads[0], case.seq) if documents is None else (case.heads[0], case.batch * case.seq)
    assert lse.shape == shape
    assert lse.dtype == torch.float32

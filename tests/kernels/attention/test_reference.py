import math

import pytest
import torch

from lightning_ups.kernels.attention import reference_attention
from tests.kernels.attention.cases import CASES, Case


def by_loops(q, k, v, *, causal, window, documents, softcap, scale):
    """Attention written out for each pair of positions: slow, and nothing to misread."""
    batch, seq, heads, dim = q.shape
    groups = heads // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for i in range(seq):
                scores, keys = [], []
                for j in range(k.shape[1]):
                    if causal and j > i:
                        continue
                    if window is not None and (i - j >= window or (not causal and j - i >= window)):
                        continue
                    if documents is not None and documents.ids[b, i] != documents.ids[b, j]:
                        continue
                    score = float(q[b, i, h] @ k[b, j, h // groups]) * (scale or 1 / math.sqrt(dim))
                    scores.append(softcap * math.tanh(score / softcap) if softcap else score)
                    keys.append(j)
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                out[b, i, h] = (weights[:, None] * v[b, keys, h // groups]).sum(0)
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_attention_written_out(case):
    small = Case(**{**case.__dict__, "seq": min(case.seq, 13), "keys": case.keys and 7, "dim": 4})
    tensors = small.tensors(torch.float64)
    torch.testing.assert_close(reference_attention(*tensors, **small.options()), by_loops(*tensors, **small.options()))


def test_bfloat16_is_computed_in_float32():
    tensors = Case("").tensors(torch.bfloat16)
    found = reference_attention(*tensors, causal=True)
    wanted = reference_attention(*(tensor.float() for tensor in tensors), causal=True)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted.bfloat16())


def test_autocast_does_not_make_it_coarse():
    tensors = Case("").tensors()
    wanted = reference_attention(*tensors, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reference_attention(*tensors, causal=True), wanted)

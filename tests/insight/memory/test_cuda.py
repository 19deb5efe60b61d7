import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.torch.fake_tensors import fake_mode
from lightning_ups.insight.memory.account import Ledger
from lightning_ups.insight.memory.cuda import as_on_cpu, as_on_cuda

KB = 1024


def kept(function, *shapes, dtype=torch.float32):
    """Return what ``function`` of such tensors keeps for backward, beside these, its result among it."""
    ledger = Ledger()
    with fake_mode(), ledger:
        tensors = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        ledger.claim(tensors, "batch")
        ledger.start("forward")
        with as_on_cuda():
            result = function(*tensors)
            found = ledger.now().of("activations")
            result.sum().backward()
    return found


def test_a_norm_saves_one_value_per_row():
    assert kept(lambda x, w: F.rms_norm(x, (256,), w), (64, 256), (256,)) == 64 * KB + 512
    assert kept(lambda x: F.rms_norm(x, (256,)), (64, 256), dtype=torch.bfloat16) == 32 * KB + 512


def test_a_norm_module_too_and_in_recomputation():
    norm = nn.RMSNorm(256)
    with fake_mode(), as_on_cuda():
        from torch.utils.checkpoint import checkpoint

        x = torch.empty(4, 256, requires_grad=True)
        weight = torch.empty(256, requires_grad=True)
        norm.weight = nn.Parameter(weight)
        checkpoint(norm, x, use_reentrant=False).sum().backward()  # raises if the second run kept something else
    assert x.grad.shape == (4, 256)


def test_a_norm_of_mixed_dtypes_is_decomposed():
    fused = kept(lambda x, w: F.rms_norm(x, (256,), w), (64, 256), (256,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: there is no fused kernel for these
        apart = kept(lambda x, w: F.rms_norm(x, (256,), w.bfloat16()), (64, 256), (256,))
    assert apart > 1.5 * fused


def test_dropout_keeps_bytes():
    assert kept(lambda x: F.dropout(x, 0.5), (64, 256)) == (64 + 16) * KB
    assert kept(lambda x: F.dropout(x, 0.5, training=False) * 1.0, (64, 256)) == 64 * KB
    assert kept(lambda x: nn.Dropout(0.1)(x), (64, 256)) == (64 + 16) * KB


def test_attention_keeps_no_scores():
    shape = (1, 4, 512, 32)  # 256 KB; scores would be 4 MB
    for options in ({}, {"dropout_p": 0.5}, {"is_causal": True}):
        found = kept(lambda q, k, v, options=options: F.scaled_dot_product_attention(q, k, v, **options), *[shape] * 3)
        assert 256 * KB < found < 300 * KB


def test_attention_of_torch_keeps_no_scores_either():
    layer = nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True)

    def attend(x):
        with torch.device("cpu"):
            for name, p in [*layer.named_parameters(recurse=False)]:
                layer.register_parameter(name, nn.Parameter(torch.empty(p.shape)))
            layer.out_proj.weight = nn.Parameter(torch.empty(32, 32))
            layer.out_proj.bias = nn.Parameter(torch.empty(32))
        return layer(x, x, x, need_weights=False)[0]

    assert kept(attend, (1, 2048, 32)) < 4 * 2048 * 2048  # one head's scores are twice that


def test_losses_are_float32_under_autocast():
    with fake_mode(), as_on_cuda(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.empty(8, 4, dtype=torch.bfloat16)
        assert F.cross_entropy(logits, torch.zeros(8, dtype=torch.long)).dtype is torch.float32
        assert logits.softmax(-1).dtype is torch.float32
        assert torch.empty(2, 2).matmul(torch.empty(2, 2)).dtype is torch.bfloat16
    with fake_mode(), as_on_cuda():
        assert logits.softmax(-1).dtype is torch.bfloat16


def test_the_functions_of_torch_are_put_back():
    before = F.rms_norm, F.dropout, torch.softmax, torch.Tensor.softmax, F.scaled_dot_product_attention
    with as_on_cuda():
        assert F.rms_norm is not before[0]
        with as_on_cpu():
            assert F.rms_norm is before[0]
            assert torch.Tensor.softmax is before[3]
        assert F.rms_norm is not before[0]
    with pytest.raises(ZeroDivisionError), as_on_cuda():
        raise ZeroDivisionError
    assert (F.rms_norm, F.dropout, torch.softmax, torch.Tensor.softmax, F.scaled_dot_product_attention) == before
    with as_on_cpu():
        assert F.rms_norm is before[0]

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from lightning_ups.kernels.attention import Documents, attention, reference_attention
from lightning_ups.kernels.attention import flex as flex_module
from lightning_ups.kernels.attention.flex import block_mask

IDS = torch.tensor([[0] * 5 + [1] * 290 + [2] * 133, [3] * 256 + [4] * 128 + [5] * 44])


def listed(counts, indices):
    rows = zip(counts.flatten().tolist(), indices.flatten(0, 2).tolist(), strict=True)
    return [sorted(row[:count]) for count, row in rows]


@pytest.mark.parametrize("ids", [None, IDS], ids=["rows", "documents"])
@pytest.mark.parametrize("window", [None, 1, 128, 129, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [384, 428])
def test_equals_the_mask_made_from_every_pair(seq, causal, window, ids):
    ids = None if ids is None else ids[:, :seq]
    ours = block_mask(seq, causal=causal, window=window, ids_BS=ids, device=torch.device("cpu"))
    batch = None if ids is None else 2
    wanted = create_block_mask(ours.mask_mod, batch, None, seq, seq, device="cpu")
    assert ours.shape[-2:] == wanted.shape[-2:] == (seq, seq)
    partial, full = (listed(ours.kv_num_blocks, ours.kv_indices), listed(ours.full_kv_num_blocks, ours.full_kv_indices))
    assert partial == listed(wanted.kv_num_blocks, wanted.kv_indices)
    assert full == listed(wanted.full_kv_num_blocks, wanted.full_kv_indices)
    transposed = listed(ours.q_num_blocks, ours.q_indices), listed(ours.full_q_num_blocks, ours.full_q_indices)
    assert transposed == (
        listed(wanted.q_num_blocks, wanted.q_indices),
        listed(wanted.full_q_num_blocks, wanted.full_q_indices),
    )


def test_costs_little_at_long_sequences():
    seq = 1 << 15  # create_block_mask would evaluate a thousand million pairs
    ids = Documents.from_ids(torch.arange(seq).unsqueeze(0) // 1000).ids
    mask = block_mask(seq, causal=True, window=None, ids_BS=ids, device=torch.device("cpu"))
    assert mask.sparsity() > 95


def test_leaves_that_require_gradients_are_taken_where_none_are_made():
    q, k, v = (torch.randn(1, 20, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with torch.no_grad():
        out = attention(q, k, v, window=7, backend="flex")
        torch.testing.assert_close(out, reference_attention(q, k, v, causal=True, window=7))


@pytest.fixture
def compiles_here(monkeypatch):
    """Let FlexAttention be compiled as on a GPU."""
    monkeypatch.setattr(flex_module, "_compiled_on", lambda _: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    flex_module._compiled.cache_clear()
    yield
    flex_module._compiled.cache_clear()


@torch.no_grad()
def test_kinds_of_attention_do_not_use_up_each_others_compilations(compiles_here):
    """Dynamo compiles one piece of code eight times, and then no more."""
    for heads, dim in ((2, 8), (1, 8), (2, 16), (1, 16)):
        for options in ({}, {"window": 7}, {"softcap": 2.0}):
            q, k, v = (torch.randn(1, 20, number, dim) for number in (2, heads, heads))
            wanted = reference_attention(q, k, v, causal=True, **options)
            torch.testing.assert_close(attention(q, k, v, **options, backend="flex"), wanted)


@torch.no_grad()
def test_lengths_of_one_kind_share_compilations(compiles_here):
    from torch._dynamo.utils import counters  # noqa: TID251

    counters.clear()
    for batch, seq in ((1, 20), (2, 24), (3, 150), (4, 300), (2, 90), (5, 31)):
        q, k, v = (torch.randn(batch, seq, 2, 8) for _ in range(3))
        torch.testing.assert_close(attention(q, k, v, backend="flex"), reference_attention(q, k, v, causal=True))
    assert counters["stats"]["unique_graphs"] <= 4

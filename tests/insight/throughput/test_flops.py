import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.torch.fake_tensors import run_backward
from lightning_ups.insight.throughput.flops import count_flops, step_flops
from lightning_ups.models.gpt import GPT, SIZES, GPTConfig

BATCH, SEQ, HEADS, DIM = 2, 64, 4, 16
FULL = 4 * BATCH * HEADS * SEQ * SEQ * DIM


def module_flops(module, *args):
    return step_flops(module, args, step=lambda copied, batch: copied(*batch).sum()).model


def inputs(device="cpu", kv_heads=2):
    grad = torch.is_grad_enabled()
    q = torch.randn(BATCH, HEADS, SEQ, DIM, device=device, requires_grad=grad)
    k = torch.randn(BATCH, kv_heads, SEQ, DIM, device=device, requires_grad=grad)
    return q, k, k


def sdpa(causal, device="cpu"):
    return F.scaled_dot_product_attention(*inputs(device), is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 0.5)])
def test_attention_of_torch_is_counted(device, causal, share):
    assert count_flops(lambda: sdpa(causal, device)).total == share * FULL
    assert count_flops(lambda: sdpa(causal, device).sum().backward()).total == 3 * share * FULL


def test_attention_on_fake_tensors_is_counted():
    with FakeTensorMode():
        assert count_flops(lambda: sdpa(causal=True).sum().backward()).total == 1.5 * FULL
        # With gradients a CPU build of torch aborts at any product of fake tensors on a GPU.
        with torch.no_grad():
            assert count_flops(lambda: sdpa(causal=True, device="cuda")).total == FULL / 2


@pytest.mark.parametrize("window", [None, 16])
def test_attention_of_ours_is_counted(window):
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs())

    def call():
        torch.ops.lightning_ups.attention_forward(q, k, v, None, SEQ, True, window or 0, 0.0, 1.0, "eager")[
            0
        ].sum().backward()

    pairs = SEQ * SEQ / 2 if window is None else SEQ * window - window * window / 2
    assert count_flops(call).total == 3 * 4 * BATCH * HEADS * DIM * pairs


def test_the_reference_models_formula_is_what_is_counted():
    config = GPTConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=64)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    found = module_flops(GPT(config), tokens, tokens)
    assert found == 2 * 64 * config.flops_per_token(64)
    model = GPT(config)
    assert count_flops(lambda: model(tokens, tokens).backward()).total == found
    with torch.no_grad():
        assert count_flops(lambda: model(tokens, tokens)).total * 3 == found


def test_eight_thousand_million_weights_are_counted_without_memory():
    with torch.device("meta"):
        model = GPT(SIZES["8B"])
        tokens = torch.zeros(1, 8192, dtype=torch.int64)
    assert module_flops(model, tokens, tokens) == 8192 * SIZES["8B"].flops_per_token(8192)


def test_frozen_weights_cost_no_gradient():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].requires_grad_(False)
    assert module_flops(model, torch.zeros(1, 8)) == 2 * 8 * 8 * 4  # two forward, one input and one weight


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_convolutions_by_groups_are_counted(groups):
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, padding=1, groups=groups))
    first, second = 2 * 2 * 8 * 256 * 3, 2 * 2 * 16 * 256 * (8 // groups) * 9
    counted = module_flops(net, torch.randn(2, 3, 16, 16))
    assert counted == 2 * first + 3 * second  # no gradient of the input is needed


def test_transposed_convolutions_are_counted():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2))
    assert module_flops(net, torch.randn(2, 3, 16, 16)) == 2 * 24576 + 3 * (2 * 2 * 256 * (8 * 2 * 4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_the_attention_of_torchs_module_is_counted(causal, weights):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            x = x.requires_grad_()
            mask = nn.Transformer.generate_square_subsequent_mask(10, device=x.device) if causal else None
            return self.inner(x, x, x, need_weights=weights, attn_mask=mask, is_causal=causal)[0]

    projections, attention = 4 * (2 * 2 * 10 * 32 * 32), 2 * 2 * (2 * 100 * 32)
    if causal and not weights:  # with weights torch makes the whole square
        attention //= 2
    found = module_flops(Attention(), torch.randn(2, 10, 32))
    assert found == 3 * (projections + attention)


def test_attention_without_a_dimension_for_heads_is_counted():
    def attend():
        q = torch.randn(4, 10, 16, device="meta", requires_grad=True)
        run_backward(nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum())

    assert count_flops(attend).total == 3 * 2 * (4 * 50 * 2 * 16)

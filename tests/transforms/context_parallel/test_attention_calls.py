import sys

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.functional import scaled_dot_product_attention as held

from lightning_ups.transforms.context_parallel.attention_calls import (
    attention_by_heads,
    replaced,
    torch_attention_by_heads,
)


def test_a_function_is_replaced_wherever_it_is_held():
    module, before = sys.modules[__name__], F.scaled_dot_product_attention

    def other():
        pass

    with replaced(before, other):
        assert F.scaled_dot_product_attention is module.held is other
    assert F.scaled_dot_product_attention is held is before


def test_a_whole_sequence_is_left_to_the_function():
    q = torch.randn(1, 2, 4, 8)
    own = torch_attention_by_heads(held, None, lambda *_, seq: False)
    assert torch.equal(own(q, q, q, is_causal=True), held(q, q, q, is_causal=True))
    assert attention_by_heads(lambda q, k, v, causal: causal, None, lambda *_, seq: False)(q, q, q, causal=3) == 3


@pytest.mark.parametrize(("shape", "mask"), [((1, 2, 4, 8), torch.ones(4, 4)), ((2, 4, 8), None)])
def test_a_mask_of_a_part_is_refused(shape, mask):
    own, q = torch_attention_by_heads(held, None, lambda *_, seq: True), torch.zeros(shape)
    with pytest.raises(ValueError, match="attn_mask"):
        own(q, q, q, mask)

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.transforms.context_parallel import ContextParallel
from tests.strategies.cases import two_ranks


def gpt():
    torch.manual_seed(0)
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 16}
    return GPT(GPTConfig(**shape, vocab_size=16, max_seq_len=8)).double()


@two_ranks
def test_rows_of_any_length_are_evaluated_and_all_is_undone():
    model = nn.ModuleDict({"model": gpt()})
    tokens = torch.arange(16).view(2, 8)
    right, short = model["model"](tokens), model["model"](tokens[:, :5])
    before = torch.nn.functional.scaled_dot_product_attention
    with ExitStack() as undo:
        ContextParallel(model, group=dist.group.WORLD, module=None, undo=undo)
        torch.testing.assert_close(model["model"](tokens), right)
        with torch.no_grad():  # as in generation
            assert torch.equal(model["model"](tokens[:, :5]), short)
        with pytest.raises(ValueError, match=r"5 positions .*multiple of 2"):
            model["model"](tokens[:, :5])
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert torch.equal(model["model"](tokens), right)


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(1)


@two_ranks
def test_what_is_no_sequence_is_refused():
    with ExitStack() as undo:
        model = nn.ModuleDict({"pooled": Pooled()})
        ContextParallel(model, group=dist.group.WORLD, module="pooled", undo=undo)
        with pytest.raises(ValueError, match=r"shape \(3, 5\)"):
            model["pooled"](torch.zeros(3, 4, 5))
        with pytest.raises(ValueError, match="without a tensor"):
            model["pooled"](torch.zeros(3))

"""FLOPs of a step are counted without touching anything of the run."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_ups.insight.throughput import step_flops
from lightning_ups.models.gpt import GPT, SIZES
from lightning_ups.transforms.recompute.wrapping import recompute

TINY = SIZES["tiny"]
GPT_STEP = TINY.flops_per_token(64) * 2 * 64


def next_token(model, batch):
    return model(batch[:, :-1].long(), batch[:, 1:].long())


def tokens(seq=65):
    return torch.randint(0, 256, (2, seq), dtype=torch.uint8)


class Experts(nn.Module):
    """Sends each row to one of four matrices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 16, dtype=torch.bfloat16))

    def forward(self, x):
        ends = torch.arange(1, 5, dtype=torch.int32) * x.shape[0] // 4
        return torch._grouped_mm(x.bfloat16(), self.weight, offs=ends).sum()


def test_rows_of_several_experts_cost_what_each_meets():
    found = step_flops(Experts(), torch.randn(32, 8), step=lambda model, batch: model(batch))
    assert found.model == 2 * 2 * 32 * 8 * 16, "forward, and the gradient of the weights"


def test_a_loss_may_come_in_a_mapping_or_have_been_differentiated():
    layer, x = nn.Linear(8, 4), torch.randn(2, 8)
    costs = {
        step_flops(layer, x, step=lambda copied, x: {"loss": copied(x).sum()}).model,
        step_flops(layer, x, step=lambda copied, x: copied(x).sum().backward()).model,
    }
    assert costs == {2 * 2 * 8 * 4 * 2}


def test_recomputed_flops_do_not_count_for_the_model():
    model = GPT(TINY)
    plain = step_flops(model, tokens(), step=next_token)
    blocks = [*model.layers] if hasattr(model, "layers") else [*model.blocks]
    with recompute(blocks, save="nothing"):
        found = step_flops(model, tokens(), step=next_token)
    assert found.model == plain.model
    head = 2 * 128 * TINY.dim * TINY.vocab_size
    last = 2 * 128 * TINY.dim * TINY.ffn_dim * TINY.num_layers  # nothing needs a block's last product again
    assert found.hardware - found.model == plain.model // 3 - head - last


def test_checkpointing_by_the_users_own_hand_is_seen():
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(4, 8)
    found = step_flops(layers, x, step=lambda copied, x: checkpoint(copied, x, use_reentrant=False).sum())
    assert found.model == step_flops(layers, x, step=lambda copied, x: copied(x).sum()).model
    assert found.hardware - found.model == 2 * 2 * 4 * 8 * 8


def test_a_compiled_module_is_counted_and_not_compiled():
    graphs = []
    layer = nn.Linear(8, 4)
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert step_flops(compiled, torch.randn(2, 8), step=lambda copied, x: copied(x).sum()).model == 2 * 2 * 8 * 4 * 2
    assert graphs == []


def test_layers_in_fp8_are_counted_apart():
    class Float8Linear(nn.Linear):  # as torchao names its own
        def forward(self, x):
            raise RuntimeError("needs a GPU")

    model = nn.Sequential(nn.Linear(8, 16), Float8Linear(16, 16), nn.Linear(16, 4))
    found = step_flops(model, torch.randn(2, 8), step=lambda copied, x: copied(x).sum())
    assert found.low_precision == 3 * 2 * 2 * 16 * 16
    assert found.model == 2 * 2 * (8 * 16 * 2 + 16 * 16 * 3 + 16 * 4 * 3)


def test_metrics_are_left_alone():
    from torchmetrics.classification import MulticlassAccuracy

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.accuracy = nn.Linear(8, 4), MulticlassAccuracy(4)

        def forward(self, x):
            out = self.layer(x)
            self.accuracy(out, torch.zeros(len(x), dtype=torch.long))
            self.accuracy.update(out, torch.zeros(len(x), dtype=torch.long))
            return out.sum()

    module = Module()
    assert step_flops(module, torch.randn(2, 8), step=lambda copied, x: copied(x)).model == 2 * 2 * 8 * 4 * 2
    assert not module.accuracy.update_called


def test_a_hugging_face_model_is_counted():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 128, (2, 32))
    found = step_flops(
        model, {"input_ids": ids, "labels": ids}, step=lambda copied, batch: {"loss": copied(**batch).loss}
    )
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) + 64 * 128
    attention = 2 * 6 * 64 * 32  # layers x 6 x dim x seq, causal
    assert found.model == pytest.approx(2 * 32 * (6 * weights + attention), rel=0.03)
    # Whether attention is causal it finds out from masks and positions, which decide without the cache too.
    model.config.use_cache = False
    for mask in ({}, {"attention_mask": torch.ones_like(ids)}):
        again = step_flops(
            model, {"input_ids": ids, "labels": ids, **mask}, step=lambda copied, batch: copied(**batch).loss
        )
        assert again == found


def test_lengths_decide_how_much_is_computed():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, lengths):
            mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            assert mask.sum(1).tolist() == [3, 5]
            return self.layer(x[:, : int(lengths.max())]).sum()

    batch = (torch.randn(2, 9, 8), torch.tensor([3, 5]))
    found = step_flops(Cut(), batch, step=lambda copied, batch: copied(*batch))
    assert found.model == 2 * 2 * 2 * 5 * 8 * 8  # forward, and the gradient of the weight


def sharded_step():
    model = GPT(TINY)
    plain = step_flops(model, tokens(), step=next_token)
    for layer in model.layers if hasattr(model, "layers") else model.blocks:
        fully_shard(layer)
    fully_shard(model)
    found = step_flops(model, tokens(), step=next_token)
    assert found == plain
    model(*(part.long() for part in (tokens()[:, :-1], tokens()[:, 1:]))).backward()  # it works as before
    return found.model


def test_a_sharded_model_costs_what_the_whole_one_does(ranks):
    assert ranks(sharded_step) == pytest.approx(GPT_STEP, rel=0.01)

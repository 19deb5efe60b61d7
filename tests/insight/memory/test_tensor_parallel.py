import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fake_tensors import fake_mode
from lightning_ups.insight.dry_run import FakeCopies
from lightning_ups.insight.memory.tensor_parallel import cut_for_one_device
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.transforms.tensor_parallel import parallelize, plan_of, styles_of

TOKENS = (2, 8)


def gpt():
    options = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 32, "vocab_size": 32, "max_seq_len": 8}
    return GPT(GPTConfig(dim=16, qk_norm=True, tie=True, **options))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, use_cache=False, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Loose(nn.Module):
    """What the plans have no use for."""

    def __init__(self):
        super().__init__()
        self.embed, self.columns = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.up, self.down, self.gathered = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        self.columns(tokens)
        return self.gathered(self.down(self.up(self.embed(tokens))))


MODELS = {
    "gpt": (gpt, "gpt"),
    "llama": (llama, "llama"),
    "loose": (
        Loose,
        {
            "embed": "embedding",
            "columns": "colwise",
            "up": "colwise",
            "down": "rowwise",
            "gathered": "colwise_gathered",
        },
    ),
}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shapes(model, tokens):
    """Return the shapes of all parameters, and of what all modules return that return a tensor, on this device."""
    outputs = {}

    def note(name):
        def hook(_, __, output):
            if isinstance(output, torch.Tensor):
                outputs[name] = tuple(local(output).shape)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    model(tokens)
    return {name: tuple(local(p).shape) for name, p in model.named_parameters()}, outputs


def really_split(name):
    make, plan = MODELS[name]
    torch.manual_seed(0)
    model = make()
    parallelize(model, plan=plan_of(model, plan), mesh=init_device_mesh("cpu", (2,)))
    return shapes(model, torch.zeros(TOKENS, dtype=torch.long))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_real_tensor_parallelism(ranks, name):
    make, plan = MODELS[name]
    mode = fake_mode()
    model = FakeCopies(mode=mode).copy(make())
    cut_for_one_device(model, styles=styles_of(model, plan=plan_of(model, plan), size=2), size=2)
    with mode:
        parameters, outputs = shapes(model, torch.zeros(TOKENS, dtype=torch.long))
    real_parameters, real_outputs = ranks(really_split, name)
    assert parameters == real_parameters
    assert outputs == real_outputs
    assert len(outputs) > 4


def test_ties_stay_and_gradients_have_the_size_of_the_part():
    mode = fake_mode()
    model = FakeCopies(mode=mode).copy(gpt())
    cut_for_one_device(model, styles=styles_of(model, plan=plan_of(model, "gpt"), size=4 // 2), size=2)
    assert model.head.weight is model.embedding.weight
    with mode:
        tokens = torch.zeros(TOKENS, dtype=torch.long)
        model(tokens, tokens).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())

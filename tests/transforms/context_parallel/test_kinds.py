import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralModel

from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.transforms.context_parallel.kinds import Kind, OurGPT, Transformers, find, positions_argument

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
TOKENS = torch.zeros(2, 8, dtype=torch.long)


def holder(model):
    return nn.ModuleDict({"a": nn.ModuleDict({"b": model})})


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, **options))


def test_the_module_that_is_split_is_found():
    gpt = GPT(GPTConfig(dim=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=8, vocab_size=8, max_seq_len=4))
    name, module, kind = find(holder(gpt), None)
    assert (name, module is gpt, type(kind)) == ("a.b", True, OurGPT)
    name, module, kind = find(holder(model := llama()), None)
    assert (name, module is model.model, type(kind)) == ("a.b.model", True, Transformers)
    assert positions_argument(module) == "position_ids"
    assert type(find(holder(nn.Linear(1, 1)), "a.b")[2]) is Kind
    with pytest.raises(ValueError, match="max_seq_len=4"):
        OurGPT().adapt("a.b", gpt, {}, 8)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: llama(attn_implementation="eager"), "attn_implementation is 'eager'"),
        (lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "frequencies"),
        (lambda: BloomModel(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=8)), r"Bloom.*"),
        (lambda: nn.Linear(1, 1), "context_parallel_module"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model, words):
    with pytest.raises(ValueError, match=words):
        find(holder(model()), None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"position_ids": TOKENS}, "position_ids"),
        ({"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "padding_side"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, "padding_side"),
    ],
)
def test_arguments_that_only_whole_rows_fit_are_refused(given, words):
    trunk = llama().model
    with pytest.raises(ValueError, match=words):
        Transformers().adapt("model", trunk, given, 8)


def test_a_window_is_refused_where_rows_are_longer():
    trunk = MistralModel(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=4))
    assert Transformers().adapt("model", trunk, {}, 4)
    assert Transformers().adapt("model", trunk, {"kwargs": {"documents": object()}, "position_ids": TOKENS}, 8)
    with pytest.raises(ValueError, match="a window of 4 tokens"):
        Transformers().adapt("model", trunk, {}, 8)


def test_generation_computes_whole_rows():
    assert not Transformers().adapt("model", llama().model, {"past_key_values": object()}, 1)

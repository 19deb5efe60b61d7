import pytest
import torch

from lightning_ups.insight.advise.linear_shapes import Layer, Product, layers_in_step
from lightning_ups.insight.advise.te_products import (
    engine_layers,
    modules_of,
    read_first,
)
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.transforms.te.convert import convert_to_te
from tests import fake_te

SHAPE = GPTConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, vocab_size=32, max_seq_len=16)


@pytest.fixture
def plan():
    with fake_te.installed():
        model = GPT(SHAPE)
        conversion = convert_to_te(model)
        conversion.undo()
        yield model, conversion


def called(model, conversion, *, seq):
    model.training_step = lambda batch: model(batch)
    return layers_in_step(model, read_first(conversion).values(), torch.zeros(2, seq, dtype=torch.long))


def test_fused_layers_are_one_product(plan):
    layers, others = engine_layers(plan[1], called(*plan, seq=16))
    assert not others
    assert {layer.name: layer.calls for layer in layers if layer.name.startswith("layers.0")} == {
        "layers.0.attention.qkv": {Product(32, 32, 64, norm="RMSNorm"): 1},
        "layers.0.attention.out": {Product(32, 32, 32): 1},
        "layers.0.ffn": {Product(32, 32, 64, norm="RMSNorm", activation="swiglu"): 1},
    }


def test_each_names_all_modules_that_it_computes(plan):
    names = modules_of(plan[1])
    assert set(names["layers.0.ffn"]) == {
        "layers.0.ffn",
        "layers.0.ffn_norm",
        "layers.0.ffn.gate",
        "layers.0.ffn.up",
        "layers.0.ffn.down",
    }
    assert read_first(plan[1])["layers.0.ffn"] == "layers.0.ffn.gate"


def test_modules_that_do_not_run_have_a_reason(plan):
    some = [layer for layer in called(*plan, seq=7) if not layer.name.startswith("layers.1")]
    layers, others = engine_layers(plan[1], some)
    assert not layers
    assert others["layers.0.ffn"] == "gets 14 rows, which is no multiple of 8"
    assert others["layers.1.ffn"] == "does not run in a training step"


def test_layers_with_the_same_input_are_one_product():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32,
    )  # fmt: skip
    with fake_te.installed():
        conversion = convert_to_te(transformers.LlamaForCausalLM(config))
        conversion.undo()
        first = read_first(conversion)
        layers, _ = engine_layers(conversion, [Layer(name, {Product(64, 32, 32): 2}) for name in first.values()])
    (joined,) = [layer for layer in layers if layer.name == "model.layers.0.self_attn.q_proj"]
    assert joined.calls == {Product(64, 32, 64, norm="RMSNorm", split=(32, 16, 16)): 2}

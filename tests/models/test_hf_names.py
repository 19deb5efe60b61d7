from dataclasses import replace

import pytest
import torch

from lightning_ups.models.gpt import GPT, SIZES
from lightning_ups.models.hf_names import from_hf, hf_config, to_hf

transformers = pytest.importorskip("transformers")

CONFIG = replace(SIZES["tiny"], dim=64, num_layers=2, ffn_dim=96, vocab_size=70, max_seq_len=32, rope_theta=5e5)
SHAPES = [CONFIG, replace(CONFIG, tie=True), replace(CONFIG, num_kv_heads=4), replace(CONFIG, qk_norm=True)]
IDS = ["grouped", "tied", "multi-head", "qk-norm"]


def theirs(config):
    kind = transformers.AutoConfig.for_model(**hf_config(config))
    return transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="sdpa").eval()


def ours(config):
    torch.manual_seed(0)
    model = GPT(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm in the wrong place
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("config", SHAPES, ids=IDS)
def test_equal_logits_and_gradients(config):
    model, other = ours(config), theirs(config)
    left = other.load_state_dict(to_hf(model.state_dict(), config), strict=False)
    assert left.missing_keys == (["lm_head.weight"] if config.tie else [])
    assert left.unexpected_keys == []
    tokens = torch.randint(70, (2, 32), generator=torch.Generator().manual_seed(0))
    mine, logits = model(tokens), other(tokens, use_cache=False).logits
    torch.testing.assert_close(mine, logits, atol=2e-6, rtol=0)
    mine.square().mean().backward()
    logits.square().mean().backward()
    torch.testing.assert_close(model.embedding.weight.grad, other.model.embed_tokens.weight.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("config", SHAPES, ids=IDS)
def test_a_model_of_theirs_loads(config):
    other = theirs(config)
    model = GPT(config)
    model.load_state_dict(from_hf(other.state_dict(), config))
    tokens = torch.randint(70, (2, 32), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), other(tokens, use_cache=False).logits, atol=2e-6, rtol=0)


def test_the_wrong_weights_are_refused():
    state = ours(CONFIG).state_dict()
    with pytest.raises(ValueError, match=r"lacks \['layers.0.ffn.up.weight'\].*the config that it was built with\.$"):
        to_hf({name: value for name, value in state.items() if name != "layers.0.ffn.up.weight"}, CONFIG)
    with pytest.raises(ValueError, match=r"'model.layers.2.*the config that it was built with\.$"):
        from_hf(to_hf(state, CONFIG), replace(CONFIG, num_layers=3))

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from lightning_ups.transforms.kv_cache import without_kv_cache


@dataclass
class TextConfig:
    use_cache: bool = True


@dataclass
class Config:
    text_config: TextConfig = field(default_factory=TextConfig)
    vision_config: TextConfig = field(default_factory=lambda: TextConfig(use_cache=False))
    use_cache: bool = True


class Tower(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


def towers():
    model = nn.Module()
    model.a = Tower(Config())
    model.a.inner = Tower(model.a.config)  # shared, as by the modules of one model
    model.b = nn.ModuleDict({"c": Tower(Config(use_cache=False))})
    model.d = Tower({"use_cache": True})  # not a config that a model would read an attribute of
    return model


def test_every_config_is_off_inside_and_as_before_outside():
    model = towers()
    before = copy.deepcopy([model.a.config, model.b["c"].config])
    with without_kv_cache(model) as names:
        assert names == ["a.config.use_cache", "a.config.text_config.use_cache", "b.c.config.text_config.use_cache"]
        for config in (model.a.config, model.b["c"].config):
            assert (config.use_cache, config.text_config.use_cache, config.vision_config.use_cache) == (False,) * 3
    assert [model.a.config, model.b["c"].config] == before


def test_nested_and_after_an_error():
    model = towers()

    def fail(names):
        assert names == []
        raise KeyError

    with pytest.raises(KeyError), without_kv_cache(model), without_kv_cache(model) as names:
        fail(names)
    assert model.a.config.use_cache


def test_llama_keeps_no_cache_inside_and_generates_the_same():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.tensor([[1, 2, 3]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert model(ids).past_key_values is not None
    with without_kv_cache(model) as names:
        assert names == ["config.use_cache"]
        assert model(ids).past_key_values is None
        twin = copy.deepcopy(model)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert model(ids).past_key_values is not None
    assert torch.equal(twin.generate(ids, max_new_tokens=4, do_sample=False), expected)

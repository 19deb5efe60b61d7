import pytest
import transformers
from torch import nn

from lightning_ups.models.gpt import GPT, SIZES
from lightning_ups.transforms.te.fusions import READY, Fusion, fusions_in

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


def named(module, *asked, ready=False):
    return [(fusion.norm, *fusion.parts) for fusion in fusions_in(module, asked, ready=ready)]


def test_our_gpt_is_known():
    found = named(GPT(SIZES["tiny"]), ready=True)
    assert len(found) == 8
    assert found[0] == ("layers.0.attention_norm", "layers.0.attention.qkv")
    assert found[1] == ("layers.0.ffn_norm", "layers.0.ffn", *(f"layers.0.ffn.{n}" for n in ("gate", "up", "down")))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
def test_models_of_transformers_are_known(name):
    config = getattr(transformers, f"{name}Config")(**SMALL)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    found = named(model, ready=True)
    assert len(found) == 4
    assert found[0][0] == "model.layers.0.input_layernorm"
    assert found[1][1] == "model.layers.0.mlp"
    kinds = {f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()}
    assert kinds & READY.keys()


def test_another_activation_is_not_fused():
    config = transformers.LlamaConfig(**SMALL, hidden_act="gelu")
    assert [f[1] for f in named(transformers.LlamaForCausalLM(config), ready=True)] == [
        f"model.layers.{i}.self_attn.q_proj" for i in range(2)
    ]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)


def test_a_class_of_the_same_name_elsewhere_is_unknown():
    assert named(nn.ModuleList([Block()]), ready=True) == []


def test_patterns_are_filled_with_what_stars_stand_for():
    model = nn.ModuleDict({side: nn.ModuleList([Block(), Block()]) for side in ("left", "right")})
    assert named(model, Fusion(norm="*.*.norm", linears=["*.*.up"])) == [
        (f"{side}.{i}.norm", f"{side}.{i}.up") for side in ("left", "right") for i in (0, 1)
    ]


@pytest.mark.parametrize(
    ("fusion", "text"),
    [
        (Fusion(norm="*.nrm", linears=["*.up"]), r"'\*\.nrm' matches no submodule"),
        (Fusion(norm="*.norm", linears=["*.upp"]), r"'0\.upp' matches no submodule"),
        (Fusion(norm="*.norm", linears=["0.up"]), r"different numbers of '\*'.*the same stars"),
    ],
)
def test_patterns_that_do_not_fit(fusion, text):
    with pytest.raises(ValueError, match=text):
        named(nn.ModuleList([Block()]), fusion)


@pytest.mark.parametrize(
    "options",
    [{}, {"linears": ["a"], "mlp": "b"}, {"mlp": "b"}, {"mlp": "b", "first": ["c"]}, {"mlp": "b", "second": "c"}],
)
def test_half_a_fusion_is_refused(options):
    with pytest.raises(ValueError, match=r"is incomplete.*Give linears=\[...\]"):
        Fusion(norm="n", **options)


def test_a_string_of_patterns_is_refused():
    with pytest.raises(TypeError, match=r"Write \['up'\]"):
        Fusion(norm="n", linears="up")


def test_what_joins_weights():
    assert not Fusion(norm="n", linears=["a"]).joins
    assert Fusion(norm="n", linears=["a", "b"]).joins
    assert Fusion(norm="n", mlp="m", first=["a", "b"], second="c").joins

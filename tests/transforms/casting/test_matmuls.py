"""Which parameters autocast would cast in every forward."""

import pytest
import torch
from torch import nn

from lightning_ups.transforms.casting.matmuls import matmul_weights, name_other_layers
from tests.half_lstm import skip_without


def found(model):
    return {f"{owner}.{name}".lstrip(".") for owner, name in matmul_weights(model)}


def names(model):
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (lambda: nn.Linear(4, 3), (2, 4)),
        (lambda: nn.Conv1d(4, 3, 2), (2, 4, 5)),
        (lambda: nn.Conv2d(4, 3, 2), (2, 4, 5, 5)),
        (lambda: nn.Conv3d(4, 3, 2), (2, 4, 5, 5, 5)),
        (lambda: nn.ConvTranspose1d(4, 3, 2), (2, 4, 5)),
        (lambda: nn.ConvTranspose2d(4, 3, 2), (2, 4, 5, 5)),
        (lambda: nn.RNN(4, 3, 2, bidirectional=True), (5, 2, 4)),
        (lambda: nn.GRU(4, 3, 2), (5, 2, 4)),
        (lambda: nn.LSTM(4, 3, 2, batch_first=True), (2, 5, 4)),
        (lambda: nn.RNNCell(4, 3), (2, 4)),
        (lambda: nn.GRUCell(4, 3), (2, 4)),
        (lambda: nn.LSTMCell(4, 3), (2, 4)),
    ],
)
def test_every_parameter_of_a_product_is_found_and_computes_alike_in_bfloat16(module, inputs):
    torch.manual_seed(0)
    stock = module()
    if isinstance(stock, nn.LSTM):
        skip_without()
    torch.manual_seed(0)
    low = module()
    assert found(low) == names(low)
    low.to(torch.bfloat16)
    x, outputs, gradients = torch.randn(inputs), [], []
    for each in (stock, low):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            out = each(x)
        while isinstance(out, tuple):
            out = out[0]
        outputs.append(out)
        out.float().square().sum().backward()
        gradients.append({name: p.grad.float() for name, p in each.named_parameters()})
    assert torch.equal(*outputs)
    # On a CPU autocast casts the weights of these in each time step, and adds their gradients up in float32.
    tolerance = 1e-2 if isinstance(low, nn.RNN | nn.GRU) else 0.0
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=tolerance, atol=tolerance)


def test_other_kinds_of_modules_are_left_out():
    model = nn.ModuleList(
        [
            nn.Embedding(4, 4),
            nn.EmbeddingBag(4, 4),
            nn.LayerNorm(4),
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4),
            nn.RMSNorm(4),
            nn.PReLU(),
            nn.Bilinear(4, 4, 3),  # autocast computes it in float32
        ]
    )
    assert names(model)
    assert found(model) == set()


def test_attention_multiplies_with_all_but_the_rows_that_it_appends():
    one = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    assert found(one) == names(one) - {"bias_k", "bias_v"}
    several = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
    assert found(several) == names(several)


def test_a_subclass_counts_unless_it_has_a_forward_of_its_own():
    class Renamed(nn.Linear):
        pass

    class Standardised(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)

    model = nn.ModuleDict({"renamed": Renamed(2, 2), "standardised": Standardised(2, 2)})
    assert found(model) == {"renamed.weight", "renamed.bias"}


def test_what_is_computed_from_other_parameters_is_left_out():
    model = nn.ModuleDict(
        {
            "new": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "old": nn.utils.spectral_norm(nn.Linear(2, 2)),
        }
    )
    assert found(model) == {"old.bias", "new.bias"}


def test_a_weight_that_an_embedding_shares_is_left_out_and_one_that_products_share_is_not():
    model = nn.ModuleDict({"table": nn.Embedding(4, 2), "head": nn.Linear(2, 4), "a": nn.Linear(2, 2)})
    model["head"].weight, model["b"] = model["table"].weight, nn.Linear(2, 2, bias=False)
    model["b"].weight = model["a"].weight
    assert found(model) == {"head.bias", "a.weight", "a.bias", "b.weight"}


def test_only_float32_counts_since_autocast_casts_neither_float64_nor_integers():
    model = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)])
    assert found(model) == {"2.weight", "2.bias"}


def tiny(kind, **settings):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    wide = {"intermediate_size": 32}
    config, model, sizes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", sizes | wide),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}),
        "t5": (
            "T5Config",
            "T5ForConditionalGeneration",
            {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        ),
        "bert": ("BertConfig", "BertForMaskedLM", sizes | wide),
        "mixtral": (
            "MixtralConfig",
            "MixtralForCausalLM",
            sizes | wide | {"num_key_value_heads": 2, "num_local_experts": 2, "tie_word_embeddings": False},
        ),
    }[kind]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes, **settings))


@pytest.mark.parametrize(("kind", "settings", "tied", "norms_and_tables"), [
    ("llama", {"tie_word_embeddings": True}, "lm_head.weight", ("norm", "embed")),
    ("llama", {"tie_word_embeddings": False}, None, ("norm", "embed")),
    ("gpt2", {}, "lm_head.weight", ("ln_", "wte", "wpe")),
    ("t5", {"tie_word_embeddings": True}, "lm_head.weight", ("layer_norm", "shared", "relative_attention_bias")),
    ("bert", {"tie_word_embeddings": True}, "cls.predictions.decoder.weight", ("LayerNorm", "embeddings")),
])  # fmt: skip
def test_models_of_transformers(kind, settings, tied, norms_and_tables):
    model = tiny(kind, **settings)
    left_out = {name for name in names(model) if any(part in name for part in norms_and_tables)}
    weights = found(model)
    if tied is not None:
        assert tied not in weights
    else:
        assert "lm_head.weight" in weights
    assert weights <= names(model)
    assert names(model) - weights == left_out | (names(model) & {"cls.predictions.bias"})


def test_experts_count_where_they_are_multiplied_one_by_one():
    eager, grouped = (tiny("mixtral", experts_implementation=how) for how in ("eager", "grouped_mm"))
    routed = "model.layers.0.mlp.experts"
    assert found(eager) - found(grouped) == {f"{routed}.gate_up_proj", f"{routed}.down_proj"}


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 32))


def test_other_layers_are_named_by_how_much_they_hold():
    layers = (nn.LSTMCell(2, 2), Transposed(), Transposed(), nn.Bilinear(2, 2, 2), nn.RNNCell(4, 4), nn.GRUCell(1, 1))
    assert name_other_layers(nn.Sequential(*layers)) == (
        " Layers that are no nn.Linear are not converted:"
        f" {__name__}.Transposed (2 of them, 1,024 weights), torch.nn.modules.rnn.LSTMCell (1 of them, 32 weights),"
        " torch.nn.modules.rnn.RNNCell (1 of them, 32 weights)."
    )
    layers = (nn.Linear(4, 4), nn.Embedding(4, 4), nn.EmbeddingBag(4, 4), nn.Conv1d(4, 4, 1), nn.LayerNorm(4))
    assert name_other_layers(nn.Sequential(*layers, nn.LazyLinear(4), nn.LazyConv1d(4, 1))) == ""

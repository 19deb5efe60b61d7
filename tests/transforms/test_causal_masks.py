"""Compiled models of transformers leave out the masks that they leave out uncompiled."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.torch.tensors.attention import scaled_dot_product_attention
from lightning_ups.transforms.causal_masks import causal_masks_left_out

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo
transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=1)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SMALL, intermediate_size=32, num_key_value_heads=1, head_dim=16)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=32)),
}
TOKENS = torch.arange(16).reshape(2, 8) % 64
CALLS = F.scaled_dot_product_attention, scaled_dot_product_attention
PACKED = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]).expand(2, 8)


def compiled(model, **inputs):
    """Return the logits of the compiled model, and whether each of its calls of attention has a mask.

    It is called twice, and compiled once.
    """
    torch.compiler.reset()
    masked = []

    def backend(graph, _):
        calls = [node for node in graph.graph.nodes if node.target in CALLS]
        masked.extend(call.kwargs["attn_mask"] is not None for call in calls)
        return graph.forward

    with causal_masks_left_out(model):
        run = torch.compile(model, backend=backend)
        run(input_ids=TOKENS, **inputs)
        calls = len(masked)
        logits = run(input_ids=TOKENS, **inputs).logits
    assert len(masked) == calls, "it was compiled again"
    return logits, masked


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("own", [True, False], ids=["own positions", "packed"])
def test_a_mask_is_passed_only_where_it_matters(name, own):
    if name == "bert" and not own:
        pytest.skip("an encoder has no packed rows")
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    inputs = {} if own else {"position_ids": PACKED}
    expected = model(input_ids=TOKENS, **inputs).logits
    logits, masked = compiled(model, **inputs)
    assert masked == [not own] * 2
    torch.testing.assert_close(logits, expected)


def test_padding_is_masked():
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    logits, masked = compiled(model, attention_mask=mask)
    assert masked == [True, True]
    torch.testing.assert_close(logits[:, 3:], model(input_ids=TOKENS, attention_mask=mask).logits[:, 3:])


def test_a_model_within_one_that_makes_its_positions_may_have_packed_rows():
    torch.manual_seed(0)

    class Outer(type(MODELS["llama"]())):
        def forward(self, input_ids, position_ids=None):
            if position_ids is None:
                position_ids = torch.arange(8).unsqueeze(0)
            return super().forward(
                input_ids=input_ids, position_ids=position_ids.where(position_ids < 5, position_ids - 5)
            )

    model = Outer(MODELS["llama"]().config).eval()
    logits, masked = compiled(model)
    assert masked == [True, True]
    torch.testing.assert_close(logits, model(input_ids=TOKENS).logits)


def test_positions_that_a_users_model_makes_may_start_again():
    torch.manual_seed(0)

    class Packed(transformers.LlamaModel):
        def forward(self, input_ids, position_ids=None):
            if position_ids is None:
                position_ids = torch.arange(8).unsqueeze(0)
            position_ids = position_ids % 5
            return self.layers_of(input_ids, position_ids)

        def layers_of(self, input_ids, position_ids):
            hidden = self.embed_tokens(input_ids)
            mask = masking_utils.create_causal_mask(self.config, hidden, None, None, position_ids=position_ids)
            embeddings = self.rotary_emb(hidden, position_ids)
            for layer in self.layers:
                hidden = layer(hidden, attention_mask=mask, position_ids=position_ids, position_embeddings=embeddings)
            return transformers.modeling_outputs.CausalLMOutput(logits=hidden)

    model = Packed(MODELS["llama"]().config).eval()
    logits, masked = compiled(model)
    assert masked == [True, True]
    torch.testing.assert_close(logits, model(input_ids=TOKENS).logits)


def test_forwards_and_functions_are_restored():
    model, masks = MODELS["llama"](), __import__("transformers.masking_utils").masking_utils
    before = masks.find_packed_sequence_indices
    with causal_masks_left_out(model):
        assert masks.find_packed_sequence_indices is not before
        assert "forward" in vars(model.model)
    assert masks.find_packed_sequence_indices is before
    assert "forward" not in vars(model.model)


def test_other_modules_are_left_alone():
    module = torch.nn.Linear(2, 2)
    with causal_masks_left_out(module):
        assert "forward" not in vars(module)

"""Models of transformers are compiled in one graph, without a change of what they compute."""

import functools
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_ups._compat.optional.transformers import ready_for_one_graph

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo
transformers = pytest.importorskip("transformers")


def experts():
    """A mixture of experts that returns its router logits, which it collects by hooks."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        use_cache=False,
    )
    tokens = torch.randint(64, (2, 8))
    return transformers.Qwen3MoeForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def speech():
    config = transformers.HubertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=0.0,
        num_labels=4,
    )
    values = torch.randn(2, 800)
    return transformers.HubertForSequenceClassification(config), {
        "input_values": values,
        "labels": torch.tensor([0, 3]),
    }


def decoder_without_a_named_loss():
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    tokens = torch.randint(64, (2, 8))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def gradients(model, inputs):
    model.zero_grad()
    torch.manual_seed(1)  # for dropout
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [experts, speech, decoder_without_a_named_loss])
def test_one_graph_with_the_same_loss_and_gradients(make):
    torch.manual_seed(0)
    torch.compiler.reset()
    model, inputs = make()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    expected = gradients(model.train(), inputs)
    plain = torch.compile(make()[0].train(), backend=count)
    plain(**inputs)
    assert len(graphs) > 1, "transformers needs no help any more"
    graphs.clear()
    torch.compiler.reset()
    model.compile(backend=count)
    with ready_for_one_graph(model):
        found = gradients(model, inputs)
    assert len(graphs) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_layers_outside_of_what_collects_outputs_stay_in_one_graph():
    """The decoder of this model has layers of a kind that its encoder collects outputs of."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    decoder = {f"decoder_{name}": size for name, size in sizes.items()}
    config = transformers.ViTMAEConfig(**sizes, **decoder, image_size=16, patch_size=8)
    model, graphs = transformers.ViTMAEForPreTraining(config), []
    torch.compiler.reset()

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    model.compile(backend=count)
    with ready_for_one_graph(model):
        loss = model(torch.randn(2, 3, 16, 16)).loss
        hidden = model(torch.randn(2, 3, 16, 16), output_hidden_states=True).hidden_states
    assert loss.requires_grad
    assert len(hidden) == 3
    assert len(graphs) == 2, "one for each of the calls"


def test_a_loss_of_the_user_stays():
    def weighted(logits, labels, vocab_size, **kwargs):
        return logits.float().square().mean()

    class Own(transformers.GPT2LMHeadModel):
        def _loss_function(self, *args, **kwargs):
            return weighted(*args, **kwargs)

    class Function(nn.Module):
        forward = staticmethod(weighted)

    given, inputs = decoder_without_a_named_loss()
    by_class, by_module = Own(given.config), given
    by_module.loss_function = Function()
    for model in (by_class, by_module):
        expected = model.eval()(**inputs).loss
        with ready_for_one_graph(model):
            assert model(**inputs).loss == expected
        assert model(**inputs).loss == expected


def test_a_forward_may_be_any_callable():
    model, inputs = decoder_without_a_named_loss()

    class Wrapped(type(model)):
        forward = functools.partialmethod(type(model).forward)

    model.__class__ = Wrapped
    with ready_for_one_graph(model):
        assert model(**inputs).loss.requires_grad


def test_a_model_is_left_as_it_was():
    model, inputs = experts()
    with ready_for_one_graph(model):
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    pickle.dumps(model)
    assert len(model(**inputs).router_logits) == 2, "it installs its hooks again"
    model, _ = speech()
    with ready_for_one_graph(model):
        assert model.hubert.feature_extractor._requires_grad is False
    assert model.hubert.feature_extractor._requires_grad is True
    model, _ = decoder_without_a_named_loss()
    with ready_for_one_graph(model):
        assert model.loss_function is transformers.loss.loss_utils.LOSS_MAPPING["ForCausalLM"]
    assert "_loss_function" not in vars(model)


def test_a_model_of_others_does_not_import_the_models_of_transformers():
    pytest.importorskip("transformers.utils.output_capturing")
    code = (
        "import sys, transformers.utils.output_capturing; from torch import nn;"
        "from lightning_ups._compat.optional import transformers as ours;"
        "before = 'transformers.modeling_utils' in sys.modules;"
        "ours.ready_for_one_graph(nn.Linear(1, 1)).__enter__();"
        "assert not before; assert 'transformers.modeling_utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

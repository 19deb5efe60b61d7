import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from lightning_ups.models import HFCausalLM
from lightning_ups.models.hf import attention as hf_attention
from tests.hf_models import MORE, config, packed

pytest.importorskip("transformers", minversion="5")
REFUSED = ("bloom", "gptj", "mamba")


def built(kind, **options):
    torch.manual_seed(0)
    module = HFCausalLM(config=config(kind), **options)
    module.configure_model()
    return module.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in MORE if kind not in REFUSED and kind != "mixtral"])
def test_the_loss_of_packed_documents_is_that_of_each_alone(kind):
    module, (batch, documents) = built(kind), packed((5, 1, 6), (12,))
    alone = [
        F.cross_entropy(module(tokens[None])[0].float(), targets, reduction="sum") for tokens, targets in documents
    ]
    torch.testing.assert_close(module.loss(batch), sum(alone) / 24, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_mix_documents_is_refused(kind):
    with pytest.raises(ValueError, match="would mix the documents"):
        built(kind).loss(packed((3, 2))[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_documents_are_found_by_transformers_too(kind):
    ours, theirs, (batch, _) = built(kind), built(kind, options={"attn_implementation": "sdpa"}), packed((5, 1, 6))
    assert ours.model.config._attn_implementation == hf_attention.NAME
    assert theirs.model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(ours.loss(batch), theirs.loss(batch))


def test_flash_attention_of_transformers_is_refused_for_several_packed_rows():
    made, (several, _), (one, _) = built("llama"), packed((5, 1), (6,)), packed((5, 1))
    made.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2 would mix the documents"):
        made._inputs(several)
    assert {*made._inputs(one)[0]} == {"input_ids", "position_ids"}


def test_the_gradient_is_that_of_transformers_attention():
    ours, theirs, (batch, _) = built("llama"), built("llama", options={"attn_implementation": "sdpa"}), packed((5, 7))
    for module in (ours, theirs):
        module.loss(batch).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-4)


def test_dropout_of_attention_keeps_documents_apart():
    module, (batch, _) = HFCausalLM(config=config(attention_dropout=0.5)), packed((4, 8))
    module.configure_model()
    torch.manual_seed(1)
    first = module.model.train()(**module._inputs(batch)[0]).logits[0, 4:]
    batch.tokens[:, :4] = 0
    torch.manual_seed(1)
    assert torch.equal(first, module.model(**module._inputs(batch)[0]).logits[0, 4:])


def test_documents_that_a_model_loses_are_noticed():
    heads, (batch, _) = torch.zeros(1, 1, 5, 4), packed((3, 2))
    with pytest.raises(ValueError, match="does not pass on the documents"):
        hf_attention.attend(None, torch.nn.Module(), heads, heads, heads, batch.documents.ids[:, None, None])

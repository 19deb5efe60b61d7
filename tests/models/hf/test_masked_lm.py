import pytest
import torch

from lightning_ups.models import HFMaskedLM
from tests.hf_models import BERT, packed
from tests.models.hf.test_causal_lm import data
from tests.toys import trainer

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and transformers, about small models


def module(**options):
    torch.manual_seed(0)
    return HFMaskedLM(config=BERT, mask_token=63, lr=1e-2, **options)


def built(**options):
    made = module(**options)
    made.configure_model()
    return made.eval()


def test_the_chosen_share_is_masked_replaced_or_kept():
    made, tokens = built(mask_fraction=0.5), torch.randint(60, (100, 100))
    mask = torch.ones_like(tokens)
    mask[:, 50:] = 0
    found = made._inputs({"input_ids": tokens, "attention_mask": mask})
    chosen = found["labels"] != -100
    assert not chosen[:, 50:].any()
    assert torch.equal(found["labels"][chosen], tokens[chosen])
    assert torch.equal(found["input_ids"][~chosen], tokens[~chosen])
    assert float(chosen[:, :50].float().mean()) == pytest.approx(0.5, abs=0.02)
    assert float((found["input_ids"] == 63)[chosen].float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((found["input_ids"] == tokens)[chosen].float().mean()) == pytest.approx(0.1, abs=0.03)


def test_given_labels_are_kept_and_validation_repeats():
    made, tokens = built(), torch.randint(60, (4, 50))
    batch = {"input_ids": tokens, "labels": tokens}
    assert made._inputs(batch).keys() == batch.keys()
    torch.testing.assert_close(made.loss(batch), made.model(**batch).loss)
    without = {"input_ids": tokens}
    assert torch.equal(made.measure(without)["loss"][0], made.measure(without)["loss"][0])
    assert not torch.equal(made.loss(without), made.loss(without))


def test_a_packed_row_is_its_documents_one_by_one():
    made = built()
    batch, documents = packed((5, 3, 4))
    inputs = made._inputs(batch) | {"input_ids": batch.tokens}
    inputs.pop("labels")
    with torch.no_grad():
        rows = made.model(**inputs).logits[0]
        alone = torch.cat([made.model(input_ids=tokens[None]).logits[0] for tokens, _ in documents])
    torch.testing.assert_close(rows, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": ["query", "value"]}])
def test_it_trains_on_packed_tokens(tmp_path, lora):
    made, tokens = module(lora=lora, mask_fraction=0.3), data(tmp_path)
    before = trainer(tmp_path).validate(made, tokens, verbose=False)[0]["val_loss"]
    run = trainer(tmp_path, max_steps=20, val_check_interval=20, check_val_every_n_epoch=None)
    run.fit(made, tokens)
    assert float(run.callback_metrics["val_loss"]) < before
    assert float(run.callback_metrics["val_perplexity"]) > 1


def test_without_a_mask_token_it_is_refused():
    with pytest.raises(ValueError, match="the number of the mask token"):
        HFMaskedLM(config=BERT)

import pytest
import torch

from lightning_ups.models import HFImageClassifier, HFSequenceClassifier
from tests.data.test_labeled_text import data
from tests.hf_models import BERT, VIT
from tests.toys import trainer

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and transformers, about small models


def separable(path, **options):
    """Texts whose first word says the label."""
    records = [{"text": f"w{1 + i % 2} w{3 + i % 50}", "label": i % 2} for i in range(120)]
    return data(path, records, batch_size=8, **options)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_texts_are_classified(tmp_path, lora):
    torch.manual_seed(0)
    module = HFSequenceClassifier(config=BERT, lora=lora, lr=2e-2, warmup_steps=2)
    run = trainer(tmp_path, epochs=6)
    run.fit(module, separable(tmp_path))
    assert float(run.callback_metrics["val_accuracy"]) > 0.9
    assert float(run.callback_metrics["val_loss"]) < 0.4
    assert float(run.test(module, run.val_dataloaders, verbose=False)[0]["test_accuracy"]) > 0.9


def test_metrics_are_means_over_samples(tmp_path):
    module, texts = HFSequenceClassifier(config=BERT), separable(tmp_path)
    values = trainer(tmp_path).validate(module, texts, verbose=False)[0]
    module.eval()
    with torch.no_grad():
        outputs = [(module.model(**batch), batch["labels"]) for batch in texts.val_dataloader()]
    logits, labels = torch.cat([o.logits for o, _ in outputs]), torch.cat([y for _, y in outputs])
    assert values["val_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert values["val_accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))


def test_a_text_of_several_classes():
    module = HFSequenceClassifier(config=BERT, num_labels=3)
    module.configure_model()
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.tensor([[0.0, 1, 1], [1, 0, 0]])}
    logits = module.model(input_ids=batch["input_ids"]).logits
    found = module.eval().measure(batch)
    assert found["loss"][1] == 2
    with torch.no_grad():
        logits = module.model(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
    torch.testing.assert_close(found["loss"][0].detach(), expected)
    assert float(found["accuracy"][0]) == float(((logits > 0) == batch["labels"].bool()).float().mean())


def test_more_labels_than_the_head_has_are_refused(tmp_path):
    texts = data(tmp_path, [{"text": "w1", "label": i % 3} for i in range(40)], val_fraction=0)
    with pytest.raises(ValueError, match="Set num_labels=3"):
        trainer(tmp_path, max_steps=1).fit(HFSequenceClassifier(config=BERT), texts)


@pytest.mark.parametrize("from_folder", [False, True])
def test_images_are_classified(tmp_path, from_folder):
    torch.manual_seed(0)
    source = {"config": VIT}
    if from_folder:  # with a head for other labels
        from transformers import AutoConfig, AutoModelForImageClassification

        model = AutoModelForImageClassification.from_config(AutoConfig.for_model(**VIT, num_labels=7))
        model.save_pretrained(tmp_path / "vit")
        source = {"pretrained": str(tmp_path / "vit")}
    module = HFImageClassifier(**source, num_labels=2, lr=2e-2, warmup_steps=2)
    labels = torch.arange(32) % 2
    images = torch.randn(32, 3, 8, 8) * 0.1 + labels.view(-1, 1, 1, 1)
    samples = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    loader = torch.utils.data.DataLoader(samples, batch_size=8)
    run = trainer(tmp_path, epochs=8)
    run.fit(module, loader, loader)
    assert float(run.callback_metrics["val_accuracy"]) > 0.9

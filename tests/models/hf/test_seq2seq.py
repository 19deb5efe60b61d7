import math

import pytest
import torch

from lightning_ups.models import HFSeq2Seq
from tests.hf_models import T5
from tests.toys import trainer

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and transformers, about small models


def batches():
    tokens = torch.randint(2, 60, (16, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.flip(1)
    labels[:, 4:] = -100
    samples = [
        {"input_ids": a, "attention_mask": torch.ones_like(a), "labels": b} for a, b in zip(tokens, labels, strict=True)
    ]
    return torch.utils.data.DataLoader(samples, batch_size=8)


@pytest.mark.parametrize("lora", [None, {"r": 8}])
def test_the_loss_falls_and_is_that_of_the_model(tmp_path, lora):
    torch.manual_seed(0)
    module = HFSeq2Seq(config=T5, lora=lora, lr=2e-2, warmup_steps=2)
    before = trainer(tmp_path).validate(module, batches(), verbose=False)[0]
    module.eval()
    with torch.no_grad():
        losses = [float(module.model(**batch).loss) for batch in batches()]
    assert before["val_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert before["val_perplexity"] == pytest.approx(math.exp(before["val_loss"]), rel=1e-4)
    run = trainer(tmp_path, epochs=10)
    run.fit(module, batches(), batches())
    assert float(run.callback_metrics["val_loss"]) < before["val_loss"] - 0.3

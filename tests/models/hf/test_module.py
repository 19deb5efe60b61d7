import pytest
import torch

from lightning_ups.models import HFCausalLM, HFImageClassifier, HFMaskedLM, HFSeq2Seq, HFSequenceClassifier
from lightning_ups.models.hf.module import MeanOverAll
from tests.hf_models import BERT

pytest.importorskip("transformers", minversion="5")
ALL = [HFCausalLM, HFImageClassifier, HFMaskedLM, HFSeq2Seq, HFSequenceClassifier]


@pytest.mark.parametrize("kind", ALL)
def test_wrong_arguments_name_the_class(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(pretrained=None, config=None\)"):
        kind()
    with pytest.raises(ValueError, match="dtype='half'"):
        kind(pretrained="a", dtype="half")
    with pytest.raises(TypeError):
        kind(pretrained="a", learning_rate=1)


@pytest.mark.parametrize("kind", ALL)
def test_arguments_are_in_the_checkpoint_and_in_help(kind):
    from jsonargparse import ArgumentParser

    made = kind(pretrained="a", lr=1e-5)
    assert made.hparams["pretrained"] == "a"
    assert made.hparams["lr"] == 1e-5
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "model")
    parsed = parser.parse_args(["--model.pretrained=a", "--model.lora={r: 8}", "--model.schedule=wsd"])
    assert parsed.model.lora == {"r": 8}
    assert "The peak learning rate" in parser.format_help()


def test_a_checkpoint_restores_the_class(tmp_path):
    made = HFSequenceClassifier(config=BERT, num_labels=4)
    made.configure_model()
    checkpoint = {"state_dict": made.state_dict(), "hyper_parameters": dict(made.hparams)}
    torch.save({**checkpoint, "pytorch-lightning_version": "2.6.6"}, tmp_path / "a.ckpt")
    again = HFSequenceClassifier.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.num_labels == 4
    assert torch.equal(again.model.classifier.weight, made.model.classifier.weight)


def test_a_mean_over_all_leaves_out_batches_of_none():
    mean = MeanOverAll()
    mean.update(torch.tensor(2.0), torch.tensor(3))
    mean.update(torch.tensor(float("nan")), torch.tensor(0))
    mean.update(torch.tensor(4.0), torch.tensor(1))
    assert float(mean.compute()) == 2.5

import pytest

from tests.examples.commands import said_by

FEW = ("--trainer.max_epochs=2", "--data.data.init_args.count=64", "--trainer.logger=false")


@pytest.mark.slow
def test_the_example_computes_latents_once(tmp_path):
    first, second = (said_by("examples/latents.yaml", *FEW, folder=tmp_path) for _ in range(2))
    assert "train: 0 of 64 samples are in runs/latents/cache/train-" in first
    assert "train: 64 of 64 samples are in runs/latents/cache/train-" in second

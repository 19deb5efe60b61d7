import pytest

from tests.examples.commands import said_by

FEW = ("--trainer.max_epochs=2", "--data.data.init_args.count=64", "--trainer.logger=false")


@pytest.mark.slow
def test_the_example_computes_latents_once(tmp_path):
    for _ in range(2):
        said_by("examples/latents.yaml", *FEW, folder=tmp_path)
        (index,) = tmp_path.glob("runs/latents/cache/train-*/*.index")
        assert index.stat().st_size == 64 * 16  # a record for each picture

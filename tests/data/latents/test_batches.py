import json

import pytest
import torch
from torch.utils.data import default_collate

from lightning_ups.data.latents.batches import WithLatents, flatten, unflatten
from lightning_ups.data.latents.store import Latents, LatentsWriter


@pytest.mark.parametrize("tree", [torch.ones(2), [torch.ones(2), {"a": (torch.zeros(1),), "b": []}], (torch.ones(1),)])
def test_a_structure_goes_through_json(tree):
    structure, tensors = flatten(tree)
    assert repr(unflatten(json.loads(json.dumps(structure)), tensors)) == repr(tree)


@pytest.mark.parametrize("tree", ["text", (torch.ones(1), 3), {1: torch.ones(1)}])
def test_other_things_than_tensors_are_refused(tree):
    with pytest.raises(TypeError, match="cannot store"):
        flatten(tree)


@pytest.mark.parametrize("at_once", [False, True])
def test_samples_with_latents_are_not_read(tmp_path, at_once):
    read = []

    class Squares:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            read.append(index)
            return torch.tensor(index**2)

    if at_once:
        Squares.__getitems__ = lambda self, indices: [self[index] for index in indices]
    writer = LatentsWriter(tmp_path)
    writer.append([1, 3], 0, [torch.tensor([[10.0], [30.0]])])
    data = WithLatents("train", Squares(), collate=default_collate, latents=Latents(tmp_path, 5))
    batch = data.__getitems__([4, 3, 1, 0])
    assert batch.found[0].tolist() == [[30.0], [10.0]]
    missing = batch.missing
    assert (missing.samples, missing.places, missing.size, missing.batch.tolist()) == ([4, 0], [0, 3], 4, [16, 0])
    assert read == [4, 0]
    assert data[3].missing is None
    assert (len(data), read) == (5, [4, 0])
    writer.close()

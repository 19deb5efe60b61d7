import pytest
import torch
from torch.nn.functional import linear

from lightning_ups.transforms.explained import explaining_reads


def test_two_types_are_explained_under_a_precision():
    said = r"training_step computes with tensors of two types.*Cast it there"
    with pytest.raises(RuntimeError, match=said), explaining_reads("training_step", param_dtype=torch.bfloat16):
        linear(torch.ones(1, 2), torch.ones(2, 2, dtype=torch.bfloat16))


def test_without_one_they_are_the_users_own():
    with pytest.raises(RuntimeError, match="dtype") as error, explaining_reads("training_step", param_dtype=None):
        linear(torch.ones(1, 2), torch.ones(2, 2, dtype=torch.bfloat16))
    assert "training_step" not in str(error.value)


def test_a_late_read_is_told_how_to_be_named():
    with pytest.raises(RuntimeError, match=r"outside=\['encoder"), explaining_reads("test_step", param_dtype=None):
        raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert")


@pytest.mark.parametrize("error", [RuntimeError("stop here"), RuntimeError(""), ValueError("same dtype")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as seen, explaining_reads("training_step", param_dtype=torch.bfloat16):
        raise error
    assert seen.value is error

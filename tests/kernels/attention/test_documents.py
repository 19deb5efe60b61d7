import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision

from lightning_ups.kernels.attention import Documents


def test_ids_and_boundaries_say_the_same():
    ids = torch.tensor([[7, 7, 7, 2, 2], [2, 5, 5, 5, 7]])
    a = Documents.from_ids(ids)
    b = Documents.from_cu_seqlens(torch.tensor([0, 3, 5, 6, 9, 10]), batch=2, seq=5)
    for documents in (a, b):
        assert documents.cu_seqlens.tolist() == [0, 3, 5, 6, 9, 10]
        assert documents.ids.tolist() == [[0, 0, 0, 1, 1], [2, 3, 3, 3, 4]]
        assert documents.ids.dtype == documents.cu_seqlens.dtype == torch.int32


def test_a_number_that_comes_back_is_another_document():
    assert Documents.from_ids(torch.tensor([[1, 1, 2, 1]])).ids.tolist() == [[0, 0, 1, 2]]


@pytest.mark.parametrize(("longest", "bound"), [(1, 1), (2, 2), (3, 4), (5, 8), (17, 32), (60, 64), (90, 100)])
def test_the_bound_is_a_power_of_two_within_the_row(longest, bound):
    ids = torch.cat((torch.zeros(longest), torch.arange(1, 101 - longest))).unsqueeze(0)
    assert Documents.from_ids(ids).max_seqlen == bound


def test_moves_as_a_tensor_does():
    documents = Documents.from_ids(torch.zeros(1, 4)).to("meta", non_blocking=True)
    assert documents.ids.device.type == documents.cu_seqlens.device.type == "meta"
    assert documents.max_seqlen == 4


@pytest.mark.parametrize("precision", [HalfPrecision("bf16-true"), DoublePrecision()], ids=lambda p: p.precision)
def test_precisions_that_convert_batches_leave_it_as_it_is(precision):
    batch = {"x": torch.ones(2), "documents": Documents.from_ids(torch.tensor([[0, 0, 300, 301]]))}
    found = precision.convert_input(batch)
    assert found["x"].dtype != torch.float32
    assert found["documents"].ids.tolist() == [[0, 0, 1, 2]]
    assert found["documents"].cu_seqlens.dtype == torch.int32


def test_rows_of_no_tokens_have_no_documents():
    for documents in (
        Documents.from_ids(torch.zeros(2, 0)),
        Documents.from_cu_seqlens(torch.tensor([0]), batch=2, seq=0),
    ):
        assert documents.cu_seqlens.tolist() == [0]
        assert documents.ids.shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_boundaries_of_any_whole_type_are_the_same(dtype):
    documents = Documents.from_cu_seqlens(torch.tensor([0, 1, 4, 6, 8], dtype=dtype), batch=2, seq=4)
    assert documents.ids.tolist() == [[0, 1, 1, 1], [2, 2, 3, 3]]


def test_what_is_no_tensor_of_whole_numbers_is_refused():
    with pytest.raises(TypeError, match=r"cu_seqlens that are a list.*torch\.tensor\(cu_seqlens\)"):
        Documents.from_cu_seqlens([0, 5, 10], batch=2, seq=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tensor of float32.*cu_seqlens\.long\(\)"):
        Documents.from_cu_seqlens(torch.tensor([0.0, 5.0]), batch=1, seq=5)
    with pytest.raises(TypeError, match="ids that are a list"):
        Documents.from_ids([[0, 0, 1]])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0,), (1, 3)])
def test_boundaries_are_one_row(shape):
    with pytest.raises(ValueError, match="Lay those of single rows end to end"):
        Documents.from_cu_seqlens(torch.zeros(shape, dtype=torch.int64), batch=1, seq=5)


@pytest.mark.parametrize("boundaries", [[0, 3, 7, 10], [0, 5], [1, 5, 10], [0, 5, 11], [0, 4, 2, 5, 10]])
def test_boundaries_that_cut_no_rows_are_refused(boundaries):
    with pytest.raises(ValueError, match="cut documents at the end of a row"):
        Documents.from_cu_seqlens(torch.tensor(boundaries), batch=2, seq=5)


def test_ids_of_one_sequence_are_refused():
    with pytest.raises(ValueError, match="unsqueeze"):
        Documents.from_ids(torch.zeros(4))

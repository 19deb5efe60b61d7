import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision

from lightning_ups.kernels.attention.masks import Documents, dense_mask


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


@pytest.mark.parametrize(
    "boundaries", [[0, 3, 7, 10], [0, 5], [1, 5, 10], [0, 5, 11], [0, 4, 2, 5, 10], [], [[0, 5, 10]]]
)
def test_boundaries_that_cut_no_rows_are_refused(boundaries):
    with pytest.raises(ValueError, match="cu_seqlens of shape"):
        Documents.from_cu_seqlens(torch.tensor(boundaries), batch=2, seq=5)


def test_ids_of_one_sequence_are_refused():
    with pytest.raises(ValueError, match="unsqueeze"):
        Documents.from_ids(torch.zeros(4))


def test_no_mask_where_all_is_seen():
    assert dense_mask(4, 4, causal=False, window=None, ids_BS=None, device=torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("causal", "window", "ids", "wanted"),
    [
        (True, None, None, ["x...", "xx..", "xxx.", "xxxx"]),
        (True, 2, None, ["x...", "xx..", ".xx.", "..xx"]),
        (False, 2, None, ["xx..", "xxx.", ".xxx", "..xx"]),
        (False, None, [0, 0, 1, 1], ["xx..", "xx..", "..xx", "..xx"]),
        (True, 2, [0, 1, 1, 1], ["x...", ".x..", ".xx.", "..xx"]),
    ],
)
def test_what_is_seen(causal, window, ids, wanted):
    rows = None if ids is None else torch.tensor([ids])
    mask = dense_mask(4, 4, causal=causal, window=window, ids_BS=rows, device=torch.device("cpu"))
    assert ["".join("x" if seen else "." for seen in row) for row in mask[0, 0].tolist()] == wanted

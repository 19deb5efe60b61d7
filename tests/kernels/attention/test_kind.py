import torch

from lightning_ups.kernels.attention.kind import kind_of


def test_a_kind_has_no_lengths():
    def kind(batch, seq):
        q, k = torch.zeros(batch, seq, 4, 16), torch.zeros(batch, seq, 2, 16)
        return kind_of(q, k, k, causal=True)

    assert kind(1, 5) == kind(3, 9)


def test_gradients_are_wanted_where_one_requires_them_and_they_are_on():
    q, k = torch.zeros(1, 5, 4, 16), torch.zeros(1, 5, 4, 16, requires_grad=True)
    assert kind_of(q, k, q, causal=True).trains
    assert not kind_of(q, q, q, causal=True).trains
    with torch.no_grad():
        assert not kind_of(q, k, q, causal=True).trains


def test_masks_and_lengths():
    q, k = torch.zeros(1, 5, 4, 16), torch.zeros(1, 6, 4, 16)
    kind = kind_of(q, k, k, causal=False, mask=torch.zeros(5, 6, requires_grad=True))
    assert (kind.square, kind.mask, kind.mask_trains) == (False, True, True)

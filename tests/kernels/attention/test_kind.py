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


def test_it_is_constant_where_sizes_are_symbolic():
    kinds = []

    @torch.compiler.assume_constant_result
    def keep(kind):
        kinds.append(kind)
        return 1

    def function(q):
        return q * keep(tuple(kind_of(q, q, q, causal=True, softcap=q.shape[1] > 3, dropout=q.shape[1] > 3)))

    torch.compile(function, backend="eager", fullgraph=True, dynamic=True)(torch.zeros(2, 5, 4, 16))
    assert kinds == [tuple(kind_of(*[torch.zeros(2, 5, 4, 16)] * 3, causal=True, softcap=True, dropout=True))]

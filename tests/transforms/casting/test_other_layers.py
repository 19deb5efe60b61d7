import torch
from torch import nn

from lightning_ups.transforms.casting.other_layers import name_other_layers


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 32))


def test_classes_are_named_by_how_much_they_hold():
    layers = (nn.LSTMCell(2, 2), Transposed(), Transposed(), nn.Bilinear(2, 2, 2), nn.RNNCell(4, 4), nn.GRUCell(1, 1))
    assert name_other_layers(nn.Sequential(*layers)) == (
        " Layers that are no nn.Linear are not converted:"
        f" {__name__}.Transposed (2 of them, 1,024 weights), torch.nn.modules.rnn.LSTMCell (1 of them, 32 weights),"
        " torch.nn.modules.rnn.RNNCell (1 of them, 32 weights)."
    )


def test_what_multiplies_no_rows_is_left_out():
    layers = (nn.Linear(4, 4), nn.Embedding(4, 4), nn.EmbeddingBag(4, 4), nn.Conv1d(4, 4, 1), nn.LayerNorm(4))
    assert name_other_layers(nn.Sequential(*layers, nn.LazyLinear(4), nn.LazyConv1d(4, 1))) == ""

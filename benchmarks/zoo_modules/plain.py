"""Networks of plain torch.nn, as tutorials have them."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from typing_extensions import override

from zoo_modules.base import Classifier, Regressor, Work, images, line, normal


class Sequence(LightningModule):
    """A language model around any layer that maps sequences to sequences."""

    def __init__(self, vocabulary: int, width: int, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(vocabulary, width), body, nn.Linear(width, vocabulary)

    def run_body(self, x: Tensor) -> Tensor:
        """Return what the body makes of embedded tokens."""
        return self.body(x)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.run_body(self.embedding(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Causal(Sequence):
    """With PyTorch's encoder under a causal mask."""

    @override
    def run_body(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.body(x, mask=mask, is_causal=True)


class Recurrent(Sequence):
    """With a recurrent layer."""

    @override
    def run_body(self, x: Tensor) -> Tensor:
        return self.body(x)[0]


def _ids(batch: int, length: int, vocabulary: int) -> Any:
    return lambda generator: torch.randint(vocabulary, (batch, length + 1), generator=generator)


@line("nn_transformer_encoder", "torch.nn", "torch", gate=True)
def nn_transformer_encoder(tiny: bool) -> Work:
    """nn.TransformerEncoder under a causal mask."""
    width, heads, wide, layers, vocabulary, batch, length = (
        (32, 2, 64, 2, 64, 2, 16) if tiny else (1024, 16, 4096, 4, 16000, 16, 512)
    )
    layer = nn.TransformerEncoderLayer(width, heads, wide, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return Work(Causal(vocabulary, width, body), _ids(batch, length, vocabulary))


class Translation(LightningModule):
    """nn.Transformer from one sequence to another, with its default dropout."""

    def __init__(self, vocabulary: int, body: nn.Transformer) -> None:
        super().__init__()
        self.body = body
        self.source, self.target = nn.Embedding(vocabulary, body.d_model), nn.Embedding(vocabulary, body.d_model)
        self.head = nn.Linear(body.d_model, vocabulary)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        source, target = batch[:, ::2], batch[:, 1::2]
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, device=self.device)
        out = self.body(self.source(source), self.target(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(out).transpose(1, 2), target[:, 1:])

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4, betas=(0.9, 0.98))


@line("nn_transformer", "torch.nn", "torch", draws=True)
def nn_transformer(tiny: bool) -> Work:
    """nn.Transformer, with its dropout."""
    width, heads, wide, layers, vocabulary, batch, length = (
        (32, 2, 64, 1, 64, 2, 16) if tiny else (512, 8, 2048, 4, 16000, 32, 512)
    )
    body = nn.Transformer(width, heads, layers, layers, wide, batch_first=True)
    return Work(Translation(vocabulary, body), _ids(batch, length - 1, vocabulary))


@line("nn_lstm", "torch.nn", "torch")
def nn_lstm(tiny: bool) -> Work:
    """nn.LSTM, two layers."""
    width, vocabulary, batch, length = (16, 64, 2, 8) if tiny else (1024, 16000, 64, 256)
    body = nn.LSTM(width, width, num_layers=2, batch_first=True)
    return Work(Recurrent(vocabulary, width, body), _ids(batch, length, vocabulary), trainer={"gradient_clip_val": 1.0})


@line("nn_gru_small", "torch.nn", "torch")
def nn_gru_small(tiny: bool) -> Work:
    """nn.GRU, small and bound by the host."""
    width, vocabulary, batch, length = (16, 64, 2, 8) if tiny else (128, 256, 32, 64)
    return Work(Recurrent(vocabulary, width, nn.GRU(width, width, batch_first=True)), _ids(batch, length, vocabulary))


@line("nn_mlp", "torch.nn", "torch")
def nn_mlp(tiny: bool) -> Work:
    """A wide multilayer perceptron with batch norm."""
    batch, width, layers = (8, 16, 2) if tiny else (8192, 4096, 6)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
    return Work(Regressor(nn.Sequential(*blocks, nn.Linear(width, width))), normal((batch, width), (batch, width)))


@line("nn_mlp_small", "torch.nn", "torch")
def nn_mlp_small(tiny: bool) -> Work:
    """A multilayer perceptron of a tutorial, bound by the host."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return Work(Classifier(net, lr=1e-3), images(8 if tiny else 64, 28, 10, channels=1))


@line("nn_convolutions_small", "torch.nn", "torch", draws=True)
def nn_convolutions_small(tiny: bool) -> Work:
    """The network of PyTorch's MNIST example, with its dropout."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    return Work(Classifier(net, lr=1e-3), images(4 if tiny else 64, 28, 10, channels=1))


class Residual(nn.Module):
    """A dilated causal convolution, as temporal convolutional networks have them."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.first = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.second = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution in (self.first, self.second):
            y = F.relu(convolution(F.pad(y, (2 * self.dilation, 0))))
        return F.relu(x + y)


@line("nn_temporal_convolutions", "torch.nn", "torch")
def nn_temporal_convolutions(tiny: bool) -> Work:
    """Dilated convolutions over series, with weight norm."""
    batch, width, length, layers = (2, 8, 32, 2) if tiny else (32, 256, 2048, 6)
    net = nn.Sequential(*(Residual(width, 2**number) for number in range(layers)))
    return Work(Regressor(net), normal((batch, width, length), (batch, width, length)))


class Recommender(LightningModule):
    """A factorization machine with sparse fields, each an embedding of its own."""

    def __init__(self, fields: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))
        self.net = nn.Sequential(nn.Linear(fields * width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, 1)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, clicks = batch
        found = torch.stack([table(ids[:, field]) for field, table in enumerate(self.tables)], 1)
        pairs = found.sum(1).square().sum(1) - found.square().sum((1, 2))
        logits = self.out(self.net(found.flatten(1))).squeeze(1) + 0.5 * pairs
        return F.binary_cross_entropy_with_logits(logits, clicks)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


@line("nn_recommender", "torch.nn", "torch")
def nn_recommender(tiny: bool) -> Work:
    """DeepFM: many embeddings, one small network."""
    fields, rows, width, hidden, batch = (3, 20, 4, 16, 8) if tiny else (26, 100_000, 32, 1024, 16_384)

    def make(generator: Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(rows, (batch, fields), generator=generator)
        return ids, torch.randint(2, (batch,), generator=generator).float()

    return Work(Recommender(fields, rows, width, hidden), make)

"""Modules as others write them train under Compile with its defaults as they do without it."""

from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from transformers import EncoderDecoderConfig, EncoderDecoderModel, T5Config, T5ForConditionalGeneration
from transformers.models.bert import BertConfig

from lightning_ups.callbacks import Compile
from lightning_ups.order import applied
from tests.toys import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Module(LightningModule):
    """Trains ``net``, which returns what has a loss, or a tensor."""

    def __init__(self, net, data):
        super().__init__()
        self.net, self.data, self.losses = net, data, []

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def loss(self, batch):
        output = self.net(**batch) if isinstance(batch, dict) else self.net(batch)
        output = getattr(output, "loss", output)
        return output if output.dim() == 0 else output.square().mean()

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def tokens(*names, length=6):
    return [{name: torch.randint(1, 50, (2, length)) for name in names} for _ in range(4)]


def t5():
    config = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50, decoder_start_token_id=0)
    return Module(T5ForConditionalGeneration(config), tokens("input_ids", "labels"))


def encoder_decoder():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    part = BertConfig(**sizes, vocab_size=50)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(part, part, decoder_start_token_id=1, pad_token_id=0)
    return Module(EncoderDecoderModel(config), tokens("input_ids", "labels"))


def plain(net):
    return Module(net, [torch.randn(4, 8) for _ in range(4)])


@dataclass
class Output:
    hidden: torch.Tensor
    loss: torch.Tensor


class ReturnsADataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return Output(x, x.square().mean())


class Branches(ReturnsADataclass):
    """Chooses by its data, reads a number from the device, prints, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.norm = 0, nn.BatchNorm1d(8)

    def forward(self, x):
        self.calls += 1
        if x.sum() > 0:
            x = self.norm(x * 2)
        rows = int(x.abs().sum().item()) % 3 + 1
        return super().forward(x[:rows])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, num_layers=2, dropout=0.5), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.rnn(x[:, None])[0])


class Detector(nn.Module):
    """Takes images of several sizes and boxes of several numbers, as those of torchvision do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), nn.Linear(4, 4)

    def forward(self, images, targets):
        losses = {}
        for image, target in zip(images, targets, strict=True):
            boxes = self.head(self.body(image[None]).mean(dim=(2, 3)))
            kept = target["boxes"][target["labels"] > 1]
            if len(kept):
                losses[f"loss_{len(losses)}"] = (boxes - kept).square().mean()
        return sum(losses.values(), start=boxes.square().mean())


def detector():
    def image():
        return torch.randn(3, *torch.randint(8, 14, (2,)).tolist())

    def target():
        count = int(torch.randint(1, 5, ()))
        return {"boxes": torch.rand(count, 4), "labels": torch.randint(0, 4, (count,))}

    return Module(Detector(), [{"images": [image(), image()], "targets": [target(), target()]} for _ in range(6)])


class Graph(nn.Module):
    """Passes messages along edges, whose number changes from batch to batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x, edges):
        for layer in self.layers:
            source, target = edges
            sums = torch.zeros_like(x).index_add_(0, target, x[source])
            degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
            x = torch.cat([x, sums / degree[:, None]], dim=1)
            x = torch.zeros(len(x), 8).scatter_add(0, torch.arange(len(x))[:, None].expand(-1, 8), layer(x)).relu()
        return x


def graph():
    return Module(
        Graph(), [{"x": torch.randn(n, 8), "edges": torch.randint(0, n, (2, 3 * n))} for n in (5, 7, 9, 5, 11, 13)]
    )


class Hooked(nn.Module):
    """Collects what its layers return by hooks, and goes through them by a generator."""

    def __init__(self):
        super().__init__()
        self.layers, self.kept = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), []
        self.layers[1].register_forward_hook(lambda module, args, output: self.kept.append(output))
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0].relu(),))

    def passes(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x

    def forward(self, x):
        *_, last = self.passes(x)
        return last + self.kept.pop()


class SeveralShapes(Module):
    """Calls a net with a batch and with halves of it, as models with two views do, and other methods than forward."""

    def loss(self, batch):
        whole = self.net(batch)
        views = [self.net(half) for half in batch.split([1, 3])]
        return (
            (whole - torch.cat(views)).square().mean() + whole.square().mean() + self.net.layers[0](batch).sum() * 0.1
        )


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Autoencoder(nn.Module):
    """Has two halves, which a training step calls by themselves."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Stacked(), Stacked()

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x.tanh())

    def forward(self, x):
        return self.decode(self.encode(x))


class ByOtherMethods(Module):
    def loss(self, batch):
        hidden = self.net.encode(batch)
        return (self.net.decode(hidden) - batch).square().mean() + 0.1 * hidden.square().mean()


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x))


class ByNumpy(nn.Module):
    """Leaves torch within its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        scale = float(x.detach().numpy().std())
        return self.layer(x) * scale


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0) * (1.0 if bool(x.sum() > -1e9) else 0.0)


class WithOwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return Own.apply(self.layer(x))


MODULES = {
    "t5": t5,
    "encoder-decoder": encoder_decoder,
    "dataclass": lambda: plain(ReturnsADataclass()),
    "branches": lambda: plain(Branches()),
    "lstm": lambda: plain(Recurrent()),
    "gru": lambda: plain(nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (8, 1)), First(nn.GRU(1, 4)))),
    "detector": detector,
    "graph": graph,
    "hooks": lambda: plain(Hooked()),
    "several shapes": lambda: SeveralShapes(Stacked(), [torch.randn(4, 8) for _ in range(4)]),
    "other methods": lambda: ByOtherMethods(Autoencoder(), [torch.randn(4, 8) for _ in range(4)]),
    "script": lambda: plain(Scripted()),
    "numpy": lambda: plain(ByNumpy()),
    "own function": lambda: plain(WithOwnFunction()),
    "complex": lambda: plain(Spectral()),
    "forward of its own": lambda: plain(replaced(Stacked())),
}


class First(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[0]


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(5, dtype=torch.cfloat)), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8))


def replaced(net):
    """Return ``net`` with a forward that is no method, as libraries that wrap models leave it."""
    forward = net.forward
    net.forward = lambda x: forward(x) * 2
    return net


class Facts(Callback):
    def on_train_batch_end(self, trainer, *args):
        self.facts = applied(trainer.strategy).report.parts["Compile"]


def fitted(make, tmp_path, *callbacks):
    seed_everything(0)
    module = make()
    fitting = trainer(tmp_path, callbacks=callbacks, epochs=1)
    seed_everything(1)
    fitting.fit(module)
    return module


WHOLLY_EAGER = {"lstm", "gru", "detector", "graph", "script", "forward of its own"}


def test_what_a_step_calls_is_compiled_where_it_calls_no_forward_of_the_model(tmp_path):
    torch.compiler.reset()
    facts = Facts()
    fitted(MODULES["other methods"], tmp_path, Compile(scope="auto", mode="auto", backend="aot_eager"), facts)
    groups = {name: group for group in facts.facts["groups"] for name in group["blocks"]}
    assert [name for name, group in groups.items() if group["graphs"]] == ["net.encoder", "net.decoder"]
    assert groups["net"]["eager"], "and nothing of it is an error"
    assert facts.facts["told"] == []


SLOW = [
    pytest.param("encoder-decoder", "auto", marks=pytest.mark.slow),
    pytest.param("t5", "blocks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "scope"), [*((name, "auto") for name in MODULES if name != "encoder-decoder"), *SLOW])
def test_it_trains_as_without_compile(tmp_path, name, scope):
    torch.compiler.reset()
    stock = fitted(MODULES[name], tmp_path)
    facts = Facts()
    ours = fitted(MODULES[name], tmp_path, Compile(scope=scope, mode="auto", backend="aot_eager"), facts)
    assert (facts.facts["graphs"] == 0) is (name in WHOLLY_EAGER)
    assert len(facts.facts["told"]) == (name in WHOLLY_EAGER)
    torch.testing.assert_close(ours.losses, stock.losses, rtol=1e-4, atol=1e-6)
    for (name, value), expected in zip(ours.state_dict().items(), stock.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.short
@pytest.mark.parametrize(("epochs", "graphs"), [(4, 0), (5, 1)])
def test_a_run_that_its_epochs_make_short_compiles_nothing(tmp_path, caplog, epochs, graphs):
    torch.compiler.reset()
    facts, compiling = Facts(), Compile(scope="auto", mode="default", backend="aot_eager")
    with caplog.at_level("INFO"):
        trainer(tmp_path, callbacks=[compiling, facts], epochs=epochs).fit(plain(Stacked()))
    assert facts.facts["graphs"] == graphs
    assert ("Compile: nothing, since the run has 16 steps" in caplog.text) is (graphs == 0)


class Validated(Module):
    def validation_step(self, batch, index):
        self.loss(batch)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=None)


class Seen(nn.Linear):
    def forward(self, x):
        self.compiled.append(torch.compiler.is_compiling())
        return super().forward(x)


@pytest.mark.short
def test_nothing_is_compiled_for_the_sanity_check_of_a_short_run(tmp_path):
    torch.compiler.reset()
    net = Seen(8, 8)
    net.compiled = []
    module = Validated(net, [torch.randn(4, 8) for _ in range(4)])
    compiling = Compile(scope="auto", mode="default", backend="aot_eager")
    trainer(tmp_path, callbacks=[compiling], epochs=1).fit(module)
    assert len(net.compiled) == 10
    assert not any(net.compiled)

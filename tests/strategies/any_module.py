"""Modules and settings put together from parts: whatever stock DDP trains.

What is put together is a plain dictionary, which a failing test prints.
"""

import copy
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

WIDTH, ROWS = 8, 8

# Parts: each maps [batch, WIDTH] to the same.


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        pairs = x.view(-1, 2, 4)
        return x + self.attention(pairs, pairs, pairs, need_weights=False)[0].flatten(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(-1, 2, 4)).flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.rnn = kind(2, WIDTH, batch_first=True, **options)

    def forward(self, x):
        return self.rnn(x.view(-1, 4, 2))[0][:, -1][:, :WIDTH]


class Packed(Recurrent):
    def forward(self, x):
        lengths = torch.full((len(x),), 3)
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 4, 2), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][:, -1]


class Conv(nn.Module):
    def __init__(self, *, channels_last=False):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.back = nn.ConvTranspose2d(2, 1, 3, padding=1)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.back(F.relu(self.conv(x.view(-1, 1, 2, 4)))).flatten(1)


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x):
        return x + self.norm(self.linear(x))


class Lookup(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        tokens = (x.detach().float() * 4).long() % 6
        found = self.embedding(tokens)
        return x + (found.mean(1) if found.dim() == 3 else found)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(WIDTH), torch.randn(1, WIDTH), torch.randn(())])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.ones(WIDTH, WIDTH) / WIDTH})

    def forward(self, x):
        return self.rows[0] * x + self.rows[1] * self.rows[2] + (x * self.named["a"]) @ self.named["b"]


class Scalars(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.gain + self.shift


class Empty(nn.Module):
    """Parameters without elements, of which one is used."""

    def __init__(self):
        super().__init__()
        self.none, self.rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) + self.rows.sum(0) + self.none.sum()


class Small(nn.Module):
    """One row, which does not divide among ranks; and three."""

    def __init__(self):
        super().__init__()
        self.one, self.three = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        return x + torch.tanh(x @ self.three.T) @ self.three + self.one


class Buffers(nn.Module):
    """Buffers of every kind, one of which changes in training and is read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean(0), 0.1)
                self.count += 1
        return self.linear(x - self.mean) * self.mask + self.hidden


class Rebound(nn.Module):
    """A buffer that is replaced, and not written to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.mean = (0.9 * self.mean + 0.1 * x.detach().float().mean(0)).detach()
        return self.linear(x - self.mean)


class Mixed(nn.Module):
    """Trainable parameters of several types."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        x = (torch.fft.fft(x.float()) * self.phase).real
        return self.down(torch.tanh(self.up(x)).double()).float()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

    def forward(self, x):
        return self.linear(x.to(torch.complex64)).real


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x.double()).float()


class Turned(nn.Module):
    """Parameters that do not lie in memory as they are indexed."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, 4).t() / 3)
        self.apart = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2] / 3)

    def forward(self, x):
        return x @ self.apart + torch.tanh(x @ self.turned.T) @ self.turned


class OneMemory(nn.Module):
    """Two parameters that are parts of one tensor."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(2, WIDTH, WIDTH) / 3
        self.first, self.second = nn.Parameter(memory[0]), nn.Parameter(memory[1])

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second


class Normal(nn.Module):
    """A weight that is computed from others, in one of torch's ways."""

    def __init__(self, way):
        super().__init__()
        self.linear = way(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Symmetric(nn.Module):
    def forward(self, weight):
        return (weight + weight.T) / 2


def symmetric(linear):
    nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


class Table(nn.Module):
    """Returns its own weight, and not something computed from it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH))

    def forward(self):
        return self.weight[:WIDTH]


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(Table() for _ in range(2))

    def forward(self, x):
        first, second = [table() for table in self.tables]
        return x * first + torch.sin(second)


class Methods(nn.Module):
    """Is used by methods that are not its forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def encode(self, x):
        return self.inner(x * self.gain)

    def decode(self, x):
        return F.linear(x, self.inner.weight.T)

    def forward(self, x):
        return self.decode(self.encode(x))


class Outputs(nn.Module):
    """Takes keywords, returns a nest."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(_Nest() for _ in range(2))

    def forward(self, x):
        for inner in self.inner:
            x = inner(hidden=x, scale=0.5)["all"][0][0]
        return x


class _Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden, scale):
        return {"all": [(hidden + scale * self.linear(hidden), None)], "scale": scale}


class Graph:
    """Holds tensors as libraries for graphs do: in a mapping of a part of its own."""

    def __init__(self, nodes):
        self.store = _Store(nodes)


class _Store:
    __slots__ = ("mapping",)

    def __init__(self, nodes):
        self.mapping = {"nodes": nodes, "names": ["a", "b"]}


class Objects(nn.Module):
    """Hands objects from block to block."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(_OnGraphs() for _ in range(2))

    def forward(self, x):
        graph = Graph(x)
        for inner in self.inner:
            graph = inner(graph)
        return graph.store.mapping["nodes"]


class _OnGraphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, graph):
        return Graph(graph.store.mapping["nodes"] + torch.tanh(self.linear(graph.store.mapping["nodes"])))


class Hooked(nn.Module):
    """Hooks of modules and of parameters."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_hook(lambda module, args, output: output * 0.5)
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.other.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))

    def forward(self, x):
        return x + self.other(torch.tanh(self.linear(x)))


class GradientHook(nn.Module):
    """A gradient that is changed before it is used."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_hook(lambda gradient: gradient * 0.25)

    def forward(self, x):
        return self.linear(x)


class ExtraState(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += self.training
        return self.linear(x) * (1 + 0.1 * self.calls)


class Experts(nn.Module):
    """Of several, one runs in each call."""

    def __init__(self):
        super().__init__()
        self.experts, self.calls = nn.ModuleList(Mlp() for _ in range(2)), 0

    def get_extra_state(self):  # or a run that is resumed begins with the other one, as under DDP
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += self.training
        return self.experts[self.calls % 2](x)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parameters = {name: p * 0.9 for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, parameters, (x,))


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.linear(x))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.linear(x)


PARTS = {
    "bare": Bare,
    "mlp": Mlp,
    "attention": Attention,
    "encoder": Encoder,
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "two ways": lambda: Recurrent(bidirectional=True, num_layers=2),
    "packed": Packed,
    "conv": Conv,
    "channels last": lambda: Conv(channels_last=True),
    "layer norm": lambda: Normed(nn.LayerNorm(WIDTH)),
    "batch norm": lambda: Normed(nn.BatchNorm1d(WIDTH)),
    "batch norm, no statistics": lambda: Normed(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "batch norm, no weights": lambda: Normed(nn.BatchNorm1d(WIDTH, affine=False)),
    "embedding": lambda: Lookup(nn.Embedding(6, WIDTH, padding_idx=0)),
    "embedding, norm": lambda: Lookup(nn.Embedding(6, WIDTH, max_norm=1.0)),
    "sparse embedding": lambda: Lookup(nn.Embedding(6, WIDTH, sparse=True)),
    "bag": lambda: Lookup(nn.EmbeddingBag(6, WIDTH)),
    "lists": Lists,
    "scalars": Scalars,
    "empty": Empty,
    "small": Small,
    "buffers": Buffers,
    "rebound": Rebound,
    "mixed": Mixed,
    "complex": Complex,
    "double": Double,
    "turned": Turned,
    "one memory": OneMemory,
    "weight norm": lambda: Normal(parametrizations.weight_norm),
    "spectral norm": lambda: Normal(parametrizations.spectral_norm),
    "orthogonal": lambda: Normal(parametrizations.orthogonal),
    "symmetric": lambda: Normal(symmetric),
    "old weight norm": lambda: Normal(nn.utils.weight_norm),
    "old spectral norm": lambda: Normal(nn.utils.spectral_norm),
    "tables": Tables,
    "methods": Methods,
    "outputs": Outputs,
    "hooked": Hooked,
    "gradient hook": GradientHook,
    "extra state": ExtraState,
    "experts": Experts,
    "objects": Objects,
    "functional": Functional,
    "dropped": Dropped,
}


# Places: how a part is held, and how it is called.


class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def in_turn(modules, x):
    for module in modules:
        x = module(x)
    return x


def without_gradient(module, x):
    with torch.no_grad():
        y = module(x)
    return x + y


def recomputed(module, x):
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    return checkpoint(module, x, use_reentrant=False)


def by_method(module, x):
    return module.decode(module.encode(x)) if hasattr(module, "encode") else module.forward(x)


PLACES = {
    "plain": (lambda make: make(), lambda held, x, step: held(x)),
    "list": (lambda make: nn.ModuleList(make() for _ in range(2)), lambda held, x, step: in_turn(held, x)),
    "lists": (
        lambda make: nn.ModuleList(nn.ModuleList(make() for _ in range(2)) for _ in range(2)),
        lambda held, x, step: in_turn([m for inner in held for m in inner], x),
    ),
    "dict": (lambda make: nn.ModuleDict({"a": make(), "b": make()}), lambda held, x, step: held["a"](held["b"](x))),
    "sequential": (lambda make: nn.Sequential(make(), nn.Tanh(), make()), lambda held, x, step: held(x)),
    "nested": (lambda make: Wrap(nn.ModuleList([Wrap(make())])), lambda held, x, step: held.inner[0](x)),
    "twice": (lambda make: make(), lambda held, x, step: held(torch.tanh(held(x)))),
    "list, twice": (
        lambda make: nn.ModuleList(make() for _ in range(2)),
        lambda held, x, step: in_turn(held, torch.tanh(in_turn(held, x))),
    ),
    "same twice": (lambda make: nn.ModuleList([make()] * 2), lambda held, x, step: in_turn(held, x)),
    "reversed": (lambda make: nn.ModuleList(make() for _ in range(2)), lambda held, x, step: in_turn([*held][::-1], x)),
    "odd steps": (lambda make: nn.ModuleList(make() for _ in range(2)), lambda held, x, step: held[step % 2](x)),
    "no gradient": (
        lambda make: nn.ModuleList(make() for _ in range(2)),
        lambda held, x, step: without_gradient(held[0], held[1](x)),
    ),
    "recomputed": (
        lambda make: nn.ModuleList(make() for _ in range(2)),
        lambda held, x, step: recomputed(held[1], recomputed(held[0], x)),
    ),
    "by method": (
        lambda make: nn.ModuleList(make() for _ in range(2)),
        lambda held, x, step: by_method(held[1], by_method(held[0], x)),
    ),
    "two loops": (
        lambda make: nn.ModuleList(make() for _ in range(2)),
        lambda held, x, step: held[0](x) + held[1](held[0](x).detach()),
    ),
    "unused": (lambda make: nn.ModuleList(make() for _ in range(2)), lambda held, x, step: held[0](x)),
}  # fmt: skip


TRAITS = ("frozen", "half_frozen", "tied", "shared", "root", "average", "lonely", "marked", "penalty", "read")


class OneByOne(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by itself."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])
        return loss


class Whole(OneByOne):
    """An optimizer whose step for a matrix needs all of it, written for plain tensors and DTensors alike."""

    def update(self, p, lr):
        update = p.grad / (p.grad.norm() + 0.1)
        if p.dim() == 2:
            update = update - update.mean(0, keepdim=True)
        p.add_(update, alpha=-lr)


class Past(OneByOne):
    """Steps by the mean of the last three gradients, and keeps these in a list."""

    def update(self, p, lr):
        past = self.state[p].setdefault("past", [])
        past.append(p.grad.clone())
        del past[:-3]
        p.add_(sum(past) / len(past), alpha=-lr)


class Pairs(OneByOne):
    """Keeps each gradient with its square, and all of these pairs in a tuple."""

    def update(self, p, lr):
        past = (*self.state[p].get("past", ()), (p.grad.clone(), p.grad.square()))[-3:]
        self.state[p]["past"] = past
        gradients, squares = zip(*past, strict=True)
        p.addcdiv_(sum(gradients), sum(squares).sqrt().add_(1e-3), value=-lr)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-3),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01, eps=1e-3),
    "lbfgs": lambda groups: torch.optim.LBFGS(groups, lr=0.05, max_iter=3, history_size=3),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01, eps=(1e-3, 1e-3)),
    "whole": Whole,
    "past": Past,
    "pairs": Pairs,
}


class Composed(LightningModule):
    """A module that is put together.

    Args:
        described: ``parts``: pairs of a name in ``PARTS`` and one in ``PLACES``; ``traits``: triples of a name and two
            numbers of parts; and ``settings``.
    """

    def __init__(self, described, *, alone=False):
        super().__init__()
        self.described, self.losses, self.validated, self.norms, self.calls = described, [], [], [], 0
        settings = described["settings"]
        self.automatic_optimization = not settings.get("manual")
        torch.manual_seed(0 if alone else dist.get_rank())  # rank 0's values count
        for i, (kind, place) in enumerate(described["parts"]):
            setattr(self, f"part{i}", PLACES[place][0](PARTS[kind]))
        self.head = nn.Linear(WIDTH, 1)
        for name, first, second in self.described["traits"]:
            getattr(self, f"_build_{name}", lambda *_: None)(self._part(first), self._part(second))
        if self.described["settings"].get("double"):
            self.double()
        self._traits = [(name, first, second) for name, first, second in self.described["traits"]]

    def _part(self, i):
        return getattr(self, f"part{i % len(self.described['parts'])}")

    # Traits

    def _build_frozen(self, part, _):
        part.requires_grad_(False)

    def _build_half_frozen(self, part, _):
        for p in [*part.parameters()][::2]:
            p.requires_grad_(False)

    def _build_tied(self, part, other):
        mine = [(m, n, p) for m in part.modules() for n, p in m._parameters.items() if p is not None and p.dim() == 2]
        theirs = [(m, n, p) for m in other.modules() for n, p in m._parameters.items() if p is not None]
        for _, _, p in mine:
            for module, name, q in theirs:
                if q is not p and p.shape == q.shape and p.dtype == q.dtype:
                    setattr(module, name, p)
                    return

    def _build_shared(self, part, other):
        self.again = next(iter(part.children()), part)

    def _build_root(self, *_):
        self.gain, self.bias = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(WIDTH))

    def _build_average(self, part, _):
        self.average = copy.deepcopy(part).requires_grad_(False)

    def _build_lonely(self, *_):
        self.lonely = nn.Linear(WIDTH, WIDTH)

    def _build_marked(self, part, _):
        for p in part.parameters():
            p.no_decay = True

    # Running

    def run(self, x, step):
        traits = {name: (first, second) for name, first, second in self._traits}
        if "root" in traits:
            x = x * self.gain + self.bias
        for i, (_, place) in enumerate(self.described["parts"]):
            x = torch.tanh(PLACES[place][1](self._part(i), x, step))
        if "average" in traits:
            with torch.no_grad():
                i = traits["average"][0] % len(self.described["parts"])
                target = PLACES[self.described["parts"][i][1]][1](self.average, x, step)
            x = x + 0.1 * target
        return self.head(x.double() if self.described["settings"].get("double") else x.float())

    def loss(self, x, step):
        loss = (self.run(x, step).squeeze(-1) - x.sum(-1)).square().mean()
        for name, first, _ in self._traits:
            if name == "penalty":
                p = next(p for p in [*self._part(first).parameters(), self.head.weight] if p.requires_grad)
                loss = loss + 0.01 * (p.abs() ** 2).sum().float()
            if name == "read":
                weight = next(
                    (p for p in self._part(first).parameters() if p.shape == (WIDTH, WIDTH)), self.head.weight
                )
                loss = loss + 0.01 * F.linear(x, weight.to(x.dtype) if not weight.is_complex() else weight.real).mean()
        return loss

    def training_step(self, batch, index):
        step = self.calls
        self.calls += 1
        if self.automatic_optimization:
            loss = self.loss(batch, step)
            self.losses.append(loss.detach().double())
            return loss
        self._manually(batch, step)
        return None

    def _manually(self, batch, step):
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            if self.described["settings"]["manual"] == "toggle":
                self.toggle_optimizer(optimizer)
            loss = self.loss(batch, step)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.described["settings"]["manual"] == "toggle":
                self.untoggle_optimizer(optimizer)
        self.losses.append(loss.detach().double())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["calls"] = self.calls

    def on_load_checkpoint(self, checkpoint):
        self.calls = checkpoint["calls"]

    def on_train_batch_end(self, *_):
        for name, first, _ in self._traits:
            if name == "average":
                with torch.no_grad():
                    for mean, p in zip(self.average.parameters(), self._part(first).parameters(), strict=True):
                        mean.lerp_(p, 0.1)

    def validation_step(self, batch, index):
        loss = self.loss(batch, 0)
        self.validated.append(loss.detach().double())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        settings = self.described["settings"]
        trained = [p for p in self.parameters() if p.requires_grad]
        make = OPTIMIZERS[settings["optimizer"]]
        if settings["optimizers"] == 2:
            head = {id(p) for p in self.head.parameters()}
            made = [make([p for p in trained if id(p) not in head])]
            return [*made, make([p for p in trained if id(p) in head])]
        if settings["groups"]:
            flat = [p for p in trained if p.dim() < 2 or getattr(p, "no_decay", False)]
            ids = {id(p) for p in flat}
            return [make([{"params": [p for p in trained if id(p) not in ids]}, {"params": flat, "lr": 0.005}])]
        return [make(trained)]


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.part0)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.part0, optimizer, lr=0.01)


def batches(settings, *, alone=False):
    """Return a loader of this rank's rows: together the ranks see what one device does."""
    generator = torch.Generator().manual_seed(1)
    steps = 4
    rows = torch.randn(steps * ROWS, WIDTH, generator=generator)
    rows = rows.double() if settings.get("double") else rows
    rank, size = (dist.get_rank(), dist.get_world_size()) if not alone else (0, 1)
    each = ROWS // size
    mine = [[*range(i * ROWS + rank * each, i * ROWS + (rank + 1) * each)] for i in range(steps)]
    return DataLoader(rows, batch_sampler=mine)


def train(described, path, *, strategy, ckpt_path=None, name="run", alone=False):
    """Train what is described; return losses, weights and buffers, whole, and the checkpoint of its third step."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    settings = described["settings"]
    model = Composed(described, alone=alone)
    torch.manual_seed(100 + dist.get_rank())
    callbacks = [Unfreeze()] if settings["unfreeze"] else []
    if settings["resume"]:
        callbacks.append(ModelCheckpoint(path / name, filename="{epoch}", save_top_k=-1))
    loader = batches(settings, alone=alone)
    lightning = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        strategy=strategy,
        devices=1 if alone else dist.get_world_size(),
        callbacks=callbacks,
        precision=settings["precision"],
        accumulate_grad_batches=settings["accumulate"],
        gradient_clip_val=settings["clip"],
        use_distributed_sampler=False,
        num_sanity_val_steps=1 if settings["validate"] else 0,
        enable_checkpointing=bool(settings["resume"]),
    )
    lightning.fit(model, loader, loader if settings["validate"] else None, ckpt_path=ckpt_path)
    result = {"losses": over_ranks(model.losses), "validated": over_ranks(model.validated)}
    result |= {"weights": {n: whole(p).clone() for n, p in model.named_parameters(remove_duplicate=False)}}
    result |= {"buffers": {n: whole(b).clone() for n, b in model.named_buffers()}}
    return result


def over_ranks(losses):
    if not losses:
        return []
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


PLAIN = {
    "optimizer": "sgd", "groups": False, "manual": None, "optimizers": 1, "accumulate": 1, "clip": None,
    "precision": "32-true", "validate": False, "unfreeze": False, "resume": None, "async": False, "double": False,
}  # fmt: skip


def plainly(*parts, traits=(), strategy=None, **settings):
    """Return a description of these parts, with the settings of ``PLAIN`` except for these."""
    assert settings.keys() <= PLAIN.keys()
    return {
        "parts": [[*part] for part in parts],
        "traits": [[*trait] for trait in traits],
        "settings": {**PLAIN, **settings},
        "strategy": strategy or {},
    }


def compare(described, path):
    """Train what is described under DDP and under ``FSDP2Strategy``; return what is different, or an empty string."""
    from lightning_ups.strategies import FSDP2Strategy

    resume = described["settings"]["resume"]
    options = {**described["strategy"], "save": "full" if resume == "to ddp" else "sharded"}
    options["async_save"] = bool(described["settings"]["async"]) and options["save"] == "sharded"
    alone = described["settings"]["unfreeze"]  # DDP reduces nothing that was frozen when it began
    right = train(
        described, path, strategy="auto" if alone else "ddp_find_unused_parameters_true", name="ddp", alone=alone
    )
    ours = train(described, path, strategy=FSDP2Strategy(**options), name="ours")
    tolerance = (1e-4, 1e-5) if described["settings"]["precision"] == "32-true" else (0.1, 0.02)
    tolerance = (1e-10, 1e-10) if described["settings"]["double"] else tolerance
    if found := differences(ours, right, *tolerance):
        return found
    if resume:
        saved = path / ("ddp" if resume == "from ddp" else "ours") / "epoch=0.ckpt"
        strategy = "ddp_find_unused_parameters_true" if resume == "to ddp" else FSDP2Strategy(**options)
        again = train(described, path, strategy=strategy, ckpt_path=saved, name="again")
        half = len(ours["losses"]) // 2
        expected = {**ours, "losses": ours["losses"][half:], "validated": again["validated"]}
        if found := differences(again, expected, *tolerance):
            return f"resumed {resume}: {found}"
    return ""


def differences(ours, right, rtol, atol):
    """Return what is different on the first rank, in one line, to all ranks."""
    found = [_differences(ours, right, rtol, atol)]
    dist.broadcast_object_list(found)
    return found[0]


def _differences(ours, right, rtol, atol):
    for kind in ("losses", "validated"):
        mine, theirs = (torch.tensor(losses[kind], dtype=torch.float64) for losses in (ours, right))
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True):
            return f"{kind}: {ours[kind]} for {right[kind]}"
    for kind in ("weights", "buffers"):
        if ours[kind].keys() != right[kind].keys():
            return f"names of {kind}: {sorted(ours[kind].keys() ^ right[kind].keys())}"
        for name, value in right[kind].items():
            mine = ours[kind][name]
            if mine.dtype != value.dtype or mine.shape != value.shape:
                return f"{kind}: {name} is {mine.dtype} {tuple(mine.shape)} for {value.dtype} {tuple(value.shape)}"
            if not torch.allclose(mine, value, rtol=10 * rtol, atol=10 * atol, equal_nan=True):
                return f"{kind}: {name} by up to {(mine - value).abs().max().item():.2g}"
    return ""

"""A module wide enough for float8, its training on ranks, and what its collectives carry."""

from collections import Counter

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.strategies import cases

TENSOR_PARALLEL = {
    "tensor_parallel_size": 2,
    "tensor_parallel_plan": {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
}


class WideBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Wide(cases.Case):
    """Two blocks that float8 takes, and ends that it does not."""

    def build(self):
        self.embed = nn.Linear(8, 32)
        self.layers = nn.ModuleList(WideBlock() for _ in range(2))
        self.head = nn.Linear(32, 1)

    def run(self, x):
        return super().run(self.embed(x))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


cases.CASES["WideEnough"] = Wide  # here, so that every rank that unpickles a function of this file knows it


class Traffic(TorchDispatchMode):
    """Bytes that each kind of collective carried, by the type of what it carried."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it makes of the operator comes here again
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = func._schema.name.partition("::")[2].strip("_")
            tensor = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            while not isinstance(tensor, torch.Tensor):
                tensor = tensor[0]
            if tensor.is_floating_point() or "gather" in kind:
                self.bytes[kind] += tensor.numel() * tensor.element_size()
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def precision(options):
    return BF16Precision() if options is None else Float8Precision(emulate=True, **options)


def train(tmp_path, options, *, strategy=None, ranks=2, steps=4, prepare=None, made=None, **more):
    """Train on this rank among ``ranks``; return the model, the Trainer and the losses."""
    chosen = made or precision(options)
    placed = FSDP2Strategy(**(strategy or {})) if ranks > 1 else "auto"
    more.setdefault("data_ranks", 1 if strategy and "tensor_parallel_size" in strategy and ranks == 2 else None)
    model, trainer, result = cases.train(
        "WideEnough", tmp_path, strategy=placed, ranks=ranks, steps=steps, prepare=prepare, plugins=[chosen], **more
    )
    return model, trainer, result["losses"]


def whole_state(model):
    return {name: cases.whole(value).clone() for name, value in model.state_dict().items()}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Groups within a compiled block, as a part in float32 or of a type of its own: gathered with it, in one graph."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.fsdp import sharding as shard
from tests.strategies.cases import CASES, WIDTH, Case, train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Spectral(nn.Module):
    """As that of a neural operator: bfloat16 knows no Fourier transform."""

    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.1)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.mix(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.modes), n=WIDTH))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64) * 0.1)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.modes, n=WIDTH).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.spectral, self.skip = kind(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.spectral(x) + self.skip(x))


class Operator(Case):
    kind = Spectral

    def build(self):
        self.layers = nn.ModuleList(Layer(self.kind) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)


class ComplexOperator(Operator):
    """Whose complex weights are so many that they are a group of their own."""

    kind = Complex


CASES |= {"Operator": Operator, "ComplexOperator": ComplexOperator}
PARTS = {
    "Operator": lambda: [BF16Precision(weights="masters", in_float32=["layers.*.spectral"])],
    "ComplexOperator": lambda: [BF16Precision(weights="masters")],
}


def fitted(path, name, callbacks, prepare=None, **strategy):
    told = {}

    def ask(model):
        model.on_train_end = lambda: told.update(applied(model.trainer.strategy).report.parts)
        if prepare is not None:
            prepare(model)

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "_LARGE", 1)
        model, _, found = train(
            name, path, strategy=FSDP2Strategy(**strategy), ranks=ranks, callbacks=callbacks, plugins=PARTS[name](),
            prepare=ask,
        )  # fmt: skip
    groups = [n for n, m in model.named_modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)]
    assert "layers.2.spectral" in groups
    return found, told.get("Compile"), model


def compiled_and_not(path, name, callbacks, strategy):
    plain, _, _ = fitted(path / "plain", name, callbacks(), **strategy)
    found, told, _ = fitted(path / "compiled", name, [Compile(backend="aot_eager"), *callbacks()], **strategy)
    same = all(torch.equal(found["weights"][n], weight) for n, weight in plain["weights"].items())
    return found["losses"] == plain["losses"] and same, told["graphs"], told["breaks"]


@pytest.mark.parametrize("name", [*PARTS])
@pytest.mark.parametrize("strategy", [{}, {"sharding": "gradients"}, {"sync": "every"}], ids=str)
def test_blocks_are_one_graph_and_train_as_uncompiled(ranks, tmp_path, name, strategy):
    same, graphs, breaks = ranks(compiled_and_not, tmp_path, name, list, strategy)
    assert same
    assert (graphs, breaks) == (2, 0)  # the first block's input needs no gradient


def recomputed():
    return [ActivationCheckpoint(save="nothing")]


@pytest.mark.parametrize("name", [*PARTS])
def test_they_are_recomputed_too(ranks, tmp_path, name):
    same, graphs, breaks = ranks(compiled_and_not, tmp_path, name, recomputed, {})
    assert same
    assert (graphs, breaks) == (2, 0)


def refusing_complex(reduce, seen):
    def refusing(*args, **kwargs):
        seen.append(tensor := args[1] if len(args) > 1 else kwargs["input"])
        if tensor.is_complex():
            raise TypeError("NCCL has no complex types")
        return reduce(*args, **kwargs)

    return refusing


def reduced_as_by_nccl(path):
    expected, _, _ = fitted(path / "gloo", "ComplexOperator", [])
    name = next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, refusing_complex(getattr(dist, name), seen))
        found, _, _ = fitted(path / "nccl", "ComplexOperator", [])
    same = all(torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items())
    return len(seen) > 0 and found["losses"] == expected["losses"] and same


def test_complex_gradients_are_reduced_as_pairs_of_real_ones(ranks, tmp_path):
    assert ranks(reduced_as_by_nccl, tmp_path)


def hooks_after(path):
    def hooks(callbacks):
        _, _, model = fitted(path, "Operator", callbacks)
        return [len(m._forward_pre_hooks) for m in (model.layers[1], model.layers[1].spectral)]

    return hooks([Compile(backend="aot_eager")]), hooks([])


def test_hooks_are_where_they_were_when_the_fit_is_over(ranks, tmp_path):
    compiled, plain = ranks(hooks_after, tmp_path)
    assert compiled == plain
    assert all(plain)


def test_blocks_with_a_part_in_float32_share_graphs_on_one_device(tmp_path):
    compiling = Compile(backend="aot_eager")
    told = {}

    def ask(model):
        model.on_train_end = lambda: told.update(applied(model.trainer.strategy).report.parts["Compile"])

    train("Operator", tmp_path, callbacks=[compiling], plugins=PARTS["Operator"](), prepare=ask)
    assert (told["graphs"], told["breaks"]) == (2, 0)


def write_within(path):
    def prepare(model):
        def write(module, *_):
            with torch.no_grad():
                module.modes.mul_(1.5)

        model.layers[1].spectral.register_forward_hook(torch.compiler.disable(write))

    fitted(path, "Operator", [Compile(backend="aot_eager")], prepare)


def test_a_write_into_such_a_part_is_seen(ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"layers\.1\.spectral\.modes is written to"):
        ranks(write_within, tmp_path)

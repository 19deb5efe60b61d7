"""Steps in place of the model's forward; groups within compiled blocks; gradients that manual steps change."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.state import initialise
from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.fsdp import sharding as shard
from lightning_ups.transforms.fsdp.model_forward import ModelForward
from tests.strategies.cases import CASES, WIDTH, Case, on_ranks, simply_on_ranks, train
from tests.transforms.fsdp.test_sharding import sharded_model


def gathered_in_steps():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.own = nn.Parameter(torch.ones(4))
    root = sharded_model(model).root
    initialise(root)
    forward, seen = ModelForward(root), []

    def look():
        seen.append((forward.is_gathered, not isinstance(model.own, DTensor)))

    for has_backward in (True, False, True):
        forward.begin(shows_gradients=False)
        look()
        loss = (model.layers[1](model.layers[0](torch.ones(1, 4))) * model.own).sum()
        forward.end()
        forward.end()  # a second one does nothing
        look()
        if has_backward:
            forward.begin_backward(loss)
            loss.backward()
            forward.end_backward()
            look()
    forward.begin(shows_gradients=False)
    forward.settle()
    look()
    return seen


def test_what_the_model_holds_is_gathered_from_its_forward_to_the_end_of_its_backward(ranks):
    with_backward, without = [(True, True), (False, True), (False, False)], [(True, True), (False, True)]
    assert ranks(gathered_in_steps) == [*with_backward, *without, *with_backward, (False, False)]


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


def recomputed():
    return [ActivationCheckpoint(save="nothing")]


@pytest.mark.parametrize("name", [*PARTS])
@pytest.mark.parametrize(("callbacks", "strategy"), [(list, {}), (list, {"sharding": "gradients"}), (recomputed, {})])
def test_blocks_are_one_graph_and_train_as_uncompiled(ranks, tmp_path, name, callbacks, strategy):
    same, graphs, breaks = ranks(compiled_and_not, tmp_path, name, callbacks, strategy)
    assert same
    assert (graphs, breaks) == (2, 0)  # the first block's input needs no gradient


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


class Manual(Case):
    """A loss whose weights go up while the network goes down, as in self-adaptive physics-informed losses."""

    automatic_optimization = False

    def build(self):
        super().build()
        self.weights = nn.Parameter(torch.ones(WIDTH))  # of no called module: gathered for the whole step

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        for part in (batch, -batch):
            loss = (self.weights * (self.run(part) - part).square()).mean()
            if part is batch:
                self.clear(optimizer)
            self.manual_backward(loss)
        self.losses.append(loss.detach())
        self.change()
        optimizer.step()

    def clear(self, optimizer):
        optimizer.zero_grad()

    def change(self):
        pass


class ClearedByTheModule(Manual):
    def clear(self, optimizer):
        self.zero_grad()


class Clipped(Manual):
    def change(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Turned(Manual):
    def change(self):
        self.weights.grad.neg_()


class Replaced(Manual):
    def clear(self, optimizer):
        for p in self.parameters():
            p.grad = None

    def change(self):
        self.weights.grad = 0.1 * self.weights.grad


class AskedBetween(Manual):
    """A gradient of what was given, as attributions and balanced losses ask, while others wait for the step."""

    def change(self):
        x = torch.ones(2, WIDTH, requires_grad=True)
        (towards,) = torch.autograd.grad((self.weights * self.run(x)).sum(), x)
        self.weights.grad += towards.mean()


KINDS = {kind.__name__: kind for kind in (ClearedByTheModule, Clipped, Turned, Replaced, AskedBetween)}


def trained(tmp_path, run, name, strategy):
    CASES[name] = KINDS[name]
    return run(name, tmp_path, strategy, 2, {})


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("run", "strategy"),
    [(on_ranks, {}), (on_ranks, {"sharding": "none"}), (simply_on_ranks, {})],
    ids=["fsdp2", "fsdp2 none", "simple_fsdp"],
)
def test_what_a_step_does_to_gradients_counts(ranks, tmp_path, run, strategy, name):
    CASES[name] = KINDS[name]
    found, wanted = ranks(trained, tmp_path, run, name, strategy), train(name, tmp_path)[2]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-4)
    torch.testing.assert_close(found["weights"], wanted["weights"], rtol=1e-4, atol=1e-5)

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, Optimizer

from lightning_ups.optim import OffloadedOptimizer
from lightning_ups.optim.offload.admission import twin_of
from tests.optim.offloading import LateMemory, Net, assert_same, compare, grouped, offloaded, train


class Parted(SGD):
    """Steps only the first parameter of each group, wrongly, as a whole."""

    def step(self, closure=None):
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, 1 / len(gradients))
        super().step(closure)


class Counted(SGD):
    """Counts its steps beside its groups, and decays by the count."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step(closure)


class CountedByGroup(SGD):
    """Counts its steps in its groups, as those without a schedule do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        super().step(closure)


class RowByRow(SGD):
    """Treats the rows of a matrix as one."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm())
        super().step(closure)


class Noisy(SGD):
    """Draws random numbers, for each parameter in turn."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p))
        super().step(closure)


class Elsewhere(SGD):
    """Keeps its averages beside its state, by the ids of what it steps."""

    averages = None

    @torch.no_grad()
    def step(self, closure=None):
        self.averages = {} if self.averages is None else self.averages
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            average = self.averages.setdefault(id(p), torch.zeros_like(p))
            average.add_(p.grad)
            p.sub_(average, alpha=0.1)


class Nested(SGD):
    """Keeps its averages in a dict within its state."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            kept = self.state[p].setdefault("kept", {"average": torch.zeros_like(p)})
            kept["average"].add_(p.grad)
            p.sub_(kept["average"], alpha=0.1)


BOTH = pytest.mark.parametrize("update", ["device", "host"])


@pytest.mark.parametrize(("masters", "update"), [(True, "device"), (True, "host"), (False, "host")])
def test_what_keeps_state_elsewhere_is_refused_where_other_tensors_stand_in_for_parameters(masters, update):
    with pytest.raises(ValueError, match=r"^Elsewhere cannot .* or leave the offloading out\.$"):
        train(grouped(Elsewhere), masters=masters, wrap=offloaded(update=update))


@pytest.mark.parametrize("masters", [False, True])
def test_state_within_state_is_whole(masters):
    right, plain = train(grouped(Nested), masters=masters)
    result, ours = train(grouped(Nested), masters=masters, wrap=offloaded(chunk_bytes=1))
    assert_same(result, right)
    for number, entries in plain.state_dict()["state"].items():
        found = ours.state_dict()["state"][number]["kept"]["average"]
        assert torch.equal(found, entries["kept"]["average"])


class Begun(SGD):
    """Makes its state before its first step, and counts on it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"sum": torch.full_like(p, 0.5), "n": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["n"] += 1
            p.sub_(self.state[p]["sum"].addcmul_(p.grad, p.grad).rsqrt() * p.grad, alpha=0.1)


@BOTH
@pytest.mark.parametrize("make", [grouped(Begun), grouped(SGD, momentum=0.9, fused=True)], ids=["begun", "fused"])
def test_state_that_is_there_before_the_first_step_and_fused_momentum_are_tried_too(make, update):
    compare(make, way={"update": update, "chunk_bytes": 4096})


class WithModes(AdamW):
    def train(self): ...

    def eval(self): ...


class OffloadsItself(Optimizer):
    def __init__(self, params):
        self.inner = AdamW(params)

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: Parted(p, lr=0.1), r"^Parted cannot .* or leave the offloading out\.$"),
        (lambda p: Counted(p, lr=0.1), r"^Counted cannot .* or leave the offloading out\.$"),
        (WithModes, r"^WithModes cannot .* such as AdamW, or leave the offloading out\.$"),
        (LBFGS, r"^LBFGS cannot .* whose step needs no closure, such as AdamW\.$"),
        (OffloadsItself, r"^OffloadsItself cannot .* such as torch\.optim\.AdamW\.$"),
        (
            lambda _: AdamW(nn.LazyLinear(2).parameters()),
            r"^AdamW cannot be offloaded: a parameter of it has no shape yet",
        ),
        # In the words of torch itself.
        (
            lambda p: AdamW(p, differentiable=True),
            r"^AdamW cannot .* \(RuntimeError: a leaf Variable .*, such as AdamW\.$",
        ),
    ],
    ids=["all at once", "counts its calls", "modes", "closure", "offloads itself", "lazy", "differentiable"],
)
@BOTH
def test_what_cannot_be_stepped_in_chunks_is_refused(make, text, update):
    with pytest.raises(ValueError, match=text):
        OffloadedOptimizer(make(Net().parameters()), update=update)


@pytest.mark.parametrize("kind", [CountedByGroup, RowByRow, Noisy])
@BOTH
def test_what_keeps_to_its_parameters_is_admitted(kind, update):
    right, _ = train(grouped(kind, momentum=0.9))
    torch.manual_seed(0)
    result, ours = train(grouped(kind, momentum=0.9), wrap=offloaded(chunk_bytes=9999, update=update))
    if kind is not Noisy:  # of which the parts draw what the whole draws, on some devices
        assert ours.admission.parted is (kind is CountedByGroup and update == "device")
    assert_same(result, right)


def test_matrices_that_are_orthogonalised_are_stepped_whole():
    def make(model):
        return Muon([model[0].weight, model[2].weight], lr=1e-2)

    ours = compare(make, way={"chunk_bytes": 1})
    assert not ours.admission.parted
    assert len(ours.steps.chunks) == 2


def test_the_share_of_state_is_known():
    assert OffloadedOptimizer(AdamW(Net().parameters())).admission.state_bytes == 2
    assert OffloadedOptimizer(AdamW(Net().parameters(), amsgrad=True)).admission.state_bytes == 3
    assert OffloadedOptimizer(SGD(Net().parameters())).admission.state_bytes == 0
    assert 0 < OffloadedOptimizer(Adafactor(Net().parameters())).admission.state_bytes < 1


def shares(update):
    """Offload the state of sharded parameters; return its share, and what is warned of."""
    model = Net()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours = OffloadedOptimizer(AdamW(model.parameters()), memory=LateMemory(), update=update)
    assert torch.equal(torch.get_rng_state(), before)
    return ours.admission.state_bytes, [str(w.message) for w in warned]


@BOTH
def test_sharded_parameters_are_tried_without_drawing_for_all_ranks(ranks, update):
    share, warned = ranks(shares, update)
    assert share == pytest.approx(2.0, abs=0.1)
    assert not [text for text in warned if "DTensor random" in text]


def test_a_twin_has_the_groups_and_nothing_of_the_size():
    model = nn.Sequential(nn.Linear(5000, 300), nn.Conv2d(70, 80, 3))
    optimizer = grouped(AdamW)(model)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user's"))
    twin = twin_of(optimizer)
    twin.step()
    assert type(twin) is AdamW
    assert [group["lr"] for group in twin.param_groups] == [1e-2, 3e-3]
    assert all(p.numel() <= 4096 for group in twin.param_groups for p in group["params"])
    assert {p.dim() for group in twin.param_groups for p in group["params"]} == {1, 2, 4}

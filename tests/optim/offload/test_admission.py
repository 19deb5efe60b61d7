import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, Optimizer

from lightning_ups.optim import OffloadedOptimizer
from lightning_ups.optim.offload.admission import twin_of
from tests.optim.offloading import LateMemory, Net, assert_same, grouped, train


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


@pytest.mark.parametrize(("masters", "update"), [(True, "device"), (True, "host"), (False, "host")])
def test_what_keeps_state_elsewhere_is_refused_where_other_tensors_stand_in_for_parameters(masters, update):
    def wrap(inner):
        return OffloadedOptimizer(inner, update=update)

    with pytest.raises(ValueError, match=r"^Elsewhere cannot .* or leave the offloading out\.$"):
        train(grouped(Elsewhere), masters=masters, wrap=wrap)


@pytest.mark.parametrize("masters", [False, True])
def test_state_within_state_is_whole(masters):
    def wrap(inner):
        return OffloadedOptimizer(inner, memory=LateMemory(), chunk_bytes=1)

    right, plain = train(grouped(Nested), masters=masters)
    result, ours = train(grouped(Nested), masters=masters, wrap=wrap)
    assert_same(result, right)
    for number, entries in plain.state_dict()["state"].items():
        found = ours.state_dict()["state"][number]["kept"]["average"]
        assert torch.equal(found, entries["kept"]["average"])


def test_fused_momentum_is_admitted():
    right, _ = train(grouped(SGD, momentum=0.9, fused=True))
    for update in ("device", "host"):
        wrap = lambda o, u=update: OffloadedOptimizer(o, memory=LateMemory(), update=u)  # noqa: E731
        assert_same(train(grouped(SGD, momentum=0.9, fused=True), wrap=wrap)[0], right)


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


@pytest.mark.parametrize("update", ["device", "host"])
def test_state_that_is_there_before_the_first_step_is_tried_too(update):
    wrap = lambda o: OffloadedOptimizer(o, memory=LateMemory(), update=update, chunk_bytes=4096)  # noqa: E731
    assert_same(train(grouped(Begun), wrap=wrap)[0], train(grouped(Begun))[0])


def test_what_does_not_step_by_itself_is_refused_with_its_own_words():
    with pytest.raises(ValueError, match=r"^AdamW cannot .* \(RuntimeError: a leaf Variable .*, such as AdamW\.$"):
        OffloadedOptimizer(AdamW(Net().parameters(), differentiable=True))


@pytest.mark.parametrize("kind", [Parted, Counted])
@pytest.mark.parametrize("update", ["device", "host"])
def test_what_looks_at_all_parameters_or_counts_its_calls_is_refused(kind, update):
    with pytest.raises(ValueError, match=rf"^{kind.__name__} cannot .* or leave the offloading out\.$"):
        OffloadedOptimizer(kind(Net().parameters(), lr=0.1), update=update)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_without_a_shape_is_refused():
    with pytest.raises(ValueError, match=r"^AdamW cannot be offloaded: a parameter of it has no shape yet\."):
        OffloadedOptimizer(AdamW(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)).parameters()))


def test_what_needs_its_closure_is_refused():
    with pytest.raises(ValueError, match=r"^LBFGS cannot .* whose step needs no closure, such as AdamW\.$"):
        OffloadedOptimizer(LBFGS(Net().parameters()))


class WithModes(AdamW):
    def train(self): ...

    def eval(self): ...


@pytest.mark.parametrize("update", ["device", "host"])
def test_what_has_other_weights_for_evaluation_is_refused(update):
    with pytest.raises(ValueError, match=r"^WithModes cannot .* such as AdamW, or leave the offloading out\.$"):
        OffloadedOptimizer(WithModes(Net().parameters()), update=update)


class OffloadsItself(Optimizer):
    def __init__(self, params):
        self.inner = AdamW(params)

    def step(self, closure=None):
        self.inner.step()


def test_what_is_no_optimizer_of_torch_inside_is_refused():
    with pytest.raises(ValueError, match=r"^OffloadsItself cannot .* such as torch\.optim\.AdamW\.$"):
        OffloadedOptimizer(OffloadsItself(Net().parameters()))


@pytest.mark.parametrize("kind", [CountedByGroup, RowByRow, Noisy])
@pytest.mark.parametrize("update", ["device", "host"])
def test_what_keeps_to_its_parameters_is_admitted(kind, update):
    right, _ = train(grouped(kind, momentum=0.9))
    torch.manual_seed(0)
    result, ours = train(
        grouped(kind, momentum=0.9), wrap=lambda o: OffloadedOptimizer(o, chunk_bytes=9999, update=update)
    )
    if kind is not Noisy:  # of which the parts draw what the whole draws, on some devices
        assert ours.admission.parted is (kind is CountedByGroup and update == "device")
    for name, value in right.items():
        assert torch.equal(value, result[name])


def test_matrices_that_are_orthogonalised_are_stepped_whole():
    def make(model):
        return Muon([model[0].weight, model[2].weight], lr=1e-2)

    right, _ = train(make)
    result, ours = train(make, wrap=lambda o: OffloadedOptimizer(o, chunk_bytes=1))
    assert not ours.admission.parted
    assert len(ours.steps.chunks) == 2
    assert all(torch.equal(right[name], result[name]) for name in right)


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


@pytest.mark.parametrize("update", ["device", "host"])
def test_sharded_parameters_are_tried_without_drawing_for_all_ranks(ranks, update):
    share, warned = ranks(shares, update)
    assert share == pytest.approx(2.0, abs=0.1)
    assert not [text for text in warned if "DTensor random" in text]


def test_the_optimizer_itself_is_not_touched():
    model = Net()
    optimizer = Noisy(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    OffloadedOptimizer(optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


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

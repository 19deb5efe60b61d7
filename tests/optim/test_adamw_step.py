import ctypes
import weakref
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from lightning_ups._compat.torch.fake_tensors import FakeTensorMode
from lightning_ups.optim import MasteredOptimizer, MasterWeights, adamw_step
from lightning_ups.optim.adamw_step import (
    AdamWStep,
    OneKernel,
    Settings,
    Slots,
    one_kernel,
    reference_step,
    settings_of,
    slots_of,
    suits_one_kernel,
)
from tests.optim.offloading import assert_same, assert_same_state

SHAPES = [(), (1,), (5,), (33, 17), (3, 70001), (64, 64)]
EVEN = [(64, 64), (40000,), (8,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def anywhere(monkeypatch):
    """Take every device for one that has the kernel; elsewhere than on a GPU the specification stands in for it."""
    monkeypatch.setattr(adamw_step, "_has_kernel", lambda device: True)


def parameters(device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def draw_gradients(weights, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(w.shape, generator=generator).to(w.device) for w in weights]


def settings(**options):
    values = {**OPTIONS, **options}
    beta1, beta2 = values.pop("betas")
    return Settings(beta1=beta1, beta2=beta2, **values)


def by_torch(weights, *, steps, coefficient=1.0, dtype=torch.float32):
    optimizer = AdamW(weights, **OPTIONS, fused=True)
    for step in range(steps):
        for weight, gradient in zip(weights, draw_gradients(weights, step), strict=True):
            weight.grad = gradient.to(dtype).float() * coefficient
        optimizer.step()
    return optimizer


def by_ours(weights, *, steps, coefficient=None, dtype=torch.float32, make=AdamWStep, copies=None):
    optimizer, step_once = AdamW(weights, **OPTIONS, fused=True), make()
    for step in range(steps):
        slots = slots_of(
            optimizer,
            weights,
            gradients=[gradient.to(dtype) for gradient in draw_gradients(weights, step)],
            copies=[*map((copies or {}).get, weights)],
        )
        step_once(slots, settings(), coefficient=coefficient)
    return optimizer


def assert_close(ours, theirs, weights, others):
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-6, atol=2e-6)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[weight][name], theirs.state[other][name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficient", [None, 0.37])
def test_the_specification_is_torchs_fused_step(dtype, coefficient):
    weights, others = parameters(), parameters()
    ours = by_ours(weights, steps=4, dtype=dtype, coefficient=coefficient and torch.tensor(coefficient))
    theirs = by_torch(others, steps=4, dtype=dtype, coefficient=coefficient or 1.0)
    assert_close(ours, theirs, weights, others)
    free = by_ours(parameters(), steps=4, dtype=dtype)
    assert (coefficient is None) == torch.equal(
        free.state_dict()["state"][3]["exp_avg"], ours.state_dict()["state"][3]["exp_avg"]
    )


def test_copies_are_the_weights_rounded():
    weights = parameters()
    copies = {w: torch.empty_like(w, dtype=torch.bfloat16) for w in weights[1:]}
    by_ours(weights, steps=2, copies=copies)
    assert all(torch.equal(low, weight.to(torch.bfloat16)) for weight, low in copies.items())


def test_state_of_a_step_that_was_not_fused_is_used():
    weights, others = parameters(), parameters()
    plain = AdamW(weights, **OPTIONS, foreach=False)
    for weight, gradient in zip(weights, draw_gradients(weights, 0), strict=True):
        weight.grad = gradient
    plain.step()
    AdamWStep()(slots_of(plain, weights, gradients=draw_gradients(weights, 1)), settings())
    assert_close(plain, by_torch(others, steps=2), weights, others)


LEFT_TO_TORCH = {
    "amsgrad": lambda w: AdamW(w, amsgrad=True),
    "maximize": lambda w: AdamW(w, maximize=True),
    "capturable": lambda w: AdamW(w, capturable=True),
    "differentiable": lambda w: AdamW(w, differentiable=True),
    "foreach": lambda w: AdamW(w, foreach=True),
    "unfused": lambda w: AdamW(w, fused=False),
    "tensor": lambda w: AdamW(w, lr=torch.tensor(1e-3), fused=True),
    "l2": lambda w: Adam(w, weight_decay=0.1),
    "subclass": lambda w: type("Mine", (AdamW,), {})(w),
    "sgd": lambda w: SGD(w),
    "double": lambda w: AdamW([p.detach().double().requires_grad_() for p in w]),
}


@pytest.mark.parametrize("make", LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH)
def test_what_the_kernel_does_not_do_is_left_to_the_optimizer(anywhere, make):
    optimizer = make(parameters())
    assert settings_of(optimizer, optimizer.param_groups[0]) is None
    assert not suits_one_kernel(optimizer)


def test_what_a_gpu_would_do_is_known_without_one():
    optimizer = AdamW(parameters())
    assert one_kernel(optimizer) is None
    assert suits_one_kernel(optimizer)
    with FakeTensorMode():
        assert suits_one_kernel(Adam([nn.Parameter(torch.empty(2, 3))], lr=1e-3))
        assert not suits_one_kernel(AdamW([nn.Parameter(torch.empty(2, 3, dtype=torch.bfloat16))]))


def test_a_step_that_was_replaced_is_not_passed_over(anywhere):
    optimizer = AdamW(parameters())
    ExponentialLR(optimizer, 0.9)  # counts steps by a step of its own, which is no other
    assert settings_of(optimizer, optimizer.param_groups[0]) is not None
    optimizer.step = lambda closure=None: None
    assert settings_of(optimizer, optimizer.param_groups[0]) is None


def test_adam_without_decay_is_adamw_without_decay(anywhere):
    optimizer = Adam(parameters(), lr=1e-2)
    assert settings_of(optimizer, optimizer.param_groups[0]) == Settings(1e-2, 0.9, 0.999, 1e-8, 0.0)


def train(*, steps, accumulate=False, clip=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    masters = MasterWeights(model, dtype=torch.bfloat16)
    groups = [{"params": [*model[0].parameters()], "lr": 1e-2}, {"params": [*model[1:].parameters()]}]
    optimizer = MasteredOptimizer(AdamW(groups, lr=3e-3), masters, accumulate=accumulate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(1 + accumulate):
            hidden = model[0](torch.linspace(-1, 1, 32).reshape(4, 8).bfloat16() * (part + 1))
            loss = model[2](model[1](hidden.float()).bfloat16()).float().square().mean()
            loss.backward()
        if clip:
            optimizer.take_clip_coefficient(torch.tensor(0.25))
        optimizer.step()
        losses.append(loss.item())
        assert all(p.grad is None for p in model.parameters() if p in masters.of)
    return losses, model, optimizer, masters


@pytest.mark.parametrize("options", [{}, {"accumulate": True}, {"clip": True}], ids=["plain", "accumulate", "clip"])
def test_a_step_over_masters_is_that_of_the_optimizer_by_itself(monkeypatch, options):
    expected, _, theirs, _ = train(steps=5, **options)
    calls = []
    monkeypatch.setattr(adamw_step, "_has_kernel", lambda device: True)
    monkeypatch.setattr(adamw_step, "reference_step", lambda *a, **k: (calls.append(1), reference_step(*a, **k)))
    losses, model, ours, masters = train(steps=5, **options)
    assert calls, "the one kernel's place was taken"
    assert losses == pytest.approx(expected, rel=2e-3)
    assert all(torch.equal(p, m.to(torch.bfloat16)) for p, m in masters.of.items())
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    for index, state in other["state"].items():
        assert list(mine["state"][index]) == list(state)
        # The losses part by the rounding of weights to bfloat16, and the gradients with them.
        torch.testing.assert_close(mine["state"][index]["exp_avg"], state["exp_avg"], rtol=0.05, atol=2e-3)
    assert len(model.state_dict()) == len(set(model.state_dict()))


def test_writes_of_its_own_are_not_taken_for_writes_of_others(anywhere):
    _, model, _, masters = train(steps=4)
    before = {p: m.clone() for p, m in masters.of.items()}
    masters.take_over(by_value=True)
    assert all(torch.equal(masters.of[p], m) for p, m in before.items()), "rounded copies did not go back"
    assert not torch.equal(next(iter(before.values())), next(iter(model.parameters())).float())


def test_the_flag_of_gradient_scalers_forbids_the_step_and_their_scale_is_left_to_torch(anywhere):
    weights = parameters()
    optimizer = AdamW(weights, **OPTIONS, fused=True)
    for weight, gradient in zip(weights, draw_gradients(weights, 0), strict=True):
        weight.grad = gradient
    before, optimizer.grad_scale = [w.detach().clone() for w in weights], None
    for flag in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(flag)
        OneKernel(optimizer).step(optimizer, one_kernel(optimizer))
        assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True)) == bool(flag)
        assert {optimizer.state[w]["step"].item() for w in weights} == {1 - flag}
    optimizer.grad_scale = torch.ones(())
    assert one_kernel(optimizer) is None


STEPS = 8


class ByAddress:
    """Steps what lies at the addresses that it was told, as the kernel does, whatever has become of the tensors."""

    laid_out = 0

    def __init__(self, kind):
        self.kind = kind

    def find(self, addresses, sizes):
        type(self).laid_out += 1
        gradients, weights, averages, squares, steps, copies = addresses
        wide = [torch.float32] * len(sizes)
        self.slots = Slots(
            [*map(memory, weights, sizes, wide)],
            [*map(memory, gradients, sizes, [self.kind.gradient] * len(sizes))],
            [*map(memory, averages, sizes, wide)],
            [*map(memory, squares, sizes, wide)],
            [memory(step, 1, torch.float32)[0] for step in steps],
            [self.kind.copy and memory(*copy, self.kind.copy) for copy in zip(copies, sizes, strict=True)],
        )

    def __call__(self, settings, *, coefficient, skip):
        reference_step(self.slots, settings, coefficient=coefficient, skip=skip)


def memory(address, size, dtype):
    return torch.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype=dtype)


@pytest.fixture
def by_address(monkeypatch):
    """Take every device for one that has the kernel, and let what is kept of addresses be all that a step has."""
    monkeypatch.setattr(adamw_step, "_has_kernel", lambda device: True)
    monkeypatch.setattr(adamw_step, "_launch_of", ByAddress)
    monkeypatch.setattr(ByAddress, "laid_out", 0)


class Net(nn.Module):
    """Weights with a master and without one, of sizes that fill vectors and that do not, and one with two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.square, self.odd, self.tied = nn.Linear(16, 16), nn.Linear(5, 7), nn.Linear(16, 16)
        self.tied.weight = self.square.weight
        self.norm = nn.BatchNorm1d(16)


class Run:
    """A model, its masters and its optimizer, which are given gradients that follow from the number of the step."""

    def __init__(self):
        self.model = Net()
        self.masters = MasterWeights(self.model, dtype=torch.bfloat16, tell=lambda _: None)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}]
        self.inner = AdamW(groups, lr=1e-2)
        self.optimizer = MasteredOptimizer(self.inner, self.masters)
        self.weight = self.model.square.weight  # one that is meddled with
        self.gradients = [torch.empty_like(p) for p in self.model.parameters()]
        self.saved = None

    @property
    def master(self):
        return self.masters.of[self.weight]

    @property
    def state(self):
        return self.inner.state[self.master]

    def give_gradients(self, step):
        generator = torch.Generator().manual_seed(step)
        for p, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            values = torch.randn(p.shape, generator=generator)
            fits = (gradient.shape, gradient.dtype) == (p.shape, p.dtype)
            p.grad = gradient.copy_(values) if fits else values.to(p.dtype)


def train_changed(change, *, kept, launched=True):
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        if not launched:
            patch.setattr(adamw_step, "_launch_of", lambda kind: None)
        for step in range(STEPS):
            run.optimizer.zero_grad()
            run.give_gradients(step)
            change(run, step)
            if not kept:
                run.optimizer._kernel = OneKernel(run.inner)
            run.optimizer.step()
    return run


def renew(*tensors):
    """Give each other memory."""
    for tensor in tensors:
        tensor.data = tensor.data.clone()


def add_a_group(run):
    extra = nn.Parameter(torch.ones(24))
    run.model.extra, run.gradients = extra, [*run.gradients, torch.empty(24)]
    run.optimizer.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones(24)


def take_one_out(run):
    for group in (run.optimizer.param_groups[0], run.inner.param_groups[0]):
        del group["params"][0]
    run.inner.state.pop(run.master)


def another_size(run):
    weight = run.model.norm.weight
    weight.grad = None
    weight.data, run.model.norm.bias.grad = torch.ones(24), None
    weight.grad = torch.ones(24)
    run.inner.state.pop(weight)


def widen(run):
    run.weight.data, run.weight.grad = run.weight.data.float(), None


# At one step alone: the fourth, in which there is state.
ONCE = {
    "replace an average": lambda run: run.state.update(exp_avg=torch.full_like(run.master, 0.1)),
    "clear state": lambda run: run.optimizer.state.clear(),
    "begin anew": lambda run: setattr(run.optimizer, "state", defaultdict(dict)),
    "add a group": add_a_group,
    "put groups in place": lambda run: setattr(run.optimizer, "param_groups", [*reversed(run.optimizer.param_groups)]),
    "take one out": take_one_out,
    "another size": another_size,
    "widen": widen,
}


def once(change):
    return lambda run, step: change(run) if step == 3 else None


def clip(run, step):
    if step % 3:
        run.optimizer.take_clip_coefficient(torch.tensor(0.3))


def move_gradients(run, step):
    for p in run.model.parameters():
        p.grad = p.grad.clone()


def load_state(run, step):
    if step == 2:
        state = run.optimizer.state_dict()["state"]
        run.saved = {"state": {i: {n: v.clone() for n, v in s.items()} for i, s in state.items()}}
    if step == 5:
        run.optimizer.load_state_dict({**run.optimizer.state_dict(), **run.saved})


def transpose_average_in_place(run, step):
    if step in (3, 5):
        run.state["exp_avg"].data = run.state["exp_avg"].data.t()


def transpose_weight(run, step):
    if step in (3, 5):
        run.weight.data = run.weight.data.t() if step == 3 else run.weight.data.contiguous()


def leave_one_out(run, step):
    if step in (0, 3, 4):
        run.weight.grad = None


def leave_out_a_group(run, step):
    if step in (0, 3, 4):
        for p in run.optimizer.param_groups[1]["params"]:
            p.grad = None


def give_views(run, step):
    if step % 3 == 1:
        run.weight.grad = run.weight.grad.t()
    if step % 3 == 2:
        run.weight.grad = run.weight.grad[:, :1].expand(16, 16)


def give_odd_places(run, step):
    if step % 2:
        odd = torch.empty(257, dtype=torch.bfloat16)[1:].view(16, 16)
        run.weight.grad = odd.copy_(run.weight.grad)


def give_wide_gradients(run, step):
    for p, master in [*run.masters.of.items()][: step % 3]:
        master.grad, p.grad = p.grad.float() * 1.001, None


def another_size_at_the_same_place(run, step):
    weight = run.model.norm.weight
    place = [p is weight for p in run.model.parameters()].index(True)
    if step == 0:
        run.saved = torch.zeros(16), torch.zeros(16)
        run.inner.state[weight] = {"step": torch.zeros(()), "exp_avg": run.saved[0], "exp_avg_sq": run.saved[1]}
        run.saved = weight.data, run.gradients[place].data, *(each.data for each in run.saved)
    if step in (3, 5):
        state, weight.grad = run.inner.state[weight], None
        held = weight, run.gradients[place], state["exp_avg"], state["exp_avg_sq"]
        for tensor, whole in zip(held, run.saved, strict=True):
            tensor.data = whole[: 8 if step == 3 else 16]
        weight.grad = run.gradients[place].fill_(0.5)


def gradients_of_another_type_at_the_same_place(run, step):
    run.saved = torch.empty(256) if run.saved is None else run.saved
    gradient = run.weight.grad
    if step % 2:
        run.weight.grad = run.saved.view(torch.bfloat16)[:256].view(16, 16).copy_(gradient)
    else:
        run.weight.grad, run.master.grad = None, run.saved.view(16, 16).copy_(gradient)


def copies_of_another_type_at_the_same_place(run, step):
    run.saved = torch.empty(16, 16) if run.saved is None else run.saved
    run.saved.copy_(run.weight.grad)
    run.weight.grad = None
    if step == 3:
        run.weight.data = run.weight.data.view(torch.float16).copy_(run.weight.data.clone())
    run.master.grad = run.saved


def change_options(run, step):
    group = run.optimizer.param_groups[step % 2]
    group["lr"], group["betas"], group["eps"] = 1e-2 / (step + 1), (0.5 + step / 20, 0.9), 10.0**-step
    group["weight_decay"] = step / 10


def skip(run, step):
    run.inner.found_inf = torch.tensor(float(step in (0, 3, 4)))
    if step > 5:
        del run.inner.found_inf


def leave_to_torch(run, step):
    for group in run.optimizer.param_groups:
        group["foreach"] = step in (2, 3) or None


def write(run, step):
    with torch.no_grad():
        run.weight.clamp_(-0.05, 0.05)
        if step == 3:
            run.master.mul_(0.5)


CHANGES = {
    "nothing": lambda run, step: None,
    "move copies": lambda run, step: renew(*run.model.parameters()),
    "move masters": lambda run, step: renew(*run.masters.of.values()),
    "move state": lambda run, step: renew(*(t for state in run.inner.state.values() for t in state.values())),
    **{name: once(change) for name, change in ONCE.items()},
}
for change in (
    clip, move_gradients, load_state, transpose_average_in_place, transpose_weight, leave_one_out, leave_out_a_group,
    give_views, give_odd_places, give_wide_gradients, another_size_at_the_same_place,
    gradients_of_another_type_at_the_same_place, copies_of_another_type_at_the_same_place, change_options, skip,
    leave_to_torch, write,
):  # fmt: skip
    CHANGES[change.__name__] = change


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_kept_from_step_to_step_changes_no_bit(by_address, change):
    kept = train_changed(change, kept=True)
    for other in (train_changed(change, kept=False), train_changed(change, kept=True, launched=False)):
        assert_same(kept.model.state_dict(), other.model.state_dict())
        assert_same(dict(kept.model.named_parameters()), dict(other.model.named_parameters()))
        assert_same_state(kept.optimizer.state_dict(), other.optimizer.state_dict())
    assert ByAddress.laid_out


def step(run, change="nothing", number=0):
    run.give_gradients(number)
    CHANGES[change](run, number)
    run.optimizer.step()


def test_tables_are_made_anew_only_when_something_has_changed(by_address):
    run, counts = Run(), []
    for change in (*["nothing"] * 4, "move_gradients", "nothing", "replace an average", "nothing"):
        before = ByAddress.laid_out
        step(run, change, number=3)
        counts.append(ByAddress.laid_out - before)
    kinds = [len(each._kinds) for each in run.optimizer._kernel._steps]
    assert kinds == [2, 3], "of even sizes and of odd ones, and with no copy"
    assert counts == [5, 0, 0, 0, 5, 5, 2, 0]


def test_no_tensor_is_kept_from_step_to_step(by_address):
    run = Run()
    step(run)
    run.give_gradients(1)
    run.weight.grad = run.weight.grad.clone()
    gradient, average = weakref.ref(run.weight.grad), weakref.ref(run.state["exp_avg"])
    run.optimizer.step()
    assert gradient() is None
    run.inner.state.clear()
    assert average() is None


def test_what_a_launch_writes_is_counted_as_written(by_address):
    run = Run()
    step(run)
    written = [*run.model.parameters(), run.master, run.state["exp_avg"], run.state["exp_avg_sq"]]
    counts = [each._version for each in written]
    step(run)
    assert all(each._version > count for each, count in zip(written, counts, strict=True))


def test_a_failure_while_tables_are_made_leaves_none_behind(by_address, monkeypatch):
    run, other = Run(), Run()
    step(run)
    step(other)
    renew(*run.model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(ByAddress, "find", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            step(run, number=1)
    for each in (run, other):
        each.optimizer.zero_grad()
        step(each, number=2)
    assert_same(run.model.state_dict(), other.model.state_dict())


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_weight_that_becomes_a_shard_is_stepped_as_before(by_address, mesh):
    # Of a shard each step takes anew what this rank has, where it lies and whether it is one still.
    def shard(tensor):
        return distribute_tensor(tensor.detach(), mesh, [Shard(0)])

    ends = []
    for sharded in (False, True):
        whole = [nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6)), nn.Parameter(torch.ones(8))]
        optimizer = AdamW(whole, lr=1e-2)
        group, kernel = optimizer.param_groups[0]["params"], OneKernel(optimizer)
        for number in range(6):
            if sharded and number == 3:
                weight, state = group[0], optimizer.state.pop(group[0])
                group[0] = nn.Parameter(shard(weight))
                moved = {name: shard(value) for name, value in state.items() if name != "step"}
                optimizer.state[group[0]] = {"step": state["step"], **moved}
                count = group[0]._version
            for weight in group:
                gradient = torch.full(weight.shape, 1.0 + number).cumsum(0)
                weight.grad = shard(gradient) if isinstance(weight, DTensor) else gradient
            kernel.step(optimizer, one_kernel(optimizer))
        ends.append([each.full_tensor() if isinstance(each, DTensor) else each for each in group])
    assert isinstance(group[0], DTensor)
    assert group[0]._version > count
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_kinds_are_told_apart():
    weights = [torch.zeros(16), torch.zeros(16), torch.zeros(5), torch.zeros(17)[1:], torch.zeros(8), torch.zeros(24)]
    gradients = [torch.zeros(w.shape, dtype=torch.bfloat16) for w in weights]
    gradients[4] = gradients[4].float()
    copies = [None, *(torch.zeros(w.shape, dtype=torch.bfloat16) for w in weights[1:])]
    optimizer = AdamW(map(nn.Parameter, weights))
    held = optimizer.param_groups[0]["params"]
    slots = slots_of(optimizer, held, gradients=gradients, copies=copies)
    kinds = slots.layout().kinds(w.device for w in held)
    assert [[*kind[1:], places] for kind, places in kinds.items()] == [
        [torch.bfloat16, None, True, [0]],
        [torch.bfloat16, torch.bfloat16, True, [1, 5]],
        [torch.bfloat16, torch.bfloat16, False, [2, 3]],
        [torch.float32, torch.bfloat16, True, [4]],
    ]
    assert slots.at([1, 5]).copies == [copies[1], copies[5]]
    assert len(slots.written()) == 6 * 3 + 5


def test_without_any_gradient_there_are_no_slots_and_no_state():
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    slots = slots_of(optimizer, optimizer.param_groups[0]["params"], gradients=[None])
    assert len(slots) == 0
    assert not slots.layout().kinds([])
    assert not optimizer.state

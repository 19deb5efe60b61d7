import ctypes
import weakref
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

from lightning_ups.optim import MasteredOptimizer, MasterWeights, adamw_step
from lightning_ups.optim.adamw_slots import Slots, slots_of
from lightning_ups.optim.adamw_step import OneKernel, one_kernel, reference_step
from tests.optim.offloading import assert_same, assert_same_state

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
def anywhere(monkeypatch):
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


def train(change, *, kept, by_address=True):
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        if not by_address:
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


def averages(master):
    return {"exp_avg": torch.full_like(master, 0.1), "exp_avg_sq": torch.full_like(master, 0.2)}


def exchange_averages(run):
    run.state["exp_avg"], run.state["exp_avg_sq"] = run.state["exp_avg_sq"], run.state["exp_avg"].abs_()


def exchange_states(run):
    state, one, other = run.inner.state, *(run.masters.of[part.bias] for part in (run.model.tied, run.model.square))
    state[one], state[other] = state[other], state[one]


def load_weights_by_assignment(run):
    with torch.no_grad():
        run.model.norm.weight.set_(torch.full((16,), 0.5))


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
    "fill an average": lambda run: run.state["exp_avg_sq"].fill_(0.1),
    "replace one state": lambda run: run.inner.state.update(
        {run.master: {"step": torch.tensor(1.0), **averages(run.master)}}
    ),
    "forget one state": lambda run: run.inner.state.pop(run.master),
    "empty one state": lambda run: run.state.clear(),
    "clear state": lambda run: run.optimizer.state.clear(),
    "begin anew": lambda run: setattr(run.optimizer, "state", defaultdict(dict)),
    "exchange averages": exchange_averages,
    "exchange states": exchange_states,
    "load weights": lambda run: run.model.load_state_dict({n: v + 0.25 for n, v in run.model.state_dict().items()}),
    "load weights by assignment": load_weights_by_assignment,
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


def move_one(name):
    return lambda run, step: renew(run.state[name]) if step else None


def move_counts(run, step):
    for state in run.inner.state.values():
        state["step"] = state["step"].clone()


def move_gradients(run, step):
    for p in run.model.parameters():
        p.grad = p.grad.clone()


def reorder_state(run, step):
    items = [*run.inner.state.items()]
    run.inner.state.clear()
    run.inner.state.update({master: dict(reversed(state.items())) for master, state in reversed(items)})


def load_state(run, step):
    if step == 2:
        state = run.optimizer.state_dict()["state"]
        run.saved = {"state": {i: {n: v.clone() for n, v in s.items()} for i, s in state.items()}}
    if step == 5:
        run.optimizer.load_state_dict({**run.optimizer.state_dict(), **run.saved})


def transpose_average(run, step):
    if step in (3, 5):
        run.state["exp_avg"] = run.state["exp_avg"].t()


def transpose_average_in_place(run, step):
    if step in (3, 5):
        run.state["exp_avg"].data = run.state["exp_avg"].data.t()


def transpose_weight(run, step):
    if step in (3, 5):
        run.weight.data = run.weight.data.t() if step == 3 else run.weight.data.contiguous()


def reorder_a_group(run, step):
    for group in (*run.optimizer.param_groups, *run.inner.param_groups):
        group["params"].reverse()


def leave_one_out(run, step):
    if step in (0, 3, 4):
        run.weight.grad = None


def leave_out_a_group(run, step):
    if step in (0, 3, 4):
        for p in run.optimizer.param_groups[1]["params"]:
            p.grad = None


def freeze(run, step):
    run.weight.requires_grad_(step % 2 == 0)
    run.weight.grad = run.weight.grad if step % 2 == 0 else None


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


def schedule(run, step):
    run.saved = run.saved or ExponentialLR(run.optimizer, 0.5)
    if step:
        run.saved.step()


def skip(run, step):
    run.inner.found_inf = torch.tensor(float(step in (0, 3, 4)))
    if step > 5:
        del run.inner.found_inf


def leave_to_torch(run, step):
    for group in run.optimizer.param_groups:
        group["foreach"] = step in (2, 3) or None


def hooks(run, step):
    def halve(optimizer, *_):
        for group in run.optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad / 2

    if step == 3:
        run.saved = run.inner.register_step_pre_hook(halve)
    if step == 6:
        run.saved.remove()


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
    "move averages": move_one("exp_avg"),
    "move squares": move_one("exp_avg_sq"),
    **{name: once(change) for name, change in ONCE.items()},
}
for change in (
    clip, move_counts, move_gradients, reorder_state, load_state, transpose_average, transpose_average_in_place,
    transpose_weight, reorder_a_group, leave_one_out, leave_out_a_group, freeze, give_views, give_odd_places,
    give_wide_gradients, another_size_at_the_same_place, gradients_of_another_type_at_the_same_place,
    copies_of_another_type_at_the_same_place, change_options, schedule, skip, leave_to_torch, hooks, write,
):  # fmt: skip
    CHANGES[change.__name__] = change


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_kept_from_step_to_step_changes_no_bit(anywhere, change):
    kept = train(change, kept=True)
    for other in (train(change, kept=False), train(change, kept=True, by_address=False)):
        assert_same(kept.model.state_dict(), other.model.state_dict())
        assert_same(dict(kept.model.named_parameters()), dict(other.model.named_parameters()))
        assert_same_state(kept.optimizer.state_dict(), other.optimizer.state_dict())
    assert ByAddress.laid_out


def step(run, change="nothing", number=0):
    run.give_gradients(number)
    CHANGES[change](run, number)
    run.optimizer.step()


def test_tables_are_made_anew_only_when_something_has_changed(anywhere):
    run, counts = Run(), []
    for change in (*["nothing"] * 4, "move_gradients", "nothing", "replace an average", "nothing"):
        before = ByAddress.laid_out
        step(run, change, number=3)
        counts.append(ByAddress.laid_out - before)
    kinds = [len(each._kinds) for each in run.optimizer._kernel._steps]
    assert kinds == [2, 3], "of even sizes and of odd ones, and with no copy"
    assert counts == [5, 0, 0, 0, 5, 5, 2, 0]


def test_no_tensor_is_kept_from_step_to_step(anywhere):
    run = Run()
    step(run)
    run.give_gradients(1)
    run.weight.grad = run.weight.grad.clone()
    gradient, average = weakref.ref(run.weight.grad), weakref.ref(run.state["exp_avg"])
    run.optimizer.step()
    assert gradient() is None
    run.inner.state.clear()
    assert average() is None


def test_what_a_launch_writes_is_counted_as_written(anywhere):
    run = Run()
    step(run)
    written = [*run.model.parameters(), run.master, run.state["exp_avg"], run.state["exp_avg_sq"]]
    counts = [each._version for each in written]
    step(run)
    assert all(each._version > count for each, count in zip(written, counts, strict=True))


def test_a_failure_while_tables_are_made_leaves_none_behind(anywhere, monkeypatch):
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


def test_a_weight_that_becomes_a_shard_is_stepped_as_before(anywhere, mesh):
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

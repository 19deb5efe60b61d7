import io
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, RMSprop, SparseAdam
from torch.optim.lr_scheduler import OneCycleLR

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer, adamw_step
from lightning_ups.transforms.clip import TakesClipCoefficient
from tests.optim.offloading import (
    LateMemory,
    Net,
    assert_same,
    assert_same_state,
    compare,
    grouped,
    offloaded,
    train,
)

OPTIMIZERS = {
    "adamw": grouped(AdamW),
    "fused": grouped(AdamW, fused=True),
    "amsgrad, loop": grouped(AdamW, amsgrad=True, foreach=False),
    "momentum": grouped(SGD, momentum=0.9),
    "factored": grouped(Adafactor),
    "rms": grouped(RMSprop),
}
WAYS = {
    "parts": {"chunk_bytes": 1},
    "chunks": {"chunk_bytes": 20_000},
    "at once": {},
    "some stay": {"chunk_bytes": 20_000, "resident": 0.4},
    "host": {"update": "host", "chunk_bytes": 20_000},
}


EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
MASTERS = pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])


@EACH_WAY
@MASTERS
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_values_are_those_without_it(make, masters, way):
    memory = LateMemory()
    compare(make, way=way, memory=memory, masters=masters, freeze_at=1)
    assert memory.loads + memory.stores > 0


class Odd(nn.Module):
    """Has a number, as models with a learned temperature do, and a parameter of no elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(64, 8), nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.layer(x) * self.scale + self.nothing.sum()


@EACH_WAY
@MASTERS
def test_a_number_and_nothing_are_parameters_too(masters, way):
    compare(grouped(AdamW), way=way, masters=masters, model=Odd)


@pytest.fixture
def anywhere(monkeypatch):
    """Take every device for one that has AdamW's kernel; the specification stands in for it, and is counted."""
    steps, step = [], adamw_step.reference_step
    monkeypatch.setattr(adamw_step, "_has_kernel", lambda device: True)
    monkeypatch.setattr(adamw_step, "reference_step", lambda *a, **k: (steps.append(1), step(*a, **k)))
    return steps


def clip(step, model, optimizer):
    optimizer.take_clip_coefficient(torch.tensor(0.3))


def meddle(step, model, optimizer):
    model[0].weight.data.clamp_(-0.05, 0.05)  # at every step, as a critic's weights are
    if step == 2:
        with torch.no_grad():
            model[2].bias.fill_(0.25)


def spread(step, model, optimizer):
    parameter = model[0].weight
    parameter.grad = parameter.grad[:, :1].expand_as(parameter)


ONE_KERNEL = {"alone": None, "clip": clip, "others write": meddle, "gaps": spread}


@pytest.mark.parametrize("way", [way for way in WAYS.values() if "update" not in way], ids=[*WAYS][:4])
@pytest.mark.parametrize("between", ONE_KERNEL.values(), ids=ONE_KERNEL)
def test_a_chunk_is_stepped_in_one_kernel_as_all_would_be(anywhere, between, way):
    memory = LateMemory()
    make = grouped(AdamW, weight_decay=0.1)
    ours = compare(make, way=way, memory=memory, between=between, masters=True, freeze_at=1, steps=6)
    assert ours.in_one_kernel
    assert len(anywhere) >= 2 * 6 * 2, "a step for each group, with it and without"
    assert memory.loads > 0


def test_what_the_kernel_does_not_do_the_optimizer_does_by_itself(anywhere):
    for make in (grouped(AdamW, amsgrad=True), grouped(AdamW, fused=False), grouped(SGD, momentum=0.9)):
        assert not compare(make, way={}, masters=True).in_one_kernel
    assert not anywhere


def test_without_masters_the_kernel_is_taken_where_it_would_be_without_offloading(anywhere):
    make = grouped(AdamW)
    for allowed in (False, True):
        _, ours = train(make, wrap=offloaded(), steps=0)
        assert not ours.in_one_kernel
        if allowed:
            ours.allow_one_kernel()
        assert ours.in_one_kernel == allowed


@EACH_WAY
def test_what_others_write_into_a_parameter_is_never_lost(way):
    compare(grouped(AdamW), way=way, masters=True, steps=8, between=meddle)


@MASTERS
@pytest.mark.parametrize("resident", [0.0, 0.9])
def test_state_is_saved_as_what_it_is(masters, resident):
    class Mixed(SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["seen"], state["sum"] = torch.zeros_like(p, dtype=torch.uint8), torch.zeros_like(p).float()
                state["seen"] += 1
                state["sum"] += p.grad

    _, ours = train(grouped(Mixed), masters=masters, wrap=offloaded(resident=resident, chunk_bytes=4096))
    assert resident == 0 or ours.device_bytes > ours.host_bytes
    saved = io.BytesIO()
    torch.save(ours.state_dict(), saved)  # torch refuses one storage of two types
    saved.seek(0)
    assert_same_state(torch.load(saved), ours.state_dict())
    for entries in ours.state_dict()["state"].values():
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in entries.values())
    if masters:
        for master in ours._inner.masters.of.values():
            assert master.untyped_storage().nbytes() == master.nbytes  # a model's checkpoint has no more than weights


@pytest.mark.parametrize(
    ("model", "chunk_bytes", "peak"),
    [
        (Net, 15_000, 3 * 2 * 3 * 1024 * 4),  # three chunks of at most two smallest parts of three tensors
        (lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)]), 50_000, 3 * 51_000),
    ],
    ids=["parts", "layers"],
)
def test_all_state_is_on_the_host_and_three_chunks_are_on_the_device(model, chunk_bytes, peak):
    memory = LateMemory()
    wrap = offloaded(memory, chunk_bytes=chunk_bytes)
    _, ours = train(OPTIMIZERS["adamw"], masters=True, model=model, wrap=wrap)
    state = 12 * sum(p.numel() for p in model().parameters())  # a master and two moments, four bytes each
    assert ours.steps.host_bytes == state
    assert memory.on_host >= state
    assert memory.on_device == ours.steps.device_bytes
    assert memory.peak <= peak
    assert model is Net or peak < 0.4 * state


class Words(nn.Module):
    """Has an embedding whose gradient has the rows that were looked up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 32, sparse=True)

    def forward(self, x):
        return self.words(x.float().abs().long().clamp(max=63))


SPARSE = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: SparseAdam(model.parameters(), lr=0.1),
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own optimizers
@pytest.mark.parametrize("way", [WAYS["at once"], WAYS["host"]], ids=["at once", "host"])
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_gradients_are_stepped(make, way):
    def clip_if_ours(step, model, optimizer):
        assert model.words.weight.grad.is_sparse
        if isinstance(optimizer, OffloadedOptimizer):
            optimizer.take_clip_coefficient(torch.tensor(0.5))
        else:
            model.words.weight.grad.mul_(0.5)

    right, plain = train(make, model=Words, between=clip_if_ours)
    result, ours = train(make, model=Words, between=clip_if_ours, wrap=offloaded(**way))
    assert_same(result, right)
    for name, value in plain.state_dict()["state"][0].items():
        assert torch.equal(to_dense(ours.state_dict()["state"][0][name]), to_dense(value))


def to_dense(value):
    tensor = torch.as_tensor(value)
    return tensor.to_dense() if tensor.is_sparse else tensor


def test_a_sparse_gradient_has_no_parts():
    with pytest.raises(RuntimeError, match=r"or an embedding with sparse=False\.$"):
        train(SPARSE["momentum"], model=Words, wrap=lambda o: OffloadedOptimizer(o, chunk_bytes=4096))


@pytest.mark.parametrize(("save_ours", "load_ours"), [(True, True), (True, False), (False, True)])
@MASTERS
def test_the_same_state_dict_resumes_with_it_and_without(masters, save_ours, load_ours):
    wraps = [offloaded(chunk_bytes=20_000) if ours else None for ours in (save_ours, load_ours)]
    model, optimizer = train_then(masters, wraps[0], range(3))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    model, _ = train_then(masters, wraps[1], range(3, 6), torch.load(saved))
    assert_same(model.state_dict(), train(OPTIMIZERS["fused"], masters=masters, steps=6)[0])


def train_then(masters, wrap, steps, saved=None):
    model = Net()
    optimizer = OPTIMIZERS["fused"](model)
    if masters:
        optimizer = MasteredOptimizer(optimizer, MasterWeights(model, dtype=torch.bfloat16))
    optimizer = wrap(optimizer) if wrap else optimizer
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    inputs = torch.Generator().manual_seed(1)
    for step in range(steps.stop):
        x = torch.randn(4, 64, generator=inputs).to(next(model.parameters()).dtype)
        if step in steps:
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
    return model, optimizer


def test_schedulers_drive_it():
    schedules, rates = [], []

    def between(step, model, optimizer):
        if step == 0:
            schedules.append(OneCycleLR(optimizer, max_lr=0.1, total_steps=5))
        else:
            schedules[-1].step()
        rates.append(optimizer.param_groups[0]["lr"])

    compare(lambda model: AdamW(model.parameters(), lr=1e-2), way={"chunk_bytes": 9999}, between=between)
    assert rates[:4] == rates[4:]


def test_a_clip_coefficient_is_taken_in_the_step():
    def clipped(wrap):
        def between(step, model, optimizer):
            if isinstance(optimizer, OffloadedOptimizer):
                assert isinstance(optimizer, TakesClipCoefficient)
                optimizer.take_clip_coefficient(torch.tensor(0.3))
            else:
                torch._foreach_mul_([p.grad for p in model.parameters()], torch.tensor(0.3))

        return train(OPTIMIZERS["momentum"], wrap=wrap, between=between)[0]

    for way in WAYS.values():
        assert_same(clipped(offloaded(**way)), clipped(None))


@pytest.mark.parametrize("put", [False, True], ids=["added", "put in place"])
@MASTERS
@pytest.mark.parametrize("way", [{}, {"update": "host"}], ids=["device", "host"])
def test_a_group_that_comes_later_is_offloaded_too(way, masters, put):
    def make(model):
        return AdamW(model[0].parameters(), lr=1e-2)

    def between(step, model, optimizer):
        new = {"params": [*model[2].parameters()], "lr": 0.1}
        if step == 2 and put:  # as a resumed callback does that unfreezes parameters; the first group is now the second
            optimizer.param_groups = [{**optimizer.param_groups[0], **new}, {**optimizer.param_groups[0], "lr": 0.03}]
        elif step == 2:
            optimizer.add_param_group(new)

    ours = compare(make, way=way, between=between, masters=masters)
    assert [group["lr"] for group in ours.stepper.param_groups] == ([0.1, 0.03] if put else [1e-2, 0.1])
    each = 12 if masters else 8
    numbers = sum(p.numel() for i in (0, 2) for p in Net()[i].parameters())
    assert each * numbers <= ours.steps.host_bytes < each * numbers + 100


def test_a_closure_and_hooks_are_called_once():
    model, calls = Net(), []
    inner = AdamW(model.parameters(), lr=1e-2)
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("after"))
    ours = OffloadedOptimizer(inner, chunk_bytes=1)

    def closure():
        calls.append("closure")
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        return loss.item()

    expected = closure()
    ours.zero_grad()
    calls.clear()
    assert ours.step(closure) == expected
    assert calls == ["closure", "before", "after"]


def test_state_that_others_move_stays_on_the_host_and_what_they_write_counts():
    memory = LateMemory()
    _, ours = train(OPTIMIZERS["adamw"], wrap=offloaded(memory))
    before = {p: entries["exp_avg"].data_ptr() for p, entries in ours.state.items()}
    for entries in ours.state.values():  # as Lightning does it, when state was restored
        for name, value in entries.items():
            entries[name] = value.clone().mul_(2)
    assert {p: entries["exp_avg"].data_ptr() for p, entries in ours.state.items()} == before
    memory.settle()
    assert all(entries["step"] == 8 for entries in ours.state.values())
    with pytest.raises(TypeError, match=r"or overwrite it\.$"):
        del ours.state[next(iter(ours.state))]


def _anew(optimizer):
    optimizer.state = defaultdict(dict)


def _counted_as_third(optimizer):
    for entries in optimizer.state.values():
        entries["step"].fill_(3)


def _made_by_hand(optimizer):
    for key in [*optimizer.state]:
        moments = {name: torch.full(key.shape, 0.5) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[key] = {"step": torch.tensor(7.0), **moments, "max_exp_avg_sq": torch.ones(key.shape)}


@MASTERS
@EACH_WAY
@pytest.mark.parametrize("write", [_anew, _counted_as_third, _made_by_hand])
def test_whatever_is_written_into_the_state_counts(write, way, masters):
    def between(step, _, optimizer):
        if step == 2:
            write(optimizer)

    compare(OPTIMIZERS["adamw"], way=way, masters=masters, between=between)


@MASTERS
@EACH_WAY
def test_undone_it_leaves_the_optimizer_as_it_would_be(way, masters):
    _, plain = train(OPTIMIZERS["adamw"], masters=masters)
    _, ours = train(OPTIMIZERS["adamw"], masters=masters, wrap=offloaded(**way))
    inner = ours.undo()
    assert type(inner) is type(plain)
    assert_same_state(inner.state_dict(), plain.state_dict())
    if masters:
        assert all(type(master) is nn.Parameter for master in inner.masters.of.values())


def made_on_a_gpu(wrap, make, *, masters):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).cuda()
    optimizer = make(model)
    if masters:
        optimizer = MasteredOptimizer(optimizer, MasterWeights(model, dtype=torch.bfloat16))
    return model, wrap(optimizer)


def on_a_gpu(wrap, make, saved=None, steps=range(4), masters=False):
    model, optimizer = made_on_a_gpu(wrap, make, masters=masters)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in steps:
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).cuda().to(model[0].weight.dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.gpu(count=1)
@MASTERS
@pytest.mark.parametrize("way", [{"chunk_bytes": 2**18}, {"chunk_bytes": 2**20, "resident": 0.4}], ids=repr)
def test_on_a_gpu_values_stay_and_it_resumes_equal(way, masters):
    make = grouped(AdamW, fused=False, foreach=True)  # the kernels that step the masters without it, too
    wrap = lambda o: OffloadedOptimizer(o, **way)  # noqa: E731
    right, _ = on_a_gpu(lambda o: o, make, masters=masters)
    model, ours = on_a_gpu(wrap, make, masters=masters)
    assert_same(on_host(model.state_dict()), on_host(right.state_dict()))
    states = ours.state_dict()["state"]
    assert any(entries["exp_avg"].is_pinned() for entries in states.values())
    assert ours.device_bytes < 0.6 * ours.host_bytes + 2**22
    saved = on_a_gpu(wrap, make, masters=masters, steps=range(2))
    saved = {"model": saved[0].state_dict(), "optimizer": saved[1].state_dict()}
    again, _ = on_a_gpu(wrap, make, saved=saved, steps=range(2, 4), masters=masters)
    assert_same(on_host(again.state_dict()), on_host(model.state_dict()))


def on_host(state):
    return {name: value.cpu() for name, value in state.items()}


@pytest.mark.gpu(count=1)
@MASTERS
def test_on_a_gpu_the_cpu_steps(masters):
    make = grouped(AdamW, fused=True)
    right = stepped_on_a_gpu(lambda o: o, make, masters=masters)[0]
    model, ours = stepped_on_a_gpu(
        lambda o: OffloadedOptimizer(o, update="host", chunk_bytes=2**21), make, masters=masters
    )
    for name, value in right.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)
    assert ours.device_bytes == 0


def stepped_on_a_gpu(wrap, make, *, masters):
    """Step with gradients that are given: those of a model would carry every rounding on to the next step."""
    model, optimizer = made_on_a_gpu(wrap, make, masters=masters)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"update": "gpu"}, r"Use one of \('device', 'host'\)\.$"),
        ({"chunk_bytes": 0}, r"such as 2\*\*28\.$"),
        ({"resident": 1.0}, r"or update='device'\.$"),
        ({"resident": 0.5, "update": "host"}, r"or update='device'\.$"),
    ],
)
def test_bad_arguments(options, cure):
    with pytest.raises(ValueError, match=cure):
        OffloadedOptimizer(AdamW(Net().parameters()), **options)

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer, master_weights


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


def batch(dtype=torch.float32):
    return torch.linspace(-1, 1, 32).reshape(4, 8).to(dtype)


def with_masters(model, make=SGD, *, lr=1e-6, parameters=None, tell=warnings.warn, **options):
    """Return masters of the module in bfloat16, and an optimizer that steps them."""
    masters = MasterWeights(model, dtype=torch.bfloat16, tell=tell)
    trained = [p for p in parameters or model.parameters() if p.requires_grad]
    return masters, MasteredOptimizer(make(trained, lr=lr), masters, **options)


def step(model, optimizer):
    model(batch(torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_specification(model, *, steps, lr=1e-2, micro=1, clip=None):
    """AdamW on float32 weights with gradients that a bfloat16 copy of them computed: the specification."""
    optimizer, losses = AdamW(model.parameters(), lr=lr), []
    for _ in range(steps):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for part in range(micro):
            low = copy.deepcopy(model).to(torch.bfloat16)
            loss = low(batch(torch.bfloat16) * (part + 1)).float().square().mean()
            loss.backward()
            total = [t + p.grad.float() for t, p in zip(total, low.parameters(), strict=True)]
        if clip is not None:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in total]))
            total = [t * (clip / (norm + 1e-6)).clamp(max=1) for t in total]
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = t
        optimizer.step()
        losses.append(loss.item())
    return losses


def mastered(model, *, steps, lr=1e-2, micro=1, clip=None, make=AdamW, **options):
    (masters, optimizer), losses = with_masters(model, make, lr=lr, **options), []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss = model(batch(torch.bfloat16) * (part + 1)).float().square().mean()
            loss.backward()
        if clip is not None:
            norm = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(g.float()) for g in optimizer.gradients()])
            )
            optimizer.take_clip_coefficient((clip / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        losses.append(loss.item())
    return losses, masters, optimizer


def test_state_dicts_show_the_masters_under_the_same_names_and_load_into_them():
    model, outer = make_model(), nn.Module()
    plain = {f"inner.{k}": v.clone() for k, v in model.state_dict().items()}
    outer.inner = model
    masters = MasterWeights(model, dtype=torch.bfloat16)
    shown = outer.state_dict()
    assert list(shown) == list(plain)
    assert all(torch.equal(shown[k], plain[k]) and shown[k].dtype is torch.float32 for k in plain)
    other = {k: v + 1e-4 for k, v in plain.items()}
    outer.load_state_dict(other)
    assert torch.equal(masters.of[model[0].weight], other["inner.0.weight"])
    assert torch.equal(model[0].weight, other["inner.0.weight"].to(torch.bfloat16))
    assert all(torch.equal(outer.state_dict()[k], other[k]) for k in plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_masters_of_torchscript_are_refused_unless_it_is_left_in_float32():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"1 is a module of TorchScript.* weights='autocast'"):
        MasterWeights(model, dtype=torch.bfloat16)
    masters = MasterWeights(model, dtype=torch.bfloat16, leave=[*model[1].modules()])
    assert [*masters.of] == [model[0].weight, model[0].bias]


def test_undo_gives_the_float32_module_back():
    model = make_model()
    identities = [id(p) for p in model.parameters()]
    _, masters, optimizer = mastered(model, steps=2)
    kept = {name: master.clone() for name, master in model.state_dict().items()}
    inner = optimizer.undo()
    masters.undo()
    assert [id(p) for p in model.parameters()] == identities
    assert all(p.dtype is torch.float32 and torch.equal(p, kept[n]) for n, p in model.named_parameters())
    assert not model._state_dict_hooks
    model(batch()).sum().backward()
    inner.step()  # goes on with its averages, over the module's own parameters
    assert {int(s["step"]) for s in inner.state.values()} == {3}


def test_ties_and_frozen_parameters_and_statistics():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    masters = MasterWeights(model, dtype=torch.bfloat16)
    assert model[1].weight is model[0].weight
    assert len(masters.of) == 3  # one weight, two biases
    assert not masters.of[model[0].bias].requires_grad
    assert {p.dtype for p in model[2].parameters()} == {torch.float32}
    model(batch(torch.bfloat16)).float().sum().backward()
    MasteredOptimizer(SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), masters).step()
    state = model.state_dict()
    assert torch.equal(state["0.weight"], state["1.weight"])


class Scaled(nn.Embedding):
    """As Gemma has it: a constant that no state dict has."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.scale.to(self.weight.dtype)


def test_a_constant_beside_a_weight_is_no_statistic():
    model = nn.Sequential(Scaled(), nn.Linear(8, 8))
    masters = MasterWeights(model, dtype=torch.bfloat16)
    assert len(masters.of) == 3
    assert model(torch.arange(8)).dtype is torch.bfloat16


def test_a_part_shows_and_loads_its_masters_too():
    model = make_model()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    masters = MasterWeights(model, dtype=torch.bfloat16)
    shown = model[0].state_dict()
    assert {value.dtype for value in shown.values()} == {torch.float32}
    assert all(torch.equal(value, whole[f"0.{name}"]) for name, value in shown.items())
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert torch.equal(model[0].state_dict()["weight"], torch.full_like(whole["0.weight"], 0.5))
    model[0].load_state_dict({name: value + 1e-4 for name, value in shown.items()})
    masters.undo()
    assert torch.equal(model[0].bias, whole["0.bias"] + 1e-4)
    assert not any(part._state_dict_hooks or part._load_state_dict_pre_hooks for part in model.modules())


def test_a_copy_made_meanwhile_shows_its_own_masters():
    model = make_model()
    MasterWeights(model, dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert model.state_dict()["0.weight"].abs().sum() == 0
    assert torch.equal(twin.state_dict()["0.weight"], make_model()[0].weight)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_meanwhile_is_the_float32_module(clone):
    model = make_model()
    model[2].weight = model[0].weight = nn.Parameter(torch.randn(8, 8))
    model[0].bias = nn.Parameter(torch.randn(8))
    masters = MasterWeights(model, dtype=torch.bfloat16)
    model[3].requires_grad_(False)
    twin = clone(model)
    assert all(torch.equal(t, masters.of[p]) for p, t in zip(model.parameters(), twin.parameters(), strict=True))
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert twin[0].weight is twin[2].weight
    with torch.no_grad():
        twin[0].weight.zero_()
    assert not twin.state_dict()["0.weight"].any(), "and it shows what it has"
    assert masters.of[model[0].weight].any()
    masters.undo()
    assert "__deepcopy__" not in vars(model[0].weight)
    assert torch.equal(clone(model)[0].weight, model[0].weight)


def in_place(parameter, change):
    with torch.no_grad():
        change(parameter)


def through_data(parameter, change):
    change(parameter.data)


@pytest.mark.parametrize("write", [in_place, through_data])
def test_what_others_write_is_taken_over(write):
    model = make_model()
    model[2].weight.requires_grad_(False)  # as a target network's is
    told = []
    masters, optimizer = with_masters(model, tell=told.append)
    for number in range(60):
        step(model, optimizer)
        write(model[0].weight, lambda weight: weight.clamp_(-0.01, 0.01))
        write(model[2].weight, lambda weight, number=number: weight.fill_(number))
        state = model.state_dict()
        assert state["0.weight"].abs().max() <= 0.011, number
        assert torch.equal(state["2.weight"], torch.full((8, 32), float(number)))
    masters.undo()
    assert model[0].weight.abs().max() <= 0.011
    assert torch.equal(model[2].weight, torch.full((8, 32), 59.0))
    assert len(told) == (write is in_place)
    assert all(re.match(r"2 parameters, 0.weight among them, .* in_float32=\['0'\]", each) for each in told)


def test_small_changes_by_others_are_told_and_state_dicts_and_single_writes_are_not():
    model, told = make_model(), []
    masters, optimizer = with_masters(model, parameters=model[0].parameters(), tell=told.append)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(6):
        model.load_state_dict(kept)
        step(model, optimizer)
    for _ in range(2):
        in_place(model[2].bias, lambda bias: bias.zero_())
        step(model, optimizer)
        step(model, optimizer)
    assert not told
    before = masters.of[model[2].weight].detach().clone()
    for _ in range(5):
        in_place(model[2].weight, lambda weight: weight.mul_(1 - 1e-3))
        step(model, optimizer)
    assert torch.equal(masters.of[model[2].weight], before), "nothing of it is left"
    (line,) = told
    assert line.startswith("1 parameters, 2.weight among them, are written in place in one step after another")


def test_other_memory_is_seen_at_once():
    model = make_model()
    masters, optimizer = with_masters(model)
    for number in range(9):
        step(model, optimizer)
        if number == 5:  # at which nothing is looked for
            zeros = torch.zeros_like(parameters_to_vector(model.parameters()))
            vector_to_parameters(zeros, model.parameters())
    assert all(master.abs().max() < 1e-3 for master in masters.of.values())


def test_what_nobody_wrote_keeps_all_its_bits():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    with torch.no_grad():
        model[0].weight[0, 0] = 5.0
    masters.take_over()
    expected = make_model()[0].weight.detach().clone()
    expected[0, 0] = 5.0
    assert torch.equal(masters.of[model[0].weight], expected)


class Largest(TorchDispatchMode):
    """Sees how many bytes the largest tensor has that an operator makes."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.nbytes = max(self.nbytes, made.nbytes)
        return out


def write_two_and_take_over(model, masters):
    before = masters.of[model.weight].detach().clone()
    model.weight.data[3, 7], model.weight.data[49, 39] = 2.0, 3.0
    with Largest() as largest:
        masters.take_over(by_value=True)
    after = masters.of[model.weight].detach()
    assert (after[3, 7], after[49, 39]) == (2.0, 3.0)
    assert (after != before).sum() == 2
    return largest


@pytest.mark.parametrize(("turned", "offloaded"), [(False, False), (False, True), (True, False)])
def test_a_large_weight_is_looked_at_in_pieces(monkeypatch, turned, offloaded):
    monkeypatch.setattr(master_weights, "PIECE", 64)
    model = nn.Linear(40, 50)
    if turned:  # of gaps between its numbers in the order of memory: as a whole
        model.weight.data = model.weight.data.T.contiguous().T
    masters = MasterWeights(model, dtype=torch.bfloat16)
    if offloaded:
        OffloadedOptimizer(MasteredOptimizer(AdamW(model.parameters()), masters))
    largest = write_two_and_take_over(model, masters)
    assert largest.nbytes == (4 * 2000 if turned else 4 * 64)


@pytest.mark.gpu(count=1)
def test_a_master_on_the_host_takes_over_what_was_written_on_the_device(monkeypatch):
    monkeypatch.setattr(master_weights, "PIECE", 64)
    model = nn.Linear(40, 50, device="cuda")
    masters = MasterWeights(model, dtype=torch.bfloat16)
    for master in masters.of.values():
        master.data = master.data.cpu()
    write_two_and_take_over(model, masters)
    assert masters.of[model.weight].device.type == "cpu"
    masters.undo()
    assert (model.weight.device.type, model.weight.dtype) == ("cuda", torch.float32)


def test_uncounted_writes_that_begin_late_are_found_at_a_later_look():
    model = make_model()
    (masters, optimizer), kept = with_masters(model), []
    for number in range(120):
        if number > 10:
            model[0].weight.data.clamp_(-0.01, 0.01)
        step(model, optimizer)
        kept.append(masters.of[model[0].weight].abs().max().item() <= 0.011)
    assert not kept[30]  # the price of not looking each time
    assert all(kept[49:])


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_without_a_shape_is_refused_and_left_as_it_is():
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet.*batch through the module before fit"):
        MasterWeights(model, dtype=torch.bfloat16)
    model(torch.ones(2, 8))
    MasterWeights(model, dtype=torch.bfloat16).undo()

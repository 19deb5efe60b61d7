import copy
import io
import pickle
import re
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer, master_weights
from lightning_ups.transforms.clip import TakesClipCoefficient


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


def batch(dtype=torch.float32):
    return torch.linspace(-1, 1, 32).reshape(4, 8).to(dtype)


def by_hand(model, *, steps, lr=1e-2, micro=1, clip=None):
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
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer, losses = MasteredOptimizer(make(model.parameters(), lr=lr), masters, **options), []
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


def test_losses_and_masters_are_those_of_the_specification_bit_for_bit():
    model, expected = make_model(), make_model()
    losses, masters, _ = mastered(model, steps=5)
    assert losses == by_hand(expected, steps=5)
    for p, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.dtype is torch.bfloat16
        assert torch.equal(masters.of[p], e)
        assert torch.equal(p, e.to(torch.bfloat16))


def test_small_steps_are_not_lost_as_they_are_in_bfloat16_alone():
    model, plain = make_model(), make_model().to(torch.bfloat16)
    _, masters, _ = mastered(model, steps=3, lr=1e-6, make=SGD)
    optimizer, before = SGD(plain.parameters(), lr=1e-6), [p.clone() for p in plain.parameters()]
    plain(batch(torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(plain[0].parameters(), before[:2], strict=True))
    assert not torch.equal(masters.of[model[0].weight], make_model()[0].weight)


def test_the_clip_coefficient_is_folded_in():
    model, expected = make_model(), make_model()
    losses, _, optimizer = mastered(model, steps=4, clip=0.01)
    assert isinstance(optimizer, TakesClipCoefficient)
    assert losses == by_hand(expected, steps=4, clip=0.01)
    free, _, _ = mastered(make_model(), steps=4)
    assert losses != free


def test_microbatches_are_added_in_float32():
    model, expected = make_model(), make_model()
    losses, masters, _ = mastered(model, steps=3, micro=4, accumulate=True)
    assert losses == by_hand(expected, steps=3, micro=4)
    for p, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(masters.of[p], e)
    rough, _, _ = mastered(make_model(), steps=3, micro=4)  # added in bfloat16
    assert rough != losses


def test_no_low_precision_gradient_is_kept_while_accumulating():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(SGD(model.parameters(), lr=0.1), masters, accumulate=True)
    model(batch(torch.bfloat16)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.gradients()) == len(list(model.parameters()))
    optimizer.zero_grad()
    assert optimizer.gradients() == []


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


def test_resume_continues_the_same_losses():
    whole, _, _ = mastered(make_model(), steps=6)
    first = make_model()
    losses, _, optimizer = mastered(first, steps=3)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    second = make_model()
    second.load_state_dict(saved["model"])
    masters = MasterWeights(second, dtype=torch.bfloat16)
    later = MasteredOptimizer(AdamW(second.parameters(), lr=1e-2), masters)
    later.load_state_dict(saved["optimizer"])
    for _ in range(3):
        later.zero_grad()
        loss = second(batch(torch.bfloat16)).float().square().mean()
        loss.backward()
        later.step()
        losses.append(loss.item())
    assert losses == whole


def test_a_checkpoint_moves_to_and_from_a_plain_optimizer():
    model = make_model()
    _, _, optimizer = mastered(model, steps=2)
    plain = make_model()
    AdamW(plain.parameters(), lr=1e-2).load_state_dict(optimizer.state_dict())


def test_a_scheduler_and_parameter_groups_keep_their_meaning():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    groups = [{"params": [model[0].weight], "lr": 1.0}, {"params": [model[2].weight], "lr": 0.5, "weight_decay": 0.1}]
    optimizer = MasteredOptimizer(AdamW(groups), masters)
    scheduler = ExponentialLR(optimizer, 0.5)
    model(batch(torch.bfloat16)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.state_dict()["param_groups"]] == [0.5, 0.25]
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert optimizer.inner.param_groups[0]["params"][0] is masters.of[model[0].weight]


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


@pytest.mark.parametrize("stepped", [False, True])
def test_state_that_an_optimizer_has_already_is_that_of_the_masters(stepped):
    optimizers = []
    for mastered in (False, True):
        model = make_model()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        if stepped:
            (model(batch(torch.float32)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if mastered:
            masters = MasterWeights(model, dtype=torch.bfloat16)
            if not stepped:  # as in a fit, where the module is in bfloat16 by then
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
            optimizer = MasteredOptimizer(optimizer, masters)
        (model(batch(next(model.parameters()).dtype)).float() - 1).square().mean().backward()
        optimizer.step()
        optimizers.append(optimizer.undo() if mastered else optimizer)
        if mastered:
            masters.undo()
            assert optimizer.inner.state.keys() == {*model.parameters()}
    right, ours = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for key, state in right.items():
        assert ours[key]["sum"].dtype is torch.float32
        assert ours[key]["step"] == state["step"] == 1 + stepped
        torch.testing.assert_close(ours[key]["sum"], state["sum"], rtol=3e-2, atol=1e-2)


def test_a_parameter_without_gradient_keeps_its_value():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(AdamW(model.parameters(), lr=1.0), masters)
    before = masters.of[model[2].weight].clone()
    model[0](batch(torch.bfloat16)).sum().backward()
    optimizer.step()
    assert torch.equal(masters.of[model[2].weight], before)
    assert not torch.equal(masters.of[model[0].weight], make_model()[0].weight)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_gradient_that_is_set_to_zero_and_not_to_none_steps_its_weight(offloaded, accumulate):
    def train(optimizer, model, dtype):
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            used = model[:3] if step == 1 else model[:1]  # the second layer is used in one step, the norm in none
            used(batch(dtype)).float().square().mean().backward()
            optimizer.step()
        return model.state_dict()

    def make(model):
        return AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    plain, model = make_model(), make_model()
    right = train(make(plain), plain, torch.float32)
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(make(model), masters, accumulate=accumulate)
    found = train(OffloadedOptimizer(optimizer) if offloaded else optimizer, model, torch.bfloat16)
    start = make_model().state_dict()
    for name, value in right.items():
        assert (found[name] - value).norm() <= 0.1 * (value - start[name]).norm(), name


def test_what_is_unfrozen_has_its_microbatches_added_in_float32():
    weight = nn.Linear(1, 1, bias=False).requires_grad_(requires_grad=False)
    nn.init.zeros_(weight.weight)
    masters = MasterWeights(weight, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(SGD(weight.parameters(), lr=1.0), masters, accumulate=True)
    weight.requires_grad_()
    optimizer.zero_grad()
    for gradient in (1.0, 2**-9, 2**-9):
        weight(torch.tensor([[gradient]], dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert weight.state_dict()["weight"].item() == -1 - 2**-8


@pytest.mark.parametrize("offloaded", [False, True])
def test_hooks_that_it_is_given_are_called_once(offloaded):
    model = make_model()
    optimizer = MasteredOptimizer(AdamW(model.parameters()), MasterWeights(model, dtype=torch.bfloat16))
    if offloaded:
        optimizer = OffloadedOptimizer(optimizer)
    called = []
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        optimizer.register_state_dict_pre_hook,
        optimizer.register_state_dict_post_hook,
        optimizer.register_load_state_dict_pre_hook,
        optimizer.register_load_state_dict_post_hook,
    ):
        register(lambda *_, name=register.__name__: called.append(name))
    model(batch(torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == [
        f"register_{what}_{when}_hook" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
    ]


def test_an_optimizer_that_computes_the_loss_itself_is_refused():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"LBFGS computes the loss again.*weights='autocast'"):
        MasteredOptimizer(torch.optim.LBFGS(model.parameters()), masters)


class WithModes(AdamW):
    def train(self): ...

    def eval(self): ...


def test_an_optimizer_with_other_weights_for_evaluation_is_refused():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"WithModes has other weights for evaluation.*weights='autocast'"):
        MasteredOptimizer(WithModes(model.parameters()), masters)


class Outer(torch.optim.Optimizer):
    """Lets others step, whose groups it shows or has copies of."""

    def __init__(self, inside, *, shows):
        super().__init__([{**group} for each in inside for group in each.param_groups], {})
        self.inside, self.itself = inside, self
        if shows:
            self.param_groups = [group for each in inside for group in each.param_groups]

    def step(self, closure=None):
        for each in self.inside:
            each.step()


@pytest.mark.parametrize("shows", [False, True])
def test_an_optimizer_that_lets_another_step_shows_its_groups_or_is_refused(shows):
    model = make_model()
    start = copy.deepcopy(model.state_dict())
    masters = MasterWeights(model, dtype=torch.bfloat16)
    outer = Outer([SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])], shows=shows)
    if not shows:
        with pytest.raises(ValueError, match=r"Outer lets an optimizer inside it, SGD.*Set weights='autocast' in"):
            MasteredOptimizer(outer, masters)
        assert [p for group in outer.param_groups for p in group["params"]] == [*model.parameters()]
        return
    optimizer = MasteredOptimizer(outer, masters)
    model(batch(torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(start[name], value) for name, value in model.state_dict().items() if "weight" in name)


class Keeps(torch.optim.Optimizer):
    """Steps parameters that it keeps, or those of its groups, by writes that torch does not count."""

    def __init__(self, parameters, *, lr, itself):
        self.kept = [*parameters] if itself else None
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for p in self.kept or self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.sub_(self.param_groups[0]["lr"] * p.grad.data)


@pytest.mark.parametrize("itself", [False, True])
def test_an_optimizer_that_would_step_nothing_says_so_at_its_first_step_with_a_rate(itself):
    model = make_model()
    parameters = [*model.parameters()]
    optimizer = MasteredOptimizer(Keeps(parameters, lr=0.0, itself=itself), MasterWeights(model, dtype=torch.bfloat16))
    for rate in (0.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        model(batch(torch.bfloat16)).float().square().mean().backward()
        if rate and itself:
            with pytest.raises(RuntimeError, match=r"Keeps stepped and wrote to none of 6 .*Set weights='autocast'"):
                optimizer.step()
        else:
            optimizer.step()


class Sharpness(torch.optim.SGD):
    """Tries out weights within a step, as SAM does; its closure has a default, as the interface of torch has it."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "needs a closure"
        loss = torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            p.add_(0.1)
        if self.param_groups[0]["momentum"]:
            torch.enable_grad()(closure)()
        super().step()
        return loss


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_computes_it_twice_is_refused_when_it_does(times):
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(Sharpness(model.parameters(), momentum=times - 1), masters)
    calls = []

    def closure():
        calls.append(model(batch(torch.bfloat16)).sum())
        calls[-1].backward()
        return calls[-1]

    if times == 1:
        assert optimizer.step(closure) is calls[0]
    else:
        with pytest.raises(ValueError, match=r"Sharpness computes the loss again.*weights='autocast' in the precision"):
            optimizer.step(closure)
    assert len(calls) == 1


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
    masters = MasterWeights(model, dtype=torch.bfloat16, tell=told.append)
    optimizer = MasteredOptimizer(SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6), masters)
    for step in range(60):
        model(batch(torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        write(model[0].weight, lambda weight: weight.clamp_(-0.01, 0.01))
        write(model[2].weight, lambda weight, step=step: weight.fill_(step))
        state = model.state_dict()
        assert state["0.weight"].abs().max() <= 0.011, step
        assert torch.equal(state["2.weight"], torch.full((8, 32), float(step)))
    masters.undo()
    assert model[0].weight.abs().max() <= 0.011
    assert torch.equal(model[2].weight, torch.full((8, 32), 59.0))
    assert len(told) == (write is in_place)
    assert all(re.match(r"2 parameters, 0.weight among them, .* in_float32=\['0'\]", each) for each in told)


def test_small_changes_by_others_are_told_and_state_dicts_and_single_writes_are_not():
    model, told = make_model(), []
    masters = MasterWeights(model, dtype=torch.bfloat16, tell=told.append)
    optimizer = MasteredOptimizer(SGD(model[0].parameters(), lr=1e-6), masters)

    def step():
        model(batch(torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(6):
        model.load_state_dict(kept)
        step()
    for _ in range(2):
        in_place(model[2].bias, lambda bias: bias.zero_())
        step()
        step()
    assert not told
    before = masters.of[model[2].weight].detach().clone()
    for _ in range(5):
        in_place(model[2].weight, lambda weight: weight.mul_(1 - 1e-3))
        step()
    assert torch.equal(masters.of[model[2].weight], before), "nothing of it is left"
    (line,) = told
    assert line.startswith("1 parameters, 2.weight among them, are written in place in one step after another")


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused(copied):
    model = make_model()
    optimizer = MasteredOptimizer(SGD(model.parameters(), lr=0.1), MasterWeights(model, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="A MasteredOptimizer over SGD can be neither copied nor pickled"):
        copied(optimizer)
    copied(model)
    assert isinstance(copied(optimizer.undo()), (SGD, bytes))


def test_other_memory_is_seen_at_once():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(SGD(model.parameters(), lr=1e-6), masters)
    for step in range(9):
        model(batch(torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:  # at which nothing is looked for
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


@pytest.mark.parametrize(("turned", "offloaded"), [(False, False), (False, True), (True, False)])
def test_a_large_weight_is_looked_at_in_pieces(monkeypatch, turned, offloaded):
    monkeypatch.setattr(master_weights, "PIECE", 64)
    model = nn.Linear(40, 50)
    if turned:  # of gaps between its numbers in the order of memory: as a whole
        model.weight.data = model.weight.data.T.contiguous().T
    masters = MasterWeights(model, dtype=torch.bfloat16)
    if offloaded:
        OffloadedOptimizer(MasteredOptimizer(AdamW(model.parameters()), masters))
    before = masters.of[model.weight].detach().clone()
    model.weight.data[3, 7], model.weight.data[49, 39] = 2.0, 3.0
    with Largest() as largest:
        masters.take_over(by_value=True)
    after = masters.of[model.weight].detach()
    assert (after[3, 7], after[49, 39]) == (2.0, 3.0)
    assert (after != before).sum() == 2
    assert largest.nbytes == (4 * 2000 if turned else 4 * 64)


@pytest.mark.gpu(count=1)
def test_a_master_on_the_host_takes_over_what_was_written_on_the_device(monkeypatch):
    monkeypatch.setattr(master_weights, "PIECE", 64)
    model = nn.Linear(40, 50, device="cuda")
    masters = MasterWeights(model, dtype=torch.bfloat16)
    for master in masters.of.values():
        master.data = master.data.cpu()
    before = masters.of[model.weight].detach().clone()
    model.weight.data[3, 7], model.weight.data[49, 39] = 2.0, 3.0
    masters.take_over(by_value=True)
    after = masters.of[model.weight].detach()
    assert (after.device.type, after[3, 7], after[49, 39]) == ("cpu", 2.0, 3.0)
    assert (after != before).sum() == 2
    masters.undo()
    assert (model.weight.device.type, model.weight.dtype) == ("cuda", torch.float32)


def test_uncounted_writes_that_begin_late_are_found_at_a_later_look():
    model = make_model()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(SGD(model.parameters(), lr=1e-6), masters)
    kept = []
    for step in range(120):
        model(batch(torch.bfloat16)).float().sum().backward()
        if step > 10:
            model[0].weight.data.clamp_(-0.01, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        kept.append(masters.of[model[0].weight].abs().max().item() <= 0.011)
    assert not kept[30]  # the price of not looking each time
    assert all(kept[49:])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("way", ["added", "put in place"])
def test_a_group_that_comes_later_is_stepped_from_then_on(way, accumulate):
    def train(*, later):
        model = make_model()
        first, second = [*model[0].parameters()], [*model[2:].parameters()]
        for p in second:
            p.requires_grad_(requires_grad=False)
        masters = MasterWeights(model, dtype=torch.bfloat16)
        groups = [{"params": first}, *([] if later else [{"params": second, "lr": 3e-3}])]
        optimizer = MasteredOptimizer(AdamW(groups, lr=1e-2), masters, accumulate=accumulate)
        for step in range(5):
            if step == 2:
                for p in second:
                    p.requires_grad_(requires_grad=True)
                if later == "added":
                    optimizer.add_param_group({"params": second, "lr": 3e-3})
                elif later == "put in place":  # as a resumed callback does that unfreezes parameters
                    groups = optimizer.param_groups
                    optimizer.param_groups = [*groups, {**groups[0], "params": second, "lr": 3e-3}]
            optimizer.zero_grad()
            model(batch(torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
        state = optimizer.state_dict()
        assert len(optimizer.inner.param_groups) == len(optimizer.param_groups) == 2
        assert optimizer.undo().param_groups[1]["params"] == second
        return model.state_dict(), state

    (model, state), (expected, expected_state) = train(later=way), train(later=None)
    assert all(torch.equal(model[name], value) for name, value in expected.items())
    assert state["param_groups"][1]["lr"] == 3e-3
    assert state["state"].keys() == expected_state["state"].keys()


def test_state_that_is_put_in_the_place_of_all_is_that_of_the_masters():
    model = make_model()
    optimizer = MasteredOptimizer(AdamW(model.parameters(), lr=1e-2), MasterWeights(model, dtype=torch.bfloat16))
    for anew in (False, True):
        if anew:
            optimizer.state = defaultdict(dict)
        model(batch(torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    optimizer.state = {p: {"step": torch.tensor(4.0)} for p in model.parameters()}
    assert [*optimizer.state] == [*optimizer.masters.of.values()]


def test_state_that_is_there_keeps_its_order():
    model = make_model()
    parameters = [*model.parameters()]
    groups = [{"params": parameters[1::2]}, {"params": parameters[::2]}]
    right = [*Adagrad(groups).state_dict()["state"]]
    inner = Adagrad(groups)
    assert [*MasteredOptimizer(inner, MasterWeights(model, dtype=torch.bfloat16)).state_dict()["state"]] == right


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_without_a_shape_is_refused_and_left_as_it_is():
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet.*batch through the module before fit"):
        MasterWeights(model, dtype=torch.bfloat16)
    model(torch.ones(2, 8))
    MasterWeights(model, dtype=torch.bfloat16).undo()

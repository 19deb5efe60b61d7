import copy
import io
import pickle
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer
from lightning_ups.transforms.clip import TakesClipCoefficient
from tests.optim.test_master_weights import batch, by_specification, make_model, mastered, step, with_masters


def test_losses_and_masters_are_those_of_the_specification_bit_for_bit():
    model, expected = make_model(), make_model()
    losses, masters, _ = mastered(model, steps=5)
    assert losses == by_specification(expected, steps=5)
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
    assert losses == by_specification(expected, steps=4, clip=0.01)
    free, _, _ = mastered(make_model(), steps=4)
    assert losses != free


def test_resume_continues_the_same_losses():
    whole, _, _ = mastered(make_model(), steps=6)
    first = make_model()
    losses, _, optimizer = mastered(first, steps=3)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    AdamW(make_model().parameters(), lr=1e-2).load_state_dict(saved["optimizer"])  # as a plain one does
    second = make_model()
    second.load_state_dict(saved["model"])
    _, later = with_masters(second, AdamW, lr=1e-2)
    later.load_state_dict(saved["optimizer"])
    for _ in range(3):
        later.zero_grad()
        loss = second(batch(torch.bfloat16)).float().square().mean()
        loss.backward()
        later.step()
        losses.append(loss.item())
    assert losses == whole


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


@pytest.mark.parametrize("stepped", [False, True])
def test_state_that_an_optimizer_has_already_is_that_of_the_masters(stepped):
    optimizers = []
    for has_masters in (False, True):
        model = make_model()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        if stepped:
            (model(batch(torch.float32)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if has_masters:
            masters = MasterWeights(model, dtype=torch.bfloat16)
            if not stepped:  # as in a fit, where the module is in bfloat16 by then
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
            optimizer = MasteredOptimizer(optimizer, masters)
        (model(batch(next(model.parameters()).dtype)).float() - 1).square().mean().backward()
        optimizer.step()
        optimizers.append(optimizer.undo() if has_masters else optimizer)
        if has_masters:
            masters.undo()
            assert optimizer.inner.state.keys() == {*model.parameters()}
    right, ours = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for key, state in right.items():
        assert ours[key]["sum"].dtype is torch.float32
        assert ours[key]["step"] == state["step"] == 1 + stepped
        torch.testing.assert_close(ours[key]["sum"], state["sum"], rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("offloaded", [False, True])
def test_hooks_that_it_is_given_are_called_once(offloaded):
    model = make_model()
    _, optimizer = with_masters(model, AdamW)
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


class WithModes(AdamW):
    def train(self): ...

    def eval(self): ...


@pytest.mark.parametrize(
    ("kind", "text"),
    [(torch.optim.LBFGS, "computes the loss again"), (WithModes, "has other weights for evaluation")],
)
def test_an_optimizer_whose_steps_need_more_than_gradients_is_refused(kind, text):
    model = make_model()
    with pytest.raises(ValueError, match=rf"{kind.__name__} {text}.*weights='autocast'"):
        MasteredOptimizer(kind(model.parameters()), MasterWeights(model, dtype=torch.bfloat16))


class Outer(torch.optim.Optimizer):
    """Lets others step, whose groups it shows or has copies of."""

    def __init__(self, inside, *, shows):
        super().__init__([{**group} for each in inside for group in each.param_groups], {})
        self.inside = inside
        if shows:
            self.param_groups = [group for each in inside for group in each.param_groups]

    def step(self, closure=None):
        for each in self.inside:
            each.step()


@pytest.mark.parametrize("shows", [False, True])
def test_an_optimizer_that_lets_another_step_shows_its_groups_or_is_refused(shows):
    model = make_model()
    start = copy.deepcopy(model.state_dict())
    outer = Outer([SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])], shows=shows)
    optimizer = MasteredOptimizer(outer, MasterWeights(model, dtype=torch.bfloat16))
    model(batch(torch.bfloat16)).float().square().mean().backward()
    if shows:
        optimizer.step()
        after = model.state_dict()
        assert not any(torch.equal(start[name], value) for name, value in after.items() if "weight" in name)
        return
    with pytest.raises(RuntimeError, match=r"Outer stepped and wrote to none of 6 .*Set weights='autocast' in"):
        optimizer.step()


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
    _, optimizer = with_masters(model, partial(Sharpness, momentum=times - 1))
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


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused(copied):
    model = make_model()
    _, optimizer = with_masters(model)
    with pytest.raises(TypeError, match="A MasteredOptimizer over SGD can be neither copied nor pickled"):
        copied(optimizer)
    copied(model)
    assert isinstance(copied(optimizer.undo()), (SGD, bytes))


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
        for number in range(5):
            if number == 2:
                for p in second:
                    p.requires_grad_(requires_grad=True)
                if later == "added":
                    optimizer.add_param_group({"params": second, "lr": 3e-3})
                elif later == "put in place":  # as a resumed callback does that unfreezes parameters
                    groups = optimizer.param_groups
                    optimizer.param_groups = [*groups, {**groups[0], "params": second, "lr": 3e-3}]
            step(model, optimizer)
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
    _, optimizer = with_masters(model, AdamW)
    for anew in (False, True):
        if anew:
            optimizer.state = defaultdict(dict)
        step(model, optimizer)
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

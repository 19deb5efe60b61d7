import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ups._compat.torch.compile.cudagraph_trees import Demand
from lightning_ups.transforms.compile.cuda_graphs import (
    Backwards,
    OwnGradients,
    Slot,
    begin_step,
    copied,
    owned,
    size,
)


def test_gradients_survive_that_their_memory_is_overwritten():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    own, x = OwnGradients(module), torch.ones(4, 3)
    kept = []
    for step in range(2):
        module(x).sum().backward()
        graph_memory = [p.grad for p in module.parameters()]
        expected = [grad.clone() for grad in graph_memory]
        own.take()
        for grad in graph_memory:
            grad.fill_(torch.nan)  # as the next step of a graph does
        assert all(torch.equal(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True)), step
        kept.append([p.grad for p in module.parameters()])
        module.zero_grad()
    assert all(a is b for a, b in zip(*kept, strict=True))  # allocated once


def test_memory_for_gradients_can_be_let_go():
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    own = OwnGradients(module)
    module(x).sum().backward()
    own.take()
    memory = StorageWeakRef(module.weight.grad.untyped_storage())
    module.zero_grad()
    assert not memory.expired()
    own.forget()
    assert memory.expired()
    module(x).sum().backward()
    own.take()
    assert module.weight.grad.tolist() == [[4.0] * 3] * 2


def test_much_memory_for_gradients_is_free_during_a_backward_that_makes_new_ones(monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.compile.cuda_graphs.COPIED_BYTES", 0)
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    own = OwnGradients(module)
    for _ in range(2):
        module(x).sum().backward()
        own.take()
        memory = StorageWeakRef(module.weight.grad.untyped_storage())
        module.weight.grad = None
        own.free_unused()
        assert memory.expired()
        kept = module.bias.grad
        module(x).sum().backward()
        own.take()
        assert module.bias.grad is kept, "it was added to"
        assert module.bias.grad.tolist() == [8.0] * 2
        module.zero_grad()


def test_a_second_backward_adds_to_them_in_place():
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    own = OwnGradients(module)
    module(x).sum().backward()
    own.take()
    first, memory = module.weight.grad.clone(), module.weight.grad
    module(x).sum().backward()
    own.take()
    assert module.weight.grad is memory
    assert torch.equal(module.weight.grad, first * 2)


def test_frozen_and_sparse_parameters_and_another_layout_are_no_problem():
    module = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    module[1].bias.requires_grad_(False)
    own = OwnGradients(module)
    module(torch.tensor([1, 2])).sum().backward()
    own.take()
    assert module[0].weight.grad.is_sparse
    assert module[1].bias.grad is None
    module[1].weight.grad = torch.ones(2, 2).t().contiguous().t()
    own.take()
    assert module[1].weight.grad.stride() == (1, 2)


CHANGES = {
    "replaced": lambda net: setattr(net[1], "weight", nn.Parameter(torch.ones(2, 2))),
    "replaced without a word": lambda net: net[1]._parameters.update(weight=nn.Parameter(torch.ones(2, 2))),
    "of another form": lambda net: setattr(net[1].weight, "data", torch.ones(2, 2).double()),
    "added": lambda net: net.append(nn.Linear(2, 2)),
    "another module": lambda net: net.__setitem__(1, nn.Linear(2, 2)),
    "thawed": lambda net: net[0].requires_grad_(True),
    "taken away": lambda net: net[1].register_parameter("bias", None),
    "all of them": lambda net: setattr(net[1], "_parameters", dict(nn.Linear(2, 2)._parameters)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_becomes_of_a_module_later_is_heeded(change):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    own = OwnGradients(module)

    def run():
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        graph_memory = [p.grad for p in module.parameters() if p.grad is not None]
        own.take()
        for grad in graph_memory:
            grad.fill_(torch.nan)
        assert graph_memory
        assert all((p.grad == 1).all() for p in module.parameters() if p.grad is not None)

    run()
    change(module)
    run()
    run()


@pytest.mark.gpu
def test_gradients_may_have_moved_with_their_module():
    module = nn.Linear(3, 2).cuda()
    own = OwnGradients(module)
    for device in ("cuda", "cuda", "cpu"):
        module.zero_grad()
        module(torch.ones(4, 3, device="cuda")).sum().backward()
        module.to(device)
        own.take()
    assert all((p.grad == 4).all() and p.grad.device.type == "cpu" for p in module.parameters())


def test_modules_are_walked_through_once(monkeypatch):
    module, walks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    own, walk = OwnGradients(module), nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda *args, **named: walks.append(1) or walk(*args, **named))
    counts = []
    for _ in range(3):
        module(torch.ones(1, 2)).sum().backward()
        own.take()
        counts.append(len(walks))
    assert 0 < counts[0] == counts[-1]


def test_scalars_are_copied_and_in_evaluation_all():
    outputs = {"loss": torch.ones(()), "hidden": [torch.ones(2)]}
    training = copied(outputs)
    assert training["loss"] is not outputs["loss"]
    assert training["hidden"][0] is outputs["hidden"][0]
    with torch.no_grad():
        assert copied(outputs)["hidden"][0] is not outputs["hidden"][0]


def test_in_training_all_is_copied_up_to_a_limit():
    outputs = {"loss": torch.ones(()), "hidden": [torch.ones(256)], "name": "a"}
    assert size(outputs) == 4 * 257
    copies, kept = copied(outputs, limit=4 * 257), copied(outputs, limit=4 * 256)
    assert copies["hidden"][0] is not outputs["hidden"][0]
    assert kept["hidden"][0] is outputs["hidden"][0]
    assert kept["loss"] is not outputs["loss"]
    assert copies["name"] == "a"


def test_what_lies_in_an_input_is_not_the_graphs():
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    mine = x + y
    assert owned([x, x.t(), mine, y[1:], 3, None, mine[0]], [x, y, 2])[0] is mine
    assert len(owned([x, x.t(), mine, y[1:], 3, None, mine[0]], [x, y, 2])) == 2
    assert len(owned([x.to_sparse()], [y.to_sparse()])) == 1


def replayed(slot, graph):
    """Return what runs ``graph`` in ``slot``, as a compiled graph would."""
    return lambda *args: slot.run(graph, args)


def test_outputs_outlive_the_memory_that_a_graph_writes_to_again():
    memory = torch.zeros(2, requires_grad=True) * 1

    def graph(x):
        with torch.no_grad():
            memory.data.copy_(x)
        return memory, x, 7

    run, first, second = replayed(Slot(Demand()), graph), torch.ones(2), torch.full((2,), 2.0)
    kept, same, number = run(first)
    run(second)
    assert kept.tolist() == [1, 1]
    assert same is first
    assert number == 7
    assert kept.grad_fn is not None  # a copy passes gradients on


def test_a_slot_is_free_when_its_backward_can_not_come_any_more():
    x, slot = torch.ones(2, requires_grad=True), Slot(Demand())
    run = replayed(slot, lambda x: (x * 2, x.sum(), x.detach() * 3))
    assert slot.is_free
    doubled, total, constant = run(x)
    assert not slot.is_free
    loss = (doubled * 3).sum()
    del doubled, total
    assert not slot.is_free  # a loss made of an output
    loss.backward()
    assert x.grad.tolist() == [6, 6]
    assert constant.tolist() == [3, 3]
    assert slot.is_free

    doubled, total, constant = run(x)
    del doubled, total
    assert slot.is_free  # nobody can go backward from what is left

    with torch.no_grad():
        kept = run(x)
    assert len(kept) == 3
    assert slot.is_free


def test_a_forward_whose_graph_is_kept_waits_for_more():
    x, slot = torch.ones(2, requires_grad=True), Slot(Demand())
    (doubled,) = replayed(slot, lambda x: x * 2)(x)
    doubled.sum().backward(retain_graph=True)
    assert not slot.is_free
    doubled.sum().backward()
    assert slot.is_free


def steps(*backward_in):
    """Run a forward in the first of three steps, with its backward in those of these numbers."""
    x, backwards = torch.ones(2, requires_grad=True), Backwards()
    outputs = {"out": x * 2, "view": (x * 3).view(2, 1), "plain": 1}
    backwards.watch(outputs, x)
    total = outputs["out"].sum() + outputs["view"].sum()
    for step in range(3):
        if step in backward_in:
            total.backward(retain_graph=step != backward_in[-1])
        backwards.begin_step()
    return x.grad


def test_a_backward_must_come_in_the_step_of_its_forward():
    assert steps(0).tolist() == [5, 5]
    assert steps() is None
    for late in ((1,), (2,), (0, 1)):
        with pytest.raises(RuntimeError, match=r"later step than its forward.*Compile\(mode='auto'\)"):
            steps(*late)


def test_what_a_graph_returns_as_it_was_given_may_come_from_an_earlier_step():
    x, backwards = torch.ones(2, requires_grad=True), Backwards()
    state = x * 2
    backwards.watch((state, state * 2), (state,))
    backwards.begin_step()
    state.sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_what_nobody_can_go_backward_from_is_let_go():
    x, backwards = torch.ones(2, requires_grad=True), Backwards()
    out = x * 2
    backwards.watch(out, x)
    (forward,) = backwards._waiting
    assert forward() is not None
    del out
    assert forward() is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # whatever torch, triton and a new Python say while inductor compiles
def test_without_it_accumulation_fails_and_with_it_it_adds():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()

    def accumulate(module, after=lambda: None):
        run = torch.compile(module, mode="reduce-overhead")
        for _ in range(4):  # the graph is recorded in the second
            begin_step()
            run(x).square().sum().backward()
            after()

    x, once = torch.randn(8, 64, device="cuda"), make()
    once(x).square().sum().backward()
    module = make()
    accumulate(module, OwnGradients(module).take)
    for parameter, expected in zip(module.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad * 4, rtol=1e-4, atol=1e-3)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        accumulate(make())

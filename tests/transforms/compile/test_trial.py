import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_ups.transforms.compile.trial import (
    GraphError,
    Rehearsal,
    State,
    drawing,
    with_trial,
    writing_past_autograd,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Caller:
    is_settled = False

    def __init__(self, *, armed=True, again=0, repeat=0, records=False, stale=True):
        self.armed, self.again, self.repeat, self.skipped, self.runs = armed, again, repeat, [], 0
        self.slot, self.stale = object() if records else None, stale

    def made_graph(self, *, from_cache):
        pass

    def wants_trial(self):
        return self.armed

    def wants_again(self, graph):
        return self.again > 0

    def tried(self, graph, rehearsal):
        self.again -= 1
        for _ in range(self.repeat):
            rehearsal.backward(rehearsal.forward())

    def not_tried(self, graph, reason):
        self.skipped.append(reason)

    def runs_graph(self, graph):
        self.runs += 1

    def may_save(self, written):
        return self.stale


def compiled(function, caller, change=lambda run: run):
    """Return ``function`` as Dynamo runs it with a backend that tries its graphs, and a list of the calls of these."""
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append([a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
            return change(graph)(*args)

        return with_trial(run, graph, caller=lambda: caller)

    return torch.compile(function, backend=backend, dynamic=False), calls


class Block(nn.Module):
    """Draws, keeps statistics, counts, and has a frozen parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return nn.functional.dropout(self.norm(self.linear(x * self.frozen)), 0.5)


def test_a_graph_is_tried_once_and_leaves_no_trace():
    results = {}
    for armed in (True, False):
        block, caller, fired = Block(), Caller(armed=armed), []
        block.linear.weight.register_hook(lambda grad, fired=fired: fired.append(grad.sum().item()))
        block.linear.weight.register_post_accumulate_grad_hook(lambda p, fired=fired: fired.append("accumulated"))
        run, calls = compiled(block.forward, caller)
        torch.manual_seed(1)
        x, losses = torch.randn(3, 4, requires_grad=True), []
        for _ in range(2):
            loss = run(x).square().sum()
            loss.backward()
            losses.append(loss.item())
        grads = [p.grad.tolist() for p in (*block.parameters(), x) if p.requires_grad]
        buffers = [b.tolist() for b in block.buffers()]
        results[armed] = (losses, grads, buffers, fired, torch.get_rng_state().tolist(), x.tolist(), caller.runs)
        assert len(calls) == (3 if armed else 2)
    assert results[True] == results[False]
    assert results[True][-1] == 2


def test_a_graph_may_be_tried_again_and_as_often_as_one_likes_and_leaves_no_trace():
    results = {}
    for options in ({"armed": False}, {"armed": False, "again": 2, "repeat": 3}):
        block, caller = Block(), Caller(**options)
        run, calls = compiled(block.forward, caller)
        torch.manual_seed(1)
        x, losses = torch.randn(3, 4, requires_grad=True), []
        for _ in range(3):
            loss = run(x).square().sum()
            loss.backward()
            losses.append(loss.item())
        grads = [p.grad.tolist() for p in (*block.parameters(), x) if p.requires_grad]
        buffers = [b.tolist() for b in block.buffers()]
        results[caller.repeat] = (losses, grads, buffers, torch.get_rng_state().tolist(), caller.runs)
        assert len(calls) == (3 + 2 * (1 + 3) if caller.repeat else 3)
    assert results[0] == results[3]


def test_a_caller_may_do_without_what_cannot_be_tried():
    class Strict(Caller):
        def not_tried(self, graph, reason):
            raise GraphError(reason)

    block, caller = Block(), Strict()

    def without_memory(graph):
        def run(*args):
            raise torch.OutOfMemoryError("no memory")

        return run

    run, calls = compiled(block.forward, caller, without_memory)
    with pytest.raises(GraphError, match=r"^it ran out of memory$"):
        run(torch.randn(3, 4))
    assert len(calls) == 1  # the trial, and no call after it


def test_a_backward_that_dies_is_found_before_the_first_call():
    class Dies(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("the kernel was launched and died")

    caller = Caller()
    run, _ = compiled(lambda x: x.sin(), caller, change=lambda graph: lambda x: (Dies.apply(x),))
    for _ in range(2):  # Dynamo keeps the graph, and a later fit meets it again
        with pytest.raises(GraphError, match="launched and died"):
            run(torch.ones(2, requires_grad=True))
    assert caller.runs == 0
    with torch.no_grad():
        run(torch.ones(2))  # nothing to try, and it runs


def test_an_error_without_text_is_quoted_by_its_class():
    def dies(*args):
        raise NotImplementedError

    run, _ = compiled(lambda x: x.sin(), Caller(), change=lambda graph: dies)
    with pytest.raises(GraphError, match=r"^NotImplementedError$"):
        run(torch.ones(2))


def test_running_out_of_memory_is_no_failure_of_the_graph():
    def fails(*args):
        raise torch.OutOfMemoryError("out of memory")

    run, _ = compiled(lambda x: x.sin(), Caller(), change=lambda graph: fails)
    with pytest.raises(torch.OutOfMemoryError):
        run(torch.ones(2, requires_grad=True))


def test_a_trial_that_runs_out_of_memory_is_left_out():
    caller, calls = Caller(), []

    def at_first(graph):
        def run(*args):
            calls.append(1)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return graph(*args)

        return run

    run, _ = compiled(lambda x: x.sin(), caller, change=at_first)
    run(torch.ones(2, requires_grad=True)).sum().backward()
    assert caller.skipped == ["it ran out of memory"]
    assert caller.runs == 1


def test_what_the_graph_writes_to_is_copied_and_still_overlaps():
    def f(x, view):
        x.relu_()  # an activation, which wants a gradient
        view.add_(1)
        return x.sum() + view.sum()

    results = []
    for armed in (True, False):
        leaf = torch.linspace(-1, 1, 6, requires_grad=True)
        base = torch.zeros(6)
        run, _ = compiled(f, Caller(armed=armed))
        out = run((leaf * 2).view(2, 3), base[1:5])
        out.backward()
        results.append((out.item(), leaf.grad.tolist(), base.tolist()))
    assert results[0] == results[1]
    assert results[0][2] == [0, 1, 1, 1, 1, 0]


def test_a_graph_that_saves_what_it_writes_to_is_refused_where_its_caller_recomputes():
    run, _ = compiled(lambda x: x.relu_().sum(), Caller(stale=False))
    with pytest.raises(GraphError, match="writes in place to"):
        run(torch.ones(2, requires_grad=True) * 2)
    run, _ = compiled(lambda x: x.relu_().sum(), Caller())
    run(torch.ones(2, requires_grad=True) * 2).backward()


def test_a_written_parameter_is_copied_and_others_are_not():
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.ones(5))
            self.pointers = []

        def forward(self, x):
            with torch.no_grad():
                self.a.mul_(0.5)
            return (self.a * x).sum() + self.b.sum()

    block, seen = Clamps(), []

    def watched(graph):
        def run(*args):
            seen.append({tuple(a.shape): a.data_ptr() for a in args if a.requires_grad})
            return graph(*args)

        return run

    run, _ = compiled(block.forward, Caller(), change=watched)
    run(torch.ones(3)).backward()
    assert block.a.tolist() == [1.0] * 3  # written once
    trial, call = seen
    assert trial[(3,)] != call[(3,)]
    assert trial[(5,)] == call[(5,)] == block.b.data_ptr()


@pytest.mark.parametrize("records", [True, False])
def test_what_records_is_tried_with_buffers_where_they_lie(records):
    block, seen = Block(), []
    block.register_buffer("table", torch.ones(4))

    def f(x):
        return block(x * block.table)

    def watched(graph):
        def run(*args):
            seen.append({a.data_ptr() for a in args})
            return graph(*args)

        return run

    expected = {name: value.clone() for name, value in block.named_buffers()}
    places = {value.data_ptr() for value in block.buffers()}
    run, _ = compiled(f, Caller(records=records), change=watched)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        expected["seen"] += 1
        expected["norm.num_batches_tracked"] += 1
        expected["norm.running_mean"] += 0.1 * block.linear(x).mean(0)
        expected["norm.running_var"] += 0.1 * (block.linear(x).var(0) - 1)
    run(x).sum().backward()
    trial, call = seen
    # What was recorded for a copy would have to be recorded again for the buffer itself.
    assert places <= call
    assert places & trial == (places if records else set())
    assert x.data_ptr() not in trial
    for name, value in block.named_buffers():
        torch.testing.assert_close(value, expected[name])  # written once


def test_strides_are_those_for_which_the_graph_was_compiled():
    seen = []

    def watched(graph):
        return lambda *args: seen.append([(a.stride(), a.storage_offset()) for a in args]) or graph(*args)

    run, _ = compiled(lambda a, b: (a * b).sum(), Caller(), change=watched)
    expanded, sliced = torch.ones(3, 1, requires_grad=True).expand(3, 4), torch.ones(5, 9)[1:4, 1::2]
    run(expanded, sliced).backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_a_trial_inside_a_checkpoint_recomputes_nothing():
    def f(x):
        return compiled_f(x).sin()

    compiled_f, calls = compiled(lambda x: x.exp().cos(), Caller())
    x = torch.ones(2, requires_grad=True)
    checkpoint(f, x, use_reentrant=False).sum().backward()
    assert len(calls) == 3  # the trial, the forward, its recomputation
    other = torch.ones(2, requires_grad=True)
    f(other).sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_the_backward_of_a_trial_is_outside_autocast_as_that_of_a_step_is():
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    run, _ = compiled(lambda x: x.sinh(), Caller(), change=lambda graph: lambda x: (Looks.apply(x),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(torch.ones(2, requires_grad=True))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


def test_an_anomaly_of_made_up_gradients_is_none():
    run, _ = compiled(lambda x: x.sqrt(), Caller())
    with torch.autograd.set_detect_anomaly(True):
        out = run(torch.zeros(2, requires_grad=True))  # the gradient of 0 times infinity
    assert out.tolist() == [0, 0]


def test_what_communicates_is_not_tried(ranks):
    assert ranks(skipped_on_a_rank) == ["it communicates with other ranks"]


def skipped_on_a_rank():
    caller = Caller()

    def f(x):
        return all_reduce(x * 1, "sum", dist.group.WORLD).sum()

    run, calls = compiled(f, caller)
    assert run(torch.ones(2, requires_grad=True)).item() == 4
    assert len(calls) == 1
    return caller.skipped


def test_fake_tensors_are_no_first_call():
    caller, calls = Caller(), []
    graph = torch.fx.symbolic_trace(lambda x: x.sin())
    run = with_trial(lambda x: calls.append(type(x).__name__) or graph(x), graph, caller=lambda: caller)
    from torch._subclasses import FakeTensorMode  # as the splitting of a graph for DDP does

    with FakeTensorMode():
        run(torch.ones(2, requires_grad=True))
    run(torch.ones(2, requires_grad=True))
    assert calls == ["FakeTensor", "Tensor", "Tensor"]


def test_state_is_put_back_whatever_a_forward_changed():
    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.total, self.values, self.calls = torch.zeros(2), [], 0
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("kept", torch.ones(2))

        def forward(self, x):
            self.total += x.sum(0)
            self.values.append(x)
            self.calls += 1
            self.new = 1
            self.kept = self.kept * 2
            return self.norm(x) + torch.rand(2)

    module = Metric()
    values, kept = module.values, module.kept
    state = State(module)
    random = torch.get_rng_state()
    module(torch.randn(4, 2))
    assert module.norm.num_batches_tracked.item() == 1
    state.put_back()
    assert (module.total.tolist(), module.calls, module.norm.num_batches_tracked.item()) == ([0, 0], 0, 0)
    assert module.values is values
    assert values == []
    assert module.kept is kept
    assert not hasattr(module, "new")
    assert torch.equal(torch.get_rng_state(), random)


def test_state_puts_generators_back():
    module = nn.Dropout(0.5)
    state = State(module)
    first = module(torch.ones(20))
    state.put_back()
    assert torch.equal(module(torch.ones(20)), first)


class Seen(torch.autograd.Function):
    """Twice its input; gradients that it returns are seen."""

    gradients: tuple[StorageWeakRef, ...] = ()

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Seen.gradients = (StorageWeakRef((gradient := grad * 2).untyped_storage()),)
        return gradient


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_are_dead_when_a_rehearsal_is_over(device, leaf):
    """A thread of the device may not hold them either, which a GPU alone has."""
    x = torch.ones(8, device=device, requires_grad=True)
    rehearsal = Rehearsal(Seen.apply, [x if leaf else x.clone()])
    for _ in range(300):
        rehearsal.backward(rehearsal.forward())
        assert all(gradient.expired() for gradient in Seen.gradients)
        assert x.grad is None


@pytest.mark.gpu
def test_generators_and_state_of_a_gpu_are_put_back():
    torch.cuda.manual_seed(0)
    block, caller = Block().cuda(), Caller()
    run, calls = compiled(block.forward, caller)
    before = torch.cuda.get_rng_state()
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    torch.cuda.set_rng_state(before)
    first = run(x)
    assert len(calls) == 2
    torch.cuda.set_rng_state(before)
    block.load_state_dict(Block().state_dict())
    assert torch.equal(run(x), first)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.tanh, None),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), None),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, None, 0.0), None),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "scaled_dot_product_attention"),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, None, 0.1), "scaled_dot_product_attention"),
        (nn.functional.dropout, "dropout"),
        (lambda x: nn.functional.dropout(x, 0.0), None),
        (lambda x: nn.functional.dropout(x, p=0.5, training=False), None),
        (nn.Dropout(0.0), None),
        (nn.Dropout(0.1), "dropout"),
        (torch.rand_like, "rand_like"),
        (lambda x: torch.binomial(x.abs(), x.sigmoid()), "binomial"),
        (lambda x: x.clone().log_normal_(), "log_normal_"),
    ],
)
def test_graphs_that_draw_random_numbers_are_known(function, name):
    assert [drawing(graph) for graph in graphs_of(function)] == [name]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.mul_(2), None),
        (lambda x: x.data.mul_(2), "_get_data_attr"),
    ],
)
def test_writes_that_autograd_does_not_see_are_known(function, name):
    assert [writing_past_autograd(graph) for graph in graphs_of(function)] == [name]


def graphs_of(function):
    torch.compiler.reset()
    graphs = []
    torch.compile(function, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(torch.rand(1, 2, 4))
    return graphs

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.compiler import Compiler, compiled, has_graph, refuse_compiled
from lightning_ups.transforms.recompute.wrapping import recompute
from tests import backends

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

AOT = Compiler(backend="aot_eager")


@pytest.fixture(autouse=True)
def own_backends():
    backends.register()


def named(*modules):
    return {f"layers.{n}": module for n, module in enumerate(modules)}


def forward(blocks, x):
    for block in blocks.values():
        x = block(x)
    return x


BLOCKS = {
    "Sequential": lambda: nn.Sequential(nn.Linear(24, 24), nn.GELU()),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(24, 2, 16, dropout=0.0, batch_first=True),
    "Linear": lambda: nn.Linear(24, 24),
}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_classes_of_torch_compile_and_equal_ones_share_a_graph(make):
    blocks, x = named(*(make() for _ in range(4))), torch.randn(2, 4, 24, requires_grad=True)
    expected = forward(blocks, x)
    keys = [list(block.state_dict()) for block in blocks.values()]
    with compiled(blocks, AOT) as run:
        torch.testing.assert_close(forward(blocks, x), expected)
        assert [group.frame.num_compiled for group in run.groups] == [1]
        assert run.facts["graphs"] == 1
        assert all(has_graph(block) for block in blocks.values())
        assert [list(block.state_dict()) for block in blocks.values()] == keys
    assert not any("forward" in vars(block) for block in blocks.values())


def test_sequentials_of_different_content_do_not_compete_for_one_limit():
    width = dynamo.recompile_limit() + 3
    # Of a kind that no other test compiles, whose graphs would be counted here.
    blocks = named(*(nn.Sequential(nn.Linear(8, 8), *(nn.LogSigmoid() for _ in range(n + 1))) for n in range(width)))
    with compiled(blocks, AOT) as run:
        forward(blocks, torch.randn(2, 8, requires_grad=True))
        assert [group.frame.num_compiled for group in run.groups] == [1] * width


def test_rates_that_grow_with_depth_do_not_reach_the_limit():
    blocks = named(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(n / 100)) for n in range(dynamo.recompile_limit() + 3)))
    with compiled(blocks, AOT) as run:
        forward(blocks, torch.randn(2, 8, requires_grad=True))
        run.check()
        assert not any(group.frame.full for group in run.groups)


class Indexed(nn.Module):
    def __init__(self, index, width=8):
        super().__init__()
        self.index, self.linear = index, nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x) * (self.index + 1)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_blocks_that_only_look_equal_are_all_compiled_in_the_end(fullgraph):
    width = 11 if fullgraph else 12
    blocks = named(*(Indexed(n, width) for n in range(dynamo.recompile_limit() + 3)))
    x, told = torch.randn(2, width, requires_grad=True), []
    expected = forward(blocks, x)
    with compiled(blocks, Compiler(backend="aot_eager", fullgraph=fullgraph), tell=told.append) as run:
        for _ in range(3):
            torch.testing.assert_close(forward(blocks, x), expected)
        before = run.facts["graphs"]
        forward(blocks, x)
        assert run.facts["graphs"] == before
        assert len(run.groups) == len(blocks)
        assert all(group.frame.num_compiled == 1 for group in run.groups)
    assert len(told) == 1
    assert "look equal and are not" in told[0]
    assert "index" in told[0]


def test_churn_is_told_with_its_guard_and_the_cure_before_dynamo_gives_up():
    blocks, told = named(nn.Linear(5, 5)), []
    with compiled(blocks, Compiler(backend="aot_eager", dynamic=False), max_recompiles=3, tell=told.append) as run:
        seen = []
        for size in range(2, dynamo.recompile_limit() + 4):
            forward(blocks, torch.randn(size, 5, requires_grad=True))
            seen.append(len(told))
        limit = dynamo.recompile_limit()
        assert seen == [0] * 4 + [1] * (limit - 5) + [2] + [3] * 2  # told once each: often, the last, too many
        assert run.facts["recompiles"] == limit
    often, last, full = told
    assert "compiled 4 times more than once" in often
    assert "expected 5, actual 6" in often
    assert often.endswith("Give it inputs of one shape (drop_last=True, padding), or set Compile(dynamic=True).")
    assert "as many as Dynamo allows" in last
    assert "run uncompiled from now on" in full


def test_a_new_size_is_no_churn_when_sizes_are_dynamic():
    blocks, told = named(nn.Linear(5, 5)), []
    with compiled(blocks, Compiler(backend="aot_eager", dynamic=True), tell=told.append) as run:
        for size in range(2, 14):
            forward(blocks, torch.randn(size, 5, requires_grad=True))
        assert run.facts["graphs"] == 1
    assert told == []


class Unrolled(nn.Linear):
    def forward(self, x):
        return sum(super(Unrolled, self).forward(x) for _ in range(x.shape[0]))  # a graph for each size


def test_churn_of_sizes_that_may_vary_already_has_a_cure_of_its_own():
    block, told = Unrolled(5, 5), []
    with compiled(
        named(block), Compiler(backend="aot_eager", dynamic=True, fullgraph=True), max_recompiles=1, tell=told.append
    ):
        for size in range(2, 2 + dynamo.recompile_limit()):
            block(torch.ones(size, 5))
        with pytest.raises(RuntimeError, match="as many graphs as Dynamo allows") as error:
            block(torch.ones(12, 5))
    for text in (*told, str(error.value)):
        assert "dynamic=True)" not in text
        assert "Give it inputs of one shape (drop_last=True, padding)" in text


class Caching(nn.Module):
    """Has a place of its own in a cache, as the layers of a model that generates have."""

    def __init__(self, index):
        super().__init__()
        self.index, self.linear = index, nn.Linear(19, 19)

    def forward(self, x, cache=None):
        x = self.linear(x)
        if cache is not None:
            cache[self.index] = x = x + cache[self.index]
        return x


def test_what_evaluation_needs_is_not_taken_from_training():
    count = dynamo.recompile_limit() + 3
    blocks, x, told = named(*map(Caching, range(count))), torch.randn(2, 19, requires_grad=True), []
    with compiled(blocks, AOT, tell=told.append) as run:
        cache = [torch.zeros(()) for _ in blocks]
        for _ in range(2):
            with torch.no_grad():
                for block in blocks.values():
                    block(x, cache)
        forward(blocks, x)
        (group,) = run.groups
        assert (group.frame.num_compiled, group.frame.full) == (1, False)
        evaluated = group.facts["graphs"] - 1
        assert evaluated >= count
        assert run.facts["graphs"] == 1 + evaluated
    (line,) = told
    assert line.startswith(
        f"Compile makes graphs of their own for layers.0 and {count - 1} equal blocks (Caching) in ev"
    )


def test_evaluation_that_churns_leaves_training_compiled():
    blocks, told = named(nn.Linear(20, 20)), []
    with compiled(blocks, Compiler(backend="aot_eager", dynamic=False), tell=told.append) as run:
        with torch.no_grad():
            for size in range(dynamo.recompile_limit() + 2):
                forward(blocks, torch.randn(size + 2, 20))
        x = torch.randn(2, 20, requires_grad=True)
        forward(blocks, x)
        (group,) = run.groups
        assert (group.frame.num_compiled, group.frame.full, group.recompiles(group.frame)) == (1, False, [])
    assert any("in evaluation has 8 graphs and gets no more" in text for text in told)


def test_training_and_evaluation_are_no_recompilation():
    blocks, x = named(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))), torch.randn(2, 6)
    with compiled(blocks, AOT, max_recompiles=0, tell=warnings.warn) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            forward(blocks, x).sum().backward()
            for block in blocks.values():
                block.eval()
            with torch.no_grad():
                forward(blocks, x)
            with torch.inference_mode():
                forward(blocks, x)
            for block in blocks.values():
                block.train()
        assert run.facts["recompiles"] == 0
        assert run.facts["graphs"] == 3


FAILURES = ["forward_refused", "forward_dies", "backward_refused", "backward_dies"]


def train(blocks, *, backend=None, steps=3, **options):
    """Return all that can be seen of some steps, with the blocks compiled or not."""
    torch.manual_seed(1)
    x, losses = torch.randn(4, 8), []
    context = compiled(blocks, Compiler(backend=backend), **options) if backend else nullcontext()
    with context as run:
        for _ in range(steps):
            loss = forward(blocks, x).square().sum()
            loss.backward()
            losses.append(loss.item())
    grads = [p.grad.tolist() for block in blocks.values() for p in block.parameters()]
    buffers = [b.tolist() for block in blocks.values() for b in block.buffers()]
    return (losses, grads, buffers, torch.get_rng_state().tolist()), run


def noisy(odd=nn.Tanh):
    torch.manual_seed(0)
    return named(
        *(
            nn.Sequential(nn.Linear(8, 8), odd() if n == 1 else nn.GELU(), nn.Dropout(0.5), nn.BatchNorm1d(8))
            for n in range(3)
        )
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("trial", [True, False])
def test_nothing_changes_bit_for_bit(backend, trial):
    expected, _ = train(noisy())
    actual, run = train(noisy(), backend=backend, trial=trial)
    assert actual == expected
    assert [group.frame.num_compiled > 0 for group in run.groups] == [True, True]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_names_the_block_and_comes_before_any_gradient(failure):
    blocks = noisy()
    for _ in range(2):  # Dynamo keeps graphs that were made and died
        with pytest.raises(
            RuntimeError, match=r"failed on layers\.0 and 1 equal blocks.*Compile\(on_failure='eager'\)\."
        ) as caught:
            train(blocks, backend=f"ups_{failure}")
        assert caught.value.__cause__ is not None
        assert all(p.grad is None for block in blocks.values() for p in block.parameters())
    assert not any("forward" in vars(block) for block in blocks.values())


@pytest.mark.parametrize("failure", ["silently_refused", "silently_dies"])
def test_a_failure_without_text_is_named_by_its_class(failure):
    with pytest.raises(RuntimeError, match=r"in training: (backend=.* raised: )?NotImplementedError\. Something in it"):
        train(noisy(), backend=f"ups_{failure}")


@pytest.mark.parametrize("failure", FAILURES)
def test_blocks_that_fail_run_as_they_are(failure):
    told = []
    expected, _ = train(noisy())
    for _ in range(2):
        actual, run = train(noisy(), backend=f"ups_{failure}", on_failure="eager", tell=told.append)
        assert actual == expected
        assert run.facts["eager"] == ["layers.0", "layers.2", "layers.1"]
        run.check()  # told already, and no error
    assert len(told) == 4
    assert "layers.0 and 1 equal blocks (Sequential) runs uncompiled in training" in told[0]


def test_a_broken_cache_file_is_named():
    told = []
    with pytest.raises(RuntimeError, match=r"layers\.0.*/cache/ab/kernel.main.so: file too short.*Delete that file"):
        train(noisy(), backend="ups_half_a_file")
    assert train(noisy(), backend="ups_half_a_file", on_failure="eager", tell=told.append)[0] == train(noisy())[0]
    assert "/cache/ab/kernel.main.so" in told[0]


def test_without_a_trial_a_backward_that_does_not_compile_is_found_all_the_same():
    expected, _ = train(noisy())
    actual, run = train(
        noisy(), backend="ups_backward_refused", on_failure="eager", trial=False, tell=lambda text: None
    )
    assert actual == expected
    assert len(run.facts["eager"]) == 3


@pytest.mark.parametrize("backend", ["ups_no_tanh", "ups_no_tanh_backward"])
def test_one_block_fails_and_the_others_stay_compiled(backend):
    told = []
    expected, _ = train(noisy())
    actual, run = train(noisy(), backend=backend, on_failure="eager", tell=told.append)
    assert actual == expected
    assert run.facts["eager"] == ["layers.1"]
    good = next(group for group in run.groups if not group.eager)
    assert (good.blocks, good.frame.has_graph) == (["layers.0", "layers.2"], True)
    assert len(told) == 1


class Broken(nn.Module):
    """Draws, counts and keeps statistics in a first graph; what follows the break may not compile."""

    def __init__(self):
        super().__init__()
        self.norm, self.metric, self.calls = nn.BatchNorm1d(8), MeanMetric(), 0

    def forward(self, x, *, bad=True):
        self.calls += 1
        x = nn.functional.dropout(self.norm(x), 0.5)
        self.metric.update(x.detach())
        untraced()
        return x.tanh() if bad else x.sigmoid()


@torch.compiler.disable
def untraced():
    pass


def test_what_ran_before_the_failure_is_undone():
    expected, _ = train(named(Broken()), steps=3)
    block = Broken()
    actual, run = train(named(block), backend="ups_no_tanh", on_failure="eager", steps=3)
    assert actual == expected
    assert block.calls == 3
    assert run.facts["eager"] == ["layers.0"]
    reference = Broken()
    train(named(reference), steps=3)
    assert block.metric.compute() == reference.metric.compute()


def test_a_block_that_fails_in_a_later_call_runs_uncompiled_from_then_on():
    block, told = Broken(), []
    with compiled(named(block), Compiler(backend="ups_no_tanh"), on_failure="eager", tell=told.append) as run:
        block(torch.randn(4, 8, requires_grad=True), bad=False)
        assert run.facts["eager"] == []
        for _ in range(2):
            block(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert run.facts["eager"] == ["layers.0"]
    assert len(told) == 1


def test_breaks_are_counted_with_their_reason():
    block = Broken()
    with compiled(named(block), AOT) as run:
        block(torch.randn(4, 8, requires_grad=True))
        (facts,) = run.facts["groups"]
        assert facts["graphs"] >= 2
        assert run.facts["breaks"] >= 1
        assert any("test_compiler.py" in reason for reason in facts["breaks"])
        assert "graph break" in run.groups[0].summary


def test_a_break_is_an_error_with_fullgraph():
    block = Broken()
    with (
        compiled(named(block), Compiler(backend="aot_eager", fullgraph=True)),
        pytest.raises(RuntimeError, match=r"failed on layers\.0 \(Broken\)"),
    ):
        block(torch.randn(4, 8))


class Raises(nn.Module):
    """Has a mistake of its own."""

    def forward(self, x):
        return x * self.scale


class Misshapen(nn.Module):
    """Has a parameter of another size than its input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Misshapen, r"RuntimeError: [^()]*\[?7.*, at compile/test_compiler\.py"),
        (Broken, r"branching.*, at torchmetrics/aggregation\.py"),
        (Raises, r"'Raises' object has no attribute 'scale'.*, at compile/test_compiler\.py"),
    ],
)
def test_what_cannot_be_one_graph_is_said_with_its_place(kind, said):
    block = kind()
    text = rf"failed on layers\.0 \({kind.__name__}\), in training: .*{said}, line \d+\. "
    with (
        compiled(named(block), Compiler(backend="aot_eager", fullgraph=True)),
        pytest.raises(RuntimeError, match=text) as error,
    ):
        block(torch.randn(4, 8, requires_grad=True))
    assert "exception handler" not in str(error.value)
    assert "set_stance" not in str(error.value)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_too_many_graphs_are_an_error_with_fullgraph_that_names_the_guard():
    block, told = Counting(9, 9), []
    with compiled(named(block), Compiler(backend="aot_eager", fullgraph=True), tell=told.append):
        for _ in range(dynamo.recompile_limit()):
            block(torch.ones(2, 9))
        with pytest.raises(
            RuntimeError, match=r"as many graphs as Dynamo allows, 8, .* guard to fail was: .*calls"
        ) as error:
            block(torch.ones(2, 9))
    often, last = told
    assert "compiled" in often
    assert "would be an error; the last guard" in last
    cure = "An argument or an attribute changes from step to step: keep it constant, or make it a tensor."
    assert all(text.endswith(cure) for text in (often, last, str(error.value)))


def test_inputs_that_need_gradients_by_turns_are_told_as_that():
    block, told = nn.Bilinear(3, 3, 3), []
    with compiled(named(block), AOT, max_recompiles=1, tell=told.append):
        for first, second in ((False, False), (False, True), (True, True)):
            block(torch.ones(2, 3, requires_grad=first), torch.ones(2, 3, requires_grad=second))
    (often,) = told
    assert "requires_grad mismatch" in often
    assert "detach()" in often
    assert "shape" not in often


def test_an_error_of_the_model_stays_what_it_is():
    class Wrong(nn.Linear):
        def forward(self, x):
            raise KeyError("no such thing")

    with compiled(named(Wrong(2, 2)), AOT, on_failure="eager") as run:
        with pytest.raises(KeyError, match="no such thing"):
            forward(named(Wrong(2, 2)), torch.ones(1, 2))
        assert run.facts["eager"] == []


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_running_out_of_memory_is_not_taken_for_a_failure_to_compile(on_failure):
    blocks = named(nn.Linear(7, 7))
    with (
        compiled(blocks, Compiler(backend="ups_no_memory"), on_failure=on_failure),
        pytest.raises(torch.OutOfMemoryError),
    ):
        forward(blocks, torch.randn(2, 7, requires_grad=True))


def in_two_graphs(x):
    x = x.sin()
    torch._dynamo.graph_break()  # noqa: TID251
    return x.cos()


class Outside(nn.Module):
    """All that it computes is in graphs of a function that it calls, which another model may have made."""

    def forward(self, x):
        return in_two_graphs(x)


class OutsideToo(Outside):
    def forward(self, x):
        return in_two_graphs(x)


def test_graphs_that_another_model_has_made_are_graphs():
    x = torch.randn(2, 8, requires_grad=True)
    new = []
    for kind in (Outside, OutsideToo):
        blocks = named(kind())
        with compiled(blocks, AOT) as run:
            forward(blocks, x)
            run.check()
            assert all(has_graph(block) for block in blocks.values())
            new.append(run.facts["new_graphs"])
    assert new == [2, 0], "the second model found the graphs of the first"


def test_a_block_that_ran_without_a_graph_is_an_error_whatever_the_others_do():
    blocks = named(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9))
    with compiled(blocks, AOT) as run:
        run.check()  # nothing ran yet
        with pytest.raises(RuntimeError, match=r"none of layers\.0, layers\.2, layers\.1 ran.*Compile\(blocks=\["):
            run.check_ran()
        blocks["layers.0"](torch.randn(2, 9))
        run.check()
        run.check_ran()
        torch.compiler.set_stance("force_eager")
        try:
            blocks["layers.1"](torch.randn(2, 9))
        finally:
            torch.compiler.set_stance("default")
        with pytest.raises(
            RuntimeError, match=r"layers\.1 \(Tanh\) ran and has no graph.*Compile\(blocks=\[\.\.\.\]\)"
        ) as error:
            run.check()
        assert "ActivationCheckpoint" not in str(error.value)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(21, 21), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


def test_a_recomputed_block_that_is_not_compiled_says_where_its_graph_breaks():
    block = Counts()
    with recompute([block], save="nothing"), compiled({"net": block}, AOT) as run:
        block(torch.randn(2, 21))
        with pytest.raises(
            RuntimeError, match=r"net \(Counts\) ran and has no graph: graph break: .* side effect"
        ) as error:
            run.check()
    assert "ActivationCheckpoint recomputes it" in str(error.value)


def test_a_second_time_compiles_nothing_and_is_compiled():
    blocks, x = named(*(nn.Linear(10, 10) for _ in range(3))), torch.randn(2, 10, requires_grad=True)
    new = []
    for _ in range(2):
        with compiled(blocks, AOT) as run:
            forward(blocks, x)
            run.check()
            new.append((run.facts["graphs"], run.facts["new_graphs"], run.facts["recompiles"]))
    assert new == [(1, 1, 0), (1, 0, 0)]


def test_other_compiled_code_is_not_counted():
    blocks, x = named(nn.Linear(11, 11)), torch.randn(2, 11, requires_grad=True)
    other = torch.compile(lambda x: x.sin() + 1, backend="aot_eager", dynamic=False)
    with compiled(blocks, AOT) as run:
        for size in range(2, 6):
            forward(blocks, x)
            other(torch.randn(size))
        assert run.facts["graphs"] == 1
        assert run.facts["recompiles"] == 0


def test_a_block_inside_a_block_is_left_to_the_outer_one():
    outer = nn.Sequential(nn.Linear(12, 12), nn.GELU())
    blocks = {"outer.0": outer[0], "outer": outer}
    with compiled(blocks, AOT) as run:
        outer(torch.randn(2, 12))
        assert [group.blocks for group in run.groups] == [["outer"]]
        assert "forward" not in vars(outer[0])
    assert "forward" not in vars(outer)


def test_a_copy_made_meanwhile_runs_its_own_weights_uncompiled():
    block, x = nn.Sequential(nn.Linear(13, 13)), torch.ones(1, 13)
    with compiled(named(block), AOT), torch.no_grad():
        block(x)
        twin = copy.deepcopy(block)
        expected = block(x)
        block[0].weight.zero_()
        assert torch.equal(twin(x), expected)
        assert "forward" not in vars(twin) or vars(twin)["forward"].__func__ is nn.Sequential.forward


def test_recomputation_lies_inside_the_graph():
    blocks, x = named(*(nn.Sequential(nn.Linear(14, 14), nn.GELU()) for _ in range(2))), torch.randn(2, 14)
    forward(blocks, x.requires_grad_()).sum().backward()
    expected = [p.grad.clone() for block in blocks.values() for p in block.parameters()]
    for block in blocks.values():
        block.zero_grad()
    with recompute(blocks.values(), save="nothing"), compiled(blocks, AOT) as run:
        forward(blocks, x).sum().backward()
        assert run.facts["graphs"] == 1
        assert run.facts["breaks"] == 0
    actual = [p.grad for block in blocks.values() for p in block.parameters()]
    assert all(map(torch.equal, actual, expected))


def test_inside_another_compilation_a_block_is_a_part_of_it():
    block, x = nn.Linear(15, 15), torch.randn(2, 15)
    with compiled(named(block), AOT) as run:
        outer = torch.compile(lambda x: block(x) * 2, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(outer(x), nn.functional.linear(x, block.weight, block.bias) * 2)
        assert not run.groups[0].ran


@pytest.mark.parametrize("how", ["function", "method", "inside"])
def test_a_model_that_compiles_itself_is_refused(how):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if how == "function":
        model[1] = torch.compile(model[1], backend="eager")
    else:
        (model if how == "inside" else model[1]).compile(backend="eager")
    chosen = model[1]._orig_mod if how == "function" else model[1]
    with pytest.raises(ValueError, match=r"compiled by the model itself.*name blocks outside: Compile\(blocks=\["):
        refuse_compiled(model, {"1": chosen})
    if how != "inside":
        refuse_compiled(model, {"0": model[0]})


@pytest.mark.parametrize("how", ["function", "method"])
def test_a_part_that_compiles_itself_is_refused_of_a_whole(how):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    if how == "function":
        model[0][1] = torch.compile(model[0][1], backend="eager")
    else:
        model[0][1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"^0\.1 is compiled by the model itself.*Remove that call"):
        refuse_compiled(model, {"0": model[0]})
    refuse_compiled(model, {"0.0": model[0][0], "1": model[1]})


def test_frozen_and_tied_parameters_get_their_gradients():
    def make():
        torch.manual_seed(0)
        blocks = named(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
        blocks["layers.0"][0].weight.requires_grad_(False)
        blocks["layers.2"][0].weight = blocks["layers.1"][0].weight
        return blocks

    x, grads = torch.randn(2, 8), []
    for context in (nullcontext(), None):
        blocks = make()
        with context or compiled(blocks, AOT):
            forward(blocks, x).square().sum().backward()
        grads.append([p.grad if p.grad is None else p.grad.tolist() for b in blocks.values() for p in b.parameters()])
    assert grads[0] == grads[1]
    assert grads[0][0] is None


def test_a_recording_is_not_tried_and_its_backward_is_compiled_with_the_forward():
    compiler = Compiler(backend="cudagraphs")
    with compiled(named(nn.Linear(16, 16)), compiler) as run:
        assert run.trial is False

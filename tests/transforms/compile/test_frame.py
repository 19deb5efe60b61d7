from functools import cached_property

import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.frame import Compiler, frame_of, hearing, prepared, structure
from lightning_ups.transforms.forward import replaced_forward
from tests import backends

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EAGER = Compiler(backend="eager", dynamic=False)


class Scale(nn.Module):
    def __init__(self, *, by=1, rate=0.5, width=3):
        super().__init__()
        self.by, self.rate, self.weight = by, rate, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight * self.by * self.rate


def frame(module, *, compiler=EAGER, name="a", alone=False):
    return frame_of(type(module).forward, module, compiler, name=name, alone=alone)


def call(frame, module, x, *, asker="a", kind="training"):
    start = dynamo.mark()
    out = frame.run(module, x)
    if dynamo.compiled_since(start):
        frame.learn(start, asker=asker, kind=kind)
    return out


def multiplied(graph):
    return ", ".join(node.name for node in graph.graph.nodes if "mul" in node.name)


def test_what_is_said_of_a_graph_is_heard_whenever_it_runs():
    heard, others = [], []
    with prepared(multiplied):
        module = Scale()
        inner = frame(module)
        call(inner, module, torch.ones(3))
        for _ in range(2):
            with hearing(heard.append):
                call(inner, module, torch.ones(3))
        with hearing(others.append):
            call(inner, module, torch.ones(3))
    assert len(heard) == 2
    assert heard[:1] == others == heard[1:]
    assert "mul" in heard[0]


def test_equal_modules_share_a_frame_and_later_ones_find_it():
    assert frame(Scale()) is frame(Scale())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Scale(), Scale(width=4)),
        (Scale(), Scale(rate=0.1)),
        (nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
        (nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.2))),
        (nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)),
        (nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()),
    ],
    ids=["shape", "rate", "content", "rate inside", "frozen", "dtype"],
)
def test_what_would_need_graphs_of_its_own_gets_a_frame_of_its_own(one, other):
    assert structure(one) != structure(other)
    assert frame(one) is not frame(other)
    code = [f.run.__wrapped__.__code__ for f in (frame(one), frame(other))]
    assert code[0] is not code[1]


def test_training_evaluation_and_a_position_make_no_difference():
    assert structure(Scale(by=1)) == structure(Scale(by=2))
    assert structure(Scale()) == structure(Scale().eval())


class Mixed:
    """No module itself."""

    def mix(self, x):
        return x * self.mixed


class Helps:
    def __call__(self, x, module):
        return x * module.helped


HELPS = Helps()


class Drawn(Mixed, nn.Linear):
    def __init__(self, *, spread=0.02, **rates):
        super().__init__(3, 3)
        self.spread = spread
        for name in ("hidden", "named", "cached", "late", "mixed", "helped"):
            setattr(self, name, rates.get(name, 1.0))

    def init_weights(self):
        nn.init.normal_(self.weight, std=self.spread)

    @cached_property
    def scale(self):
        return self.cached

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        x = scaled(super().forward(x), self) * getattr(self, "named") * self.scale * (lambda: self.late)()  # noqa: B009
        return HELPS(self.mix(x), self)


def scaled(x, module):
    return x * module.hidden


def test_what_only_draws_weights_makes_no_difference():
    assert structure(Drawn()) == structure(Drawn(spread=0.01))
    assert structure(nn.Sequential(Drawn())) == structure(nn.Sequential(Drawn(spread=0.01)))


@pytest.mark.parametrize("name", ["hidden", "named", "cached", "late", "mixed", "helped"])
def test_wherever_a_forward_reads_it_an_attribute_makes_a_difference(name):
    assert structure(Drawn()) != structure(Drawn(**{name: 2.0}))


def test_a_forward_of_its_own_may_read_any_attribute():
    one, other = Drawn(), Drawn(spread=0.01)
    one.forward = other.forward = lambda x: x
    assert structure(nn.Sequential(one)) != structure(nn.Sequential(other))


def test_a_module_whose_forward_is_replaced_meanwhile_finds_its_frame():
    module = Scale(width=9)
    before = frame(module)
    with replaced_forward(module, lambda inner: lambda *args: inner(*args)):
        assert frame(module) is before
    outer = nn.Sequential(module)
    before = structure(outer)
    with replaced_forward(module, lambda inner: lambda *args: inner(*args)):
        assert structure(outer) != before  # what it calls is another function


def test_a_lazy_and_a_meta_module_have_a_structure():
    hash(structure(nn.LazyLinear(3)))
    assert structure(nn.Linear(2, 2, device="meta")) == structure(nn.Linear(2, 2))


def test_other_settings_do_not_share_a_frame():
    plain = frame(Scale())
    assert frame(Scale(), compiler=Compiler(backend="aot_eager", dynamic=False)) is not plain
    with dynamo.backward_compiled_with_forward():  # as a memory budget is, a setting of the compiler
        assert frame(Scale()) is not plain


def test_a_frame_knows_what_was_compiled_for_it_and_why():
    shared, module = frame(Scale(width=5)), Scale(width=5)
    call(shared, module, torch.ones(2, 5))
    assert (shared.num_compiled, shared.recompiles, shared.askers) == (1, [], ["a"])
    call(shared, module, torch.ones(2, 5))
    call(shared, module.eval(), torch.ones(1, 5), kind="evaluation")
    assert shared.recompiles == []  # the first of its kind
    call(shared, module, torch.ones(3, 5), kind="evaluation")
    assert len(shared.recompiles) == 1
    assert "expected 1, actual 3" in shared.recompiles[0]


def test_a_full_frame_is_not_used_again():
    module = Scale(width=6)
    full = frame(module)
    for size in range(dynamo.recompile_limit() + 1):
        call(full, module, torch.ones(size + 2, 6))
    assert full.full
    assert not full.differ
    assert frame(module) is not full


def test_blocks_that_only_look_equal_get_frames_alone_in_a_later_fit():
    modules = {f"layer{n}": Scale(by=n + 2, width=7) for n in range(dynamo.recompile_limit() + 1)}
    shared = frame(modules["layer0"])
    for name, module in modules.items():
        call(shared, module, torch.ones(2, 7), asker=name)
    assert shared.full
    assert shared.differ
    later = {name: frame(module, name=name) for name, module in modules.items()}
    assert len(set(later.values())) == len(modules)
    assert later["layer1"] is frame(modules["layer1"], name="layer1", alone=True)


def test_a_reset_of_the_compiler_is_noticed():
    module = Scale(width=8)
    before = frame(module)
    call(before, module, torch.ones(2, 8))
    before.graphs = 1
    torch.compiler.reset()
    assert not before.has_graph
    assert frame(module) is before
    assert (before.graphs, before.askers) == (0, [])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "fast"}, r"Use one of \('default', 'reduce-overhead'"),
        (
            {"backend": "inductr"},
            r"'inductr' is not registered.*Use one of .*; the nearest is 'inductor'\.",
        ),
        (
            {"backend": "nobackend"},
            r"Use one of \('inductor', 'aot_eager', 'eager', 'cudagraphs', (?!.*(minifier|debug|TESTING_ONLY)).*\)\.$",
        ),
        ({"backend": "ups_no_tanh", "mode": "max-autotune"}, r"Leave mode out, or use backend='inductor'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(options, match):
    backends.register()
    with pytest.raises(ValueError, match=match):
        Compiler(**options)


def test_cuda_graphs_are_those_of_two_modes():
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    assert [Compiler(mode=mode).cuda_graphs for mode in modes] == [False, True, True, False]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"backend": "cudagraphs"}, True),
        ({}, False),
        ({"mode": "reduce-overhead", "on_demand": True}, False),  # tried beside what runs, with the same kernels
    ],
)
def test_what_is_traced_can_ask_whether_cuda_graphs_will_replay_it(options, wanted):
    seen = []

    @torch.compiler.assume_constant_result
    def look():
        seen.append(dynamo.traces_for_cuda_graphs())
        raise NotImplementedError

    module = nn.Linear(2, 2)
    frame = frame_of(lambda self, x: x + look(), module, Compiler(fullgraph=True, **options), name="asks", alone=True)
    with pytest.raises(Exception, match="NotImplementedError"):
        frame.run(module, torch.ones(2))
    assert seen == [wanted]

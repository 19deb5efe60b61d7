import json
import logging
import os
import subprocess
import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ups._compat.torch.compile import dynamo
from tests import backends

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def own_backends():
    backends.register()


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


@torch.compiler.disable
def untraced(x):
    return x.cos()


def test_backends_are_those_of_torch_and_of_the_user():
    assert {"inductor", "eager", "aot_eager", "ups_no_tanh"} <= set(dynamo.backends())
    some = dynamo.backends(debugging=False)
    assert {"inductor", "cudagraphs", "ups_no_tanh"} <= set(some)
    assert not {"eager", "eager_debug", "invoke_subgraph"} & set(some)


def looking(error=None):
    """Return what is seen while Dynamo traces, and the function that sees it, which may end the tracing."""
    seen = []

    @torch.compiler.assume_constant_result
    def look():
        seen.append(dynamo.traces_for_cuda_graphs())
        if error is not None:
            raise error
        return 1

    return seen, look


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
        ({}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "eager"}, False),
    ],
)
def test_who_traces_for_cuda_graphs(options, wanted):
    torch.compiler.reset()
    seen, look = looking(NotImplementedError)  # so that nothing is compiled
    with pytest.raises(Exception, match="NotImplementedError"):
        torch.compile(lambda x: x + look(), fullgraph=True, **options)(torch.ones(2))
    assert seen == [wanted]
    assert not dynamo.traces_for_cuda_graphs()


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"backend": "eager"}])
def test_ddp_that_splits_graphs_hides_nobody(tmp_path, options):
    seen, look = looking()

    class Asking(nn.Linear):
        def forward(self, x):
            return super().forward(x) + look()

    torch.compiler.reset()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        torch.compile(DistributedDataParallel(Asking(2, 2)), **options)(torch.ones(2, 2))
    finally:
        dist.destroy_process_group()
    assert seen == ["mode" in options]


def test_what_was_compiled_is_known_with_its_guards_and_breaks():
    def f(x, n):
        return untraced(x.sin()) * n

    run, start = compiled(f, dynamic=False), dynamo.mark()
    assert not dynamo.compiled_since(start)
    run(torch.ones(2), 1)
    assert dynamo.compiled_since(start)
    compilations, breaks = dynamo.compilations_since(start)
    assert compilations[0].code == "f"
    assert [c.guard for c in compilations] == [None] * len(compilations)
    assert sum(c.seconds for c in compilations) > 0
    assert len(breaks) == 1
    assert "test_dynamo.py" in breaks[0]

    start = dynamo.mark()
    run(torch.ones(2), 1)
    assert not dynamo.compiled_since(start)
    run(torch.ones(3), 1)
    (first, *_), _ = dynamo.compilations_since(start)
    assert "expected 2, actual 3" in first.guard
    assert not first.hit_limit


def test_of_several_guards_that_is_known_which_tells_most():
    def f(x, style):
        return x.sin() if style == "a" else x.cos()

    def guard(style, *, gradients):
        start = dynamo.mark()
        run(torch.ones(2, requires_grad=gradients), style)
        (compilation,), _ = dynamo.compilations_since(start)
        return compilation.guard

    run = compiled(f)
    with dynamo.telling_guards_first():
        assert guard("a", gradients=False) is None
        assert guard("a", gradients=True) == "tensor 'x' requires_grad mismatch. expected requires_grad=0"
        assert guard("b", gradients=False) == "style == 'a'"
        assert guard("b", gradients=True) == "style == 'a'"


@pytest.mark.parametrize(
    ("guard", "kind"),
    [
        ("tensor 'args[0]' requires_grad mismatch. expected requires_grad=0", "gradients"),
        ("tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU), actual DispatchKeySet(CUDA)", "other"),
        ("tensor 'args[0]' size mismatch at index 0. expected 4, actual 5", "shape"),
        ("2 <= args[0].size()[0] <= 6", "shape"),
        ("args[1] == 'a'", "value"),
        ("___check_type_id(kwargs['n'], 140381956436800), type=<class 'list'>", "value"),
        ("expected type of 'kwargs['n']' to be a tensor type, ' but found <class 'list'>", "value"),
        ("tensor 'args[0]' dtype mismatch. expected Float, actual Double", "other"),
        ("GLOBAL_STATE changed: autocast(cpu)_enabled", "other"),
        ("Unable to find recompilation reasons", "other"),
        ("BACKEND_MATCH failure: torch.compile detected other callables. If this is unexpected, wrap it.", "other"),
    ],
)
def test_guards_are_told_apart_by_their_words(guard, kind):
    assert dynamo.guard_kind(guard) == kind


def test_the_limit_is_known_when_it_is_hit_and_dynamo_is_silent():
    def f(x, n):
        return x * n

    run = compiled(f, dynamic=False)
    for n in range(dynamo.recompile_limit()):
        run(torch.ones(2), n + 2)
    assert dynamo.num_graphs(run) == dynamo.recompile_limit()
    start = dynamo.mark()
    run(torch.ones(2), 1)
    (last,), _ = dynamo.compilations_since(start)
    assert last.hit_limit
    assert last.code is None
    assert last.frame  # by which it is told whose limit it was


def test_errors_of_the_compiler_are_told_from_those_of_the_model():
    def index(x):
        return x[:, 5]  # an IndexError, which newer versions of Dynamo pass on as it is

    def wrong(x):
        raise ValueError("no such thing")

    for function, kind, ours in ((index, (IndexError, RuntimeError), True), (wrong, ValueError, False)):
        start = dynamo.mark()
        with pytest.raises(kind) as caught:
            compiled(function)(torch.ones(2, 2))
        assert dynamo.is_compiler_error(caught.value, start) is ours


def test_the_backward_is_compiled_with_the_forward():
    def f(x):
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    late = torch.compile(f, backend="ups_backward_refused")(x)
    with pytest.raises(RuntimeError, match="no kernel"):
        late.sum().backward()

    def g(x):
        return x.cos()

    with pytest.raises(RuntimeError, match="no kernel"), dynamo.backward_compiled_with_forward():
        torch.compile(g, backend="ups_backward_refused")(x)


def test_a_write_to_an_input_is_seen_by_placeholder():
    seen = {}

    def backend(graph, inputs):
        nodes = graph.graph.find_nodes(op="placeholder")
        seen.update({tuple(i.shape): dynamo.is_written_to(n) for n, i in zip(nodes, inputs, strict=True)})
        return graph

    def f(a, b):
        return a.add_(1).sum() + b.sum()

    torch.compile(f, backend=backend, dynamic=False)(torch.ones(2), torch.ones(3))
    assert seen == {(2,): True, (3,): False}


def test_what_a_module_holds_is_told_from_what_it_is_given():
    seen, module = {}, nn.Linear(3, 2)
    module.register_buffer("table", torch.ones(5))

    def backend(graph, inputs):
        nodes = graph.graph.find_nodes(op="placeholder")
        seen.update({tuple(i.shape): dynamo.is_static(n) for n, i in zip(nodes, inputs, strict=True)})
        return graph

    def f(module, x):
        return module(x).sum() + module.table.sum()

    torch.compile(f, backend=backend, dynamic=False)(module, torch.ones(4, 3))
    assert seen == {(2, 3): True, (2,): True, (5,): True, (4, 3): False}


def test_a_module_that_compiles_itself_is_known():
    plain, by_method = nn.Linear(2, 2), nn.Linear(2, 2)
    by_method.compile(backend="eager")
    assert not dynamo.compiled_by_itself(plain)
    assert dynamo.compiled_by_itself(by_method)
    assert dynamo.compiled_by_itself(torch.compile(plain, backend="eager"))


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_the_switches_of_torch_are_known(monkeypatch, name):
    assert dynamo.is_off() is None
    monkeypatch.setenv(name, "1")
    assert dynamo.is_off() == f"{name}=1"


LOGGER = logging.getLogger(__name__)


@cache
def warning_once(logger, text):
    logger.warning(text)


class Talking(nn.Module):
    def forward(self, x):
        LOGGER.warning("so many: %s", x.shape[0])
        LOGGER.warning_once("as transformers writes")
        return x.sin()


def test_loggers_are_left_out_of_a_graph_and_that_is_told_once(monkeypatch):
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    told = []
    torch.compiler.reset()
    module, x = torch.compile(Talking(), backend="eager", fullgraph=True), torch.randn(3)
    with dynamo.loggers_left_out(lambda: told.append(1)):
        assert torch.equal(module(x), x.sin())
        module(torch.randn(3, 3))
        # Torch notes its settings beside how long compilation took.
        assert torch._dynamo.utils._get_dynamo_config_for_logging()  # noqa: TID251
        copy = torch._dynamo.config.get_config_copy()["ignore_logging_functions"]  # noqa: TID251
        assert json.loads(json.dumps(sorted(copy))) == sorted(copy)
        assert warning_once in copy
        assert told == [1]
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Logger"):  # noqa: TID251
        module(x)


def test_a_missing_cpp_compiler_is_named_with_how_to_get_one(tmp_path):
    code = (
        "from lightning_ups.callbacks import Compile; from tests.toys import Net, loader, trainer\n"
        "for word in ('eager', 'raise'):\n"
        "    trainer('.', callbacks=[Compile(on_failure=word)], epochs=1).fit(Net(), loader())"
    )
    environment = {"PATH": str(tmp_path), "PYTHONPATH": os.getcwd(), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    for said in ("runs uncompiled in training", "RuntimeError: Compile failed on"):
        (line,) = [line for line in done.stderr.splitlines() if said in line]
        assert "No working C++ compiler" in line
        assert "apt-get install g++" in line
        assert "beyond torch.compile" not in line

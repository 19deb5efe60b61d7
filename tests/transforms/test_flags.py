import gc
import warnings
import weakref
from contextlib import suppress

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from lightning_ups._compat.torch.flags import allocator_settings, read_attention, settle_attention
from lightning_ups.kernels.attention import decisions
from lightning_ups.transforms.flags import (
    Flags,
    PacedCollection,
    accelerated,
    allocator,
    attention_backends,
    attention_kernel_error,
    cudnn_benchmark,
    current_flags,
    tf32,
    without_effect,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::bmm"


def tokens(device=CPU, dtype=torch.float32):
    return torch.zeros(1, 2, 64, 64, device=device, dtype=dtype, requires_grad=True)


def attend(x):
    return scaled_dot_product_attention(x, x, x, is_causal=True)


def kernels(function, x):
    """Not by a dispatch mode: nothing compiles under one."""
    function(x)  # what is traced runs as well
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            function(x).sum().backward()
    return {event.key for event in seen.key_averages()}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1_000_000)  # to count them takes a tenth of a second
    if torch.cuda.is_available():
        settle_attention(CUDA)
    before = current_flags()
    yield
    assert current_flags() == before


# TF32 and cuDNN


@pytest.mark.parametrize("enabled", [True, False])
def test_tf32_holds_inside_and_nests(enabled):
    with tf32(enabled=enabled):
        with tf32(enabled=not enabled):
            assert torch.backends.cuda.matmul.allow_tf32 is (not enabled)
            assert torch.backends.cudnn.allow_tf32 is (not enabled)
        assert torch.backends.cuda.matmul.allow_tf32 is enabled, "the value before, not a default"


def test_what_the_user_set_comes_back_after_an_exception():
    torch.set_float32_matmul_precision("medium")
    try:
        with suppress(ZeroDivisionError), tf32(enabled=False), cudnn_benchmark(enabled=True):
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.backends.cudnn.benchmark
            _ = 1 / 0
        assert torch.get_float32_matmul_precision() == "medium"
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision("highest")


def test_compiling_inside_leaves_tf32_as_it_was():
    """Dynamo puts back what the cell resolves to after each compilation, which would end an inheritance."""
    torch.backends.fp32_precision = "tf32"
    try:
        with tf32(enabled=False):
            torch.compile(lambda x: x @ x, backend="eager")(torch.ones(2, 2))
            assert not current_flags()["tf32_matmul"]
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"


@pytest.mark.gpu(capability=(8, 0))
def test_tf32_rounds_and_its_absence_does_not():
    torch.manual_seed(0)
    a = torch.randn(512, 512, device=CUDA)
    exact = a.double() @ a.double()
    error = {}
    for enabled in (True, False):
        with tf32(enabled=enabled):
            error[enabled] = (a @ a - exact).abs().max().item()
    assert error[True] > 20 * error[False]


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor's own, of several kinds
def test_autotuning_compiles_under_tf32():
    """Inductor's autotuning asks the legacy getter, which raises where fp32_precision alone was set."""
    with tf32(enabled=True):
        x = torch.randn(512, 512, device=CUDA)
        torch.compile(lambda x: x @ x, mode="max-autotune-no-cudagraphs")(x)


# Attention


@pytest.mark.parametrize(("names", "expected"), [(["flash"], FLASH), (["math"], MATH), (["flash", "math"], FLASH)])
def test_only_the_named_kernels_run(names, expected):
    with attention_backends(names, device=CPU):
        seen = kernels(attend, tokens())
    assert {FLASH, MATH} & seen == {expected}


def test_the_kernel_of_the_context_runs_in_compiled_code_and_the_users_before_and_after():
    """A graph has its kernel baked in, and Dynamo has no guard on it: graphs of another choice are dropped."""
    compiled = torch.compile(attend, backend="aot_eager")

    def run():
        return {FLASH, MATH} & kernels(compiled, tokens())

    assert run() == {FLASH}
    with attention_backends(["math"], device=CPU):
        assert run() == {MATH}
        with attention_backends(["flash"], device=CPU):
            assert run() == {FLASH}
        assert run() == {MATH}
    assert run() == {FLASH}


def test_graphs_stay_where_the_choice_is_the_one_that_holds():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, backend=backend)
    compiled(tokens())
    with attention_backends(["math"], device=CPU):
        compiled(tokens())
        with attention_backends(["math"], device=CPU):
            compiled(tokens())
        compiled(tokens())
    assert len(graphs) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # Inductor's own, when it is imported
def test_a_graph_of_another_choice_is_not_taken_from_the_cache_on_disk(tmp_path, monkeypatch):
    """torch's key knows the graph before attention is resolved: without a tag, a new process gets the old kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    seen = []
    for names in (["flash"], ["math"], ["flash"]):
        with attention_backends(names, device=CPU):
            seen.append({FLASH, MATH} & kernels(torch.compile(attend), tokens()))
    assert seen == [{FLASH}, {MATH}, {FLASH}]


def test_what_only_a_gpu_has_is_left_out_on_a_cpu():
    with attention_backends(["cudnn", "math", "efficient"], device=CPU):
        assert current_flags()["attention"] == ["math"]


def test_nothing_that_can_run_is_an_error():
    with (
        pytest.raises(
            RuntimeError, match=r"'cudnn' cannot run on cpu: No viable backend.*Leave it out: attention=None"
        ),
        attention_backends(["cudnn"], device=CPU),
    ):
        pass


def test_trying_a_kernel_draws_nothing_and_changes_nothing():
    state, before = torch.get_rng_state(), read_attention()
    assert attention_kernel_error("flash", device=CPU) is None
    assert attention_kernel_error("efficient", device=CPU) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert read_attention() == before


@pytest.mark.parametrize("names", [["flsh"], [], ["flash", "flash"], "flash", 3, {"flash"}])
def test_an_unknown_kernel_is_refused(names):
    with pytest.raises(ValueError, match=r"Choose among \['cudnn', 'flash', 'efficient', 'math', 'fa4', .*'auto'\]"):
        Flags(attention=names)


def test_auto_before_others_is_refused_since_they_would_never_be_used():
    with pytest.raises(ValueError, match=r"attention=\['auto', 'fa4'\] has 'auto' before others.*at the end"):
        Flags(attention=["auto", "fa4"])


@pytest.mark.parametrize("names", [["flash", "auto"], ["fa4", "cudnn", "flash", "auto"]], ids=str)
def test_on_a_cpu_auto_does_what_the_kernels_in_front_of_it_cannot(names):
    def drops(x):
        return scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    with attention_backends(names, device=CPU):
        assert FLASH in kernels(attend, tokens())
        assert MATH in kernels(drops, tokens())
    assert "auto" not in without_effect(Flags(attention=names), device=CPU).get("attention", "")
    assert "auto: no effect" in without_effect(Flags(attention=["math", "auto"]), device=CPU)["attention"]


def test_a_kernel_that_is_not_torchs_is_refused_with_the_reason_where_it_cannot_run():
    with (
        pytest.raises(RuntimeError, match=r"'fa4' cannot run on cpu: It runs on CUDA devices only.*Leave it out"),
        attention_backends(["fa4"], device=CPU),
    ):
        pass


@pytest.mark.parametrize("compiled", [False, True])
def test_other_kernels_take_the_place_of_torchs_function_and_are_gone_afterwards(monkeypatch, compiled):
    monkeypatch.setattr("lightning_ups.transforms.flags._GPU_ONLY", frozenset({"cudnn"}))
    function, x = F.scaled_dot_product_attention, tokens(CPU)

    def model(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    expected, before = model(x), len(decisions())
    with attention_backends(["auto"], device=CPU):
        torch.testing.assert_close(run(x), expected)
        assert decisions()[-1]["backend"] == "flash"
    assert F.scaled_dot_product_attention is function
    assert len(decisions()) in (before, before + 1), "a decision is made once"


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("compiled", [False, True])
def test_auto_runs_on_a_gpu_forward_and_backward(compiled):
    def model(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    run = torch.compile(model, fullgraph=True) if compiled else model
    x = torch.randn(2, 4, 1024, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    expected = model(x)
    with attention_backends(["auto"], device=CUDA):
        got = run(x)
        got.sum().backward()
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert x.grad.isfinite().all()


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize(
    ("names", "operator"),
    [
        (["cudnn", "flash"], "_scaled_dot_product_cudnn_attention"),
        (["flash", "cudnn"], "_scaled_dot_product_flash_attention"),
        (["efficient", "math"], "_scaled_dot_product_efficient_attention"),
        (["math"], "_scaled_dot_product_attention_math"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_kernel_runs_forward_and_backward_on_a_gpu(names, operator, compiled):
    function = torch.compile(attend, backend="aot_eager") if compiled else attend
    with attention_backends(names, device=CUDA):
        seen = kernels(function, tokens(CUDA, torch.bfloat16))
    fused = {name for name in seen if name.startswith("aten::_scaled_dot_product") and "backward" not in name}
    if names == ["math"]:
        assert MATH in seen
        fused.discard(f"aten::{operator}")  # not an operator of its own in a graph
        assert not fused
    else:
        assert fused == {f"aten::{operator}"}
        assert f"aten::{operator}_backward" in seen


# The allocator


def test_another_allocator_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with (
        pytest.raises(RuntimeError, match=r"'cudaMallocAsync'.*Take 'backend' out of PYTORCH_\w*ALLOC_CONF"),
        allocator(expandable_segments=True),
    ):
        pass


@pytest.mark.parametrize(
    "wrong", [{"max_split_size_mb": 20}, {"garbage_collection_threshold": 1.0}, {"gc_interval": 0}], ids=str
)
def test_a_value_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=r"is out of range.*or None to leave it unchanged"):
        Flags(**wrong)


@pytest.mark.gpu
def test_the_allocator_follows_and_goes_back():
    torch.cuda.init()
    before = allocator_settings()

    def kinds():
        block = torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)
        found = [s["is_expandable"] for s in torch.cuda.memory_snapshot() if s["address"] <= block.data_ptr()]
        del block
        torch.cuda.empty_cache()
        return found

    torch.cuda.empty_cache()
    assert not any(kinds())
    with allocator(expandable_segments=True, max_split_size_mb=64):
        assert any(kinds())
        assert allocator_settings()["max_split_size"] == 64 << 20
        with allocator(garbage_collection_threshold=0.75):
            inner = allocator_settings()
            assert (inner["garbage_collection_threshold"], inner["max_split_size"]) == (0.75, 64 << 20)
            assert inner["expandable_segments"]
    assert allocator_settings() == before
    assert not any(kinds())


@pytest.mark.gpu
def test_an_allocator_that_does_not_follow_is_an_error(monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.flags.set_allocator_settings", lambda text: None)
    with (
        pytest.raises(RuntimeError, match=r"did not take expandable_segments=True.*_CONF=expandable_segments:True in"),
        allocator(expandable_segments=True),
    ):
        pass


# Garbage


class Cycle:
    def __init__(self):
        self.me = self


def cycle():
    return weakref.ref(Cycle())


def cycles_by_batch():
    gc.unfreeze()
    before = current_flags()
    with PacedCollection(3) as collection:
        assert not gc.isenabled()
        first = cycle()
        collection.after_batch()
        assert first() is None, "the first batch collects, and freezes the rest"
        assert gc.get_freeze_count() > 5_000
        second = cycle()
        collection.after_batch()
        assert second() is not None
        collection.after_batch()
        assert second() is None
    assert gc.isenabled()
    assert current_flags() == before, "thawed again"


def test_cycles_wait_for_their_batch(fresh_process):
    fresh_process(cycles_by_batch)  # in which there is less to be looked through, each time


def test_a_collector_that_the_user_switched_off_stays_off():
    gc.disable()
    try:
        with PacedCollection(1):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_user_froze_stays_frozen(monkeypatch):
    monkeypatch.undo()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with PacedCollection(1) as outer:
        outer.after_batch()
        with PacedCollection(1) as inner:
            inner.after_batch()
    assert gc.get_freeze_count() >= frozen - 10, "some die, none is thawed"


# All of them


def test_what_has_no_effect_on_a_cpu_is_named_and_not_touched():
    flags = Flags(tf32=True, cudnn_benchmark=True, expandable_segments=True, attention=["cudnn", "math", "flash"])
    idle = without_effect(flags, device=CPU)
    assert set(idle) == {"tf32", "cudnn_benchmark", "expandable_segments", "attention"}
    assert idle["tf32"] == "no effect on cpu"
    assert "cudnn: no effect on cpu" in idle["attention"]
    assert "torch takes flash before math on a CPU" in idle["attention"]
    before = current_flags()
    with accelerated(flags, device="cpu"):
        inside = current_flags()
    assert {name for name in inside if inside[name] != before[name]} == {"attention"}


def test_none_leaves_a_switch_as_the_user_had_it():
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        before = current_flags()
        with accelerated(Flags(gc_interval=2), device=CPU):
            assert current_flags() == before | {"gc_enabled": False}
    finally:
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = False


def test_what_was_set_before_a_failure_is_undone(monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.flags.attention_kernel_error", lambda *_, **__: "broken")
    before = current_flags()
    with (
        pytest.raises(RuntimeError, match="Leave it out"),
        accelerated(Flags(attention=["math"], tf32=True, gc_interval=1), device=CPU),
    ):
        pass
    assert current_flags() == before


def test_on_a_gpu_without_tf32_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "7.5, which has no TF32" in without_effect(Flags(tf32=True), device=CUDA)["tf32"]
    assert not without_effect(Flags(tf32=False, cudnn_benchmark=True), device=CUDA)

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from lightning_ups.kernels import linear_cross_entropy as module
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy, reference_linear_cross_entropy
from lightning_ups.transforms.flops import count_flops

ROWS, DIM, VOCAB = 50, 16, 200
OPTIONS = [
    {},
    {"z_loss": 0.1},
    {"softcap": 1.5},
    {"z_loss": 0.1, "softcap": 1.5},
    {"ignore_index": 7},
]


def inputs(dtype=torch.float32, *, rows=ROWS, dim=DIM, vocab=VOCAB, ignored=5, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=generator) / 2).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[:ignored] = -100
    return hidden, weight, targets.to(device)


def results(function, hidden, weight, targets, **options):
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    if options.get("ignore_index", -100) != -100:
        targets = targets.where(targets >= 0, options["ignore_index"])
    loss = function(hidden, weight, targets, **options)
    factor = torch.linspace(0.5, 2, targets.numel(), device=loss.device) if options.get("reduction") == "none" else 3.0
    (loss * factor).sum().backward()
    return loss.detach(), hidden.grad, weight.grad


def exact(hidden, weight, targets, **options):
    return results(reference_linear_cross_entropy, hidden.double(), weight.double(), targets, **options)


def assert_close(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 16, 50, 64, "auto"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_are_the_references(options, chunk, reduction):
    given = inputs()
    options = {**options, "reduction": reduction}
    found = results(linear_cross_entropy, *given, **options, chunk=chunk)
    assert found[0].dtype == torch.float32
    assert_close(found, exact(*given, **options), 2e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_reference_is_torchs_cross_entropy(reduction):
    hidden, weight, targets = inputs(torch.float64)
    wanted = F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)
    found = reference_linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_by_finite_differences(options):
    hidden, weight, targets = inputs(torch.float64, rows=5, dim=3, vocab=6, ignored=0)
    targets[0] = options.get("ignore_index", -100)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, **options, reduction="none", chunk=2), (hidden, weight)
    )


def test_bfloat16_sums_the_weights_gradient_in_float32():
    given = inputs(torch.bfloat16, rows=4096, vocab=50)
    wanted = exact(*given)
    fine = results(linear_cross_entropy, *given, chunk=16)
    assert [tensor.dtype for tensor in fine] == [torch.float32, torch.bfloat16, torch.bfloat16]
    error = (fine[2].double() - wanted[2]).norm() / wanted[2].norm()

    hidden, weight, targets = given
    coarse = torch.zeros_like(weight)
    for rows in range(0, 4096, 16):
        part = results(
            linear_cross_entropy, hidden[rows : rows + 16], weight, targets[rows : rows + 16], reduction="sum"
        )
        coarse += part[2] / (4096 - 5)
    coarse_error = (coarse.double() - wanted[2]).norm() / wanted[2].norm()
    assert error < 4e-3  # one rounding to bfloat16
    assert coarse_error > 5 * error


def test_autocast_multiplies_in_its_type_and_returns_gradients_in_the_weights():
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = results(linear_cross_entropy, hidden, weight, targets)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 3
    rounded = exact(hidden.bfloat16(), weight.bfloat16(), targets)
    assert_close(found[:1], rounded[:1], 1e-6)
    assert_close(found, exact(hidden, weight, targets), 2e-2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(reduction, dynamic):
    given = inputs()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found = results(compiled, *given, reduction=reduction, z_loss=0.1)
    assert_close(found, exact(*given, reduction=reduction, z_loss=0.1), 2e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torchs_own_checks_of_an_operator(reduction):
    hidden, weight, targets = inputs()
    options = (-100, 0.1, 0.0, reduction, 16, torch.float32, True, True)
    torch.library.opcheck(
        torch.ops.lightning_ups.linear_cross_entropy_forward.default,
        (hidden, weight, targets, *options),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    torch.library.opcheck(
        torch.ops.lightning_ups.linear_cross_entropy_backward.default,
        (torch.ones(ROWS), hidden.detach(), weight.detach(), targets, -100, 0.1, 0.0, 16, torch.float32, True, True),
    )


def test_the_step_that_is_compiled_on_a_gpu_computes_the_same(monkeypatch):
    fused = torch.compile(module._gradient_step, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(module, "_step_function", lambda device: fused)
    given = inputs()
    for options in OPTIONS:
        assert_close(results(linear_cross_entropy, *given, **options, chunk=16), exact(*given, **options), 2e-6)


def test_the_compiled_step_changes_no_logits():
    logits = torch.randn(4, 9)
    before = logits.clone()
    module._gradient_step(logits, torch.arange(4), torch.ones(4), 0.1, 2.0, True, torch.float32)
    assert torch.equal(logits, before)


def test_what_needs_no_gradient_gets_none():
    hidden, weight, targets = inputs()
    for frozen in (hidden, weight):
        frozen.requires_grad_(False)
        linear_cross_entropy(hidden, weight, targets).backward()
        assert frozen.grad is None
        other = weight if frozen is hidden else hidden
        assert other.grad is not None
        frozen.requires_grad_()
        other.grad = None


def flops(reduction="mean", grad=True):
    hidden, weight, targets = inputs()
    with torch.set_grad_enabled(grad):

        def call():
            loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
            if grad:
                loss.sum().backward()

        return count_flops(call).total / (2 * ROWS * DIM * VOCAB)


def test_logits_are_computed_once_and_gradients_only_where_wanted():
    assert flops() == 3
    assert flops(reduction="none") == 4
    assert flops(grad=False) == 1


@pytest.mark.parametrize("function", [linear_cross_entropy, reference_linear_cross_entropy])
def test_all_rows_ignored(function):
    hidden, weight, targets = inputs(ignored=ROWS)
    loss, *grads = results(function, hidden, weight, targets, z_loss=0.1)
    assert loss.isnan()
    assert all(not grad.any() for grad in grads), "as F.cross_entropy has it: such a batch must not spoil the others'"
    loss, *grads = results(function, hidden, weight, targets, reduction="sum")
    assert loss == 0
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("function", [linear_cross_entropy, reference_linear_cross_entropy])
def test_the_z_loss_is_as_precise_as_the_rest(function):
    hidden, weight, targets = inputs(torch.float64, rows=4, dim=3, vocab=5, ignored=0)
    with_it = function(hidden, weight, targets, z_loss=0.01, reduction="none")
    without = function(hidden, weight, targets, reduction="none")
    wanted = 0.01 * torch.logsumexp(hidden @ weight.T, -1).square()
    torch.testing.assert_close(with_it - without, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_rows_at_all(reduction):
    hidden, weight, targets = inputs(rows=0, ignored=0)
    loss, grad_hidden, grad_weight = results(linear_cross_entropy, hidden, weight, targets, reduction=reduction)
    assert loss.shape == targets.shape if reduction == "none" else loss.isnan()
    assert grad_hidden.shape == (0, DIM)
    assert not grad_weight.any()


def test_leading_axes_stay():
    hidden, weight, targets = inputs()
    flat = linear_cross_entropy(hidden, weight, targets, reduction="none")
    stacked = linear_cross_entropy(hidden.view(5, 10, DIM), weight, targets.view(5, 10), reduction="none")
    assert torch.equal(stacked, flat.view(5, 10))


def peak_bytes(call):
    """Return by how much memory grew at its highest, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def saved_bytes(call):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t):
        result = call()
    return sum(kept), result


BIG = {"rows": 1024, "dim": 32, "vocab": 4096}
LOGITS = 1024 * 4096 * 4
GRADS = (1024 + 4096) * 32 * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_is_that_of_a_chunk_and_the_gradients(reduction):
    hidden, weight, targets = inputs(**BIG)

    def run(chunk, backend):
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk, reduction=reduction, backend=backend)
        loss.sum().backward()

    run(64, "chunked")  # what is allocated once in a process
    small = peak_bytes(lambda: run(64, "chunked"))
    assert small < 3 * LOGITS * 64 / 1024 + 1.5 * GRADS
    assert peak_bytes(lambda: run("auto", "reference")) > 2.5 * LOGITS


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_waits_for_backward(reduction):
    hidden, weight, targets = inputs(**BIG)
    kept, _ = saved_bytes(lambda: linear_cross_entropy(hidden, weight, targets, chunk=64, reduction=reduction))
    assert kept == GRADS + (targets.nbytes if reduction == "none" else 0)


def test_a_compiled_function_keeps_no_logits_either():
    hidden, weight, targets = inputs(**BIG)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    kept, loss = saved_bytes(lambda: compiled(hidden, weight, targets, chunk=64))
    assert kept <= GRADS
    loss.backward()


def test_a_second_backward_says_why_not():
    loss = linear_cross_entropy(*inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Call backward once, or use backend='reference'"):
        loss.backward()


def test_rows_are_cut_into_chunks_of_equal_length():
    def lengths(num_rows, vocab, device="cuda"):
        return [rows.stop - rows.start for rows in module._slices(num_rows, vocab, chunk=0, device=device)]

    assert lengths(16384, 128256) == [4096] * 4
    assert lengths(10000, 128256) == [3456, 3456, 3088]
    assert lengths(4096, 128256) == [4096]
    assert lengths(32768, 50304) == [8192] * 4
    assert lengths(100, 50304, "cpu") == [100]


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no F.linear_cross_entropy")
@pytest.mark.parametrize("chunk", [16, "auto"])
def test_torchs_own(chunk):
    given = inputs()
    found = results(linear_cross_entropy, *given, backend="torch", chunk=chunk)
    assert_close(found, exact(*given), 1e-5)
    with pytest.raises(ValueError, match="Use backend='chunked'"):
        linear_cross_entropy(*given, backend="torch", z_loss=0.1)


def test_a_torch_without_it_is_named(monkeypatch):
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(ValueError, match="this torch has no"):
        linear_cross_entropy(*inputs(), backend="torch")


H, W, T = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tensors", "options", "cure"),
    [
        ((H, W.T, T), {}, "as it is"),
        ((H, W, T[:3]), {}, "one class for each row"),
        ((H, W, T), {"reduction": "median"}, "Use one of"),
        ((H, W, T), {"backend": "liger"}, "Use one of"),
        ((H, W, T), {"chunk": 0}, "Use a positive number"),
    ],
)
def test_what_does_not_fit_is_refused(tensors, options, cure):
    with pytest.raises(ValueError, match=cure):
        linear_cross_entropy(*tensors, **options)


def with_a_sharded_weight():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match="full_tensor"):
        linear_cross_entropy(H, distribute_tensor(W, mesh, [Replicate()]), T)


def test_a_sharded_weight_is_refused(ranks):
    ranks(with_a_sharded_weight)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, hidden, targets):
        return linear_cross_entropy(self.body(hidden), self.head.weight, targets, chunk=16)


def under_fsdp():
    from torch.distributed.fsdp import fully_shard

    hidden, _, targets = inputs()
    torch.manual_seed(0)
    whole, sharded = Head(), Head()
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for model in (whole, sharded):
        model(hidden, targets).backward()
    for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, msg=name)


def test_inside_the_module_that_owns_the_weight_it_works_under_fsdp(ranks):
    ranks(under_fsdp)


def test_inside_a_compiled_function_the_step_is_compiled_too(monkeypatch):
    ran = []

    def counted(graph, _):
        ran.append(graph)
        return graph.forward

    fused = torch.compile(module._gradient_step, backend=counted)
    monkeypatch.setattr(module, "_step_function", lambda device: fused)
    given = inputs()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, *given, chunk=25), exact(*given), 2e-6)
    assert len(ran) == 1


GPU = pytest.mark.gpu(capability=(8, 0))


@GPU
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_a_gpu(options, reduction):
    given = inputs(torch.bfloat16, rows=1000, dim=256, vocab=5000, device="cuda")
    found = results(linear_cross_entropy, *given, **options, reduction=reduction, chunk=256)
    wanted = exact(*given, **options, reduction=reduction)
    assert_close(found[:1], wanted[:1], 1e-5)
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert (a.double() - b).norm() < 5e-3 * b.norm()


@GPU
def test_on_a_gpu_memory_is_that_of_a_chunk():
    given = inputs(torch.bfloat16, rows=8192, dim=512, vocab=128256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(*given, chunk=1024).backward()
    peak = torch.cuda.max_memory_allocated() - before
    chunk, grads = 1024 * 128256 * 6, 128256 * 512 * (4 + 2) + 8192 * 512 * 2
    assert peak < 1.3 * (chunk + grads)

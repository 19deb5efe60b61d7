import random
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_ups.insight.throughput.flops import count_flops
from lightning_ups.kernels import linear_cross_entropy as module
from lightning_ups.kernels.cross_entropy_step import reference_step
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy, reference_linear_cross_entropy

ROWS, DIM, VOCAB = 50, 16, 200
OPTIONS = [
    {},
    {"z_loss": 0.1},
    {"softcap": 1.5},
    {"z_loss": 0.1, "softcap": 1.5},
    {"ignore_index": 7},
    {"round_logits": False},
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


@pytest.fixture
def halves(monkeypatch):
    """Let products be taken in the type of their factors, as on a GPU, by torch's own code for that.

    OneDNN's, for processors with AMX, reads beyond a row of bfloat16 and multiplies what it finds by zero, which not
    every value survives (uxlfoundation/oneDNN, issue 5717; PR 5603). A CPU of a user's computes in float32.
    """
    monkeypatch.setattr(module, "_operand", lambda tensor, dtype: tensor.to(dtype))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


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


def drawn(seed):
    """Return inputs and options that nobody chose."""
    draw = random.Random(seed)
    rows, dim, vocab = draw.randint(1, 40), draw.randint(1, 9), draw.randint(2, 150)
    hidden, weight, targets = inputs(rows=rows, dim=dim, vocab=vocab, ignored=draw.randint(0, rows - 1))
    hidden = draw.choice([hidden, hidden.t().contiguous().t(), torch.cat([hidden, hidden], 1)[:, :dim]])
    weight = draw.choice([weight, weight.t().contiguous().t()])
    if draw.random() < 0.3:
        hidden, targets = hidden.unsqueeze(0), targets.unsqueeze(0)
    given = (hidden.detach().requires_grad_(), weight.detach().requires_grad_(), targets)
    return given, {
        "z_loss": draw.choice([0.0, 0.05]),
        "softcap": draw.choice([None, 2.0, 30.0]),
        "reduction": draw.choice(["mean", "sum", "none"]),
        "chunk": draw.choice(["auto", 1, 7, 16, 128]),
    }


@pytest.fixture(params=range(20))
def all_drawn(request, monkeypatch):
    seed = request.param
    monkeypatch.setattr(module, "_LEAST_LOGITS_ROWS", random.Random(-seed).randint(1, 9))
    monkeypatch.setattr(module, "_ROWS_MULTIPLE", 1)
    return drawn(seed)


def test_inputs_and_options_drawn_from_seeds(all_drawn):
    given, options = all_drawn
    chunk = options.pop("chunk")
    found = results(linear_cross_entropy, *given, **options, chunk=chunk)
    assert_close(found, exact(*given, **options), 5e-6)


@pytest.mark.usefixtures("halves")
def test_inputs_and_options_drawn_from_seeds_in_halves(all_drawn):
    given, options = all_drawn
    chunk = options.pop("chunk")
    given = *(tensor.detach().bfloat16().requires_grad_() for tensor in given[:2]), given[2]
    for round_logits in (False, True):
        found = results(linear_cross_entropy, *given, **options, chunk=chunk, round_logits=round_logits)
        wanted = exact(*given, **options)
        assert_close(found[:1], wanted[:1], 1e-2 if round_logits else 2e-6)
        for a, b in zip(found[1:], wanted[1:], strict=True):
            assert (a.double() - b).norm() < (3e-2 if round_logits else 1e-2) * b.norm() + 1e-6


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.usefixtures("halves")
def test_float16_does_not_lose_small_gradients(reduction, compiled):
    # The gradient of logits is 1/500 of 1/8192 each where the mean is taken at once.
    hidden, weight, targets = inputs(rows=8192, vocab=500)
    low, flat = hidden.detach().half().requires_grad_(), (weight / 50).detach().requires_grad_()
    function = torch.compile(linear_cross_entropy, backend="aot_eager") if compiled else linear_cross_entropy
    with torch.autocast("cpu", torch.float16):
        found = results(
            lambda *given, **options: 1000 * function(*given, **options), low, flat, targets, reduction=reduction
        )
    wanted = exact(low, flat.half(), targets, reduction=reduction)
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert (a.double() / 1000 - b).norm() < 2e-3 * b.norm()


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
    options = (-100, 0.1, 0.0, reduction, 16, torch.float32, False, True, True)
    torch.library.opcheck(
        torch.ops.lightning_ups.linear_cross_entropy_forward.default,
        (hidden, weight, targets, *options),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    torch.library.opcheck(
        torch.ops.lightning_ups.linear_cross_entropy_backward.default,
        (torch.ones(ROWS), hidden.detach(), weight.detach(), targets, *options[:3], *options[4:]),
    )


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


def saved_bytes(call):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t):
        result = call()
    return sum(kept), result


BIG = {"rows": 1024, "dim": 32, "vocab": 4096}
GRADS = (1024 + 4096) * 32 * 4


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


def test_a_second_backward_of_what_is_made_anew_is_right():
    hidden, weight, targets = inputs()
    loss = checkpoint(linear_cross_entropy, hidden, weight, targets, use_reentrant=False)
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0].clone() for _ in range(2))
    assert first.any()
    assert torch.equal(first, second)


@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks on saved tensors"])
def test_a_second_backward_says_why_not(hooks):
    # Hooks, as of offloading, hide from autograd that what was saved has been written to.
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept) if hooks else nullcontext():
        loss = linear_cross_entropy(*inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Call backward once, or use backend='reference'"):
        loss.backward()


def steep(dtype=torch.bfloat16):
    """Return inputs with logits between -40 and 40, as those of trained models are."""
    hidden, weight, targets = inputs(dtype, rows=200, ignored=0)
    return (hidden * 5).detach().requires_grad_(), weight, targets


def errors(found, wanted):
    """Return the largest error of a row's loss, and those of the gradients relative to their lengths."""
    loss, *grads = zip(found, wanted, strict=True)
    return [(loss[0] - loss[1]).abs().max(), *((a.double() - b).norm() / b.norm() for a, b in grads)]


def test_the_error_of_each_choice_against_float64():
    given = steep()
    wanted = exact(*given, reduction="none")
    found = results(linear_cross_entropy, *given, reduction="none", round_logits=False)
    loss, hidden, weight = errors(found, wanted)
    assert loss < 1e-5
    assert max(hidden, weight) < 3e-3, "that of writing the gradients in bfloat16"

    largest = (given[0].double() @ given[1].double().T).abs().max()
    loss, hidden, weight = errors(results(linear_cross_entropy, *given, reduction="none"), wanted)
    assert 1e-3 < loss < largest / 256
    assert max(hidden, weight) < largest / 256

    def usual(hidden, weight, targets, **options):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, **options)

    of_usual = errors(results(usual, *given, reduction="none"), wanted)
    assert loss < 1.1 * of_usual[0]
    assert max(hidden, weight) < 1.1 * max(of_usual[1:]), "no worse than what all do"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_that_are_not_in_halves_have_nothing_to_round(dtype):
    given = steep(dtype)
    plain, rounded = (results(linear_cross_entropy, *given, **options) for options in ({"round_logits": False}, {}))
    assert all(torch.equal(a, b) for a, b in zip(plain, rounded, strict=True))


@pytest.mark.parametrize("wide", ["hidden", "weight"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_of_two_types_products_are_in_the_narrower(reduction, wide):
    """As those of a head are whose input is cast to its weight's type, when a body returns float32."""
    hidden, weight, targets = inputs(torch.bfloat16)
    given = (hidden.detach().float(), weight) if wide == "hidden" else (hidden, weight.detach().float())
    found = results(linear_cross_entropy, *given, targets, reduction=reduction)
    low = results(linear_cross_entropy, hidden, weight, targets, reduction=reduction)
    assert torch.equal(found[0], low[0])
    for gradient, like, wanted in zip(found[1:], given, low[1:], strict=True):
        assert gradient.dtype == like.dtype
        torch.testing.assert_close(gradient.bfloat16(), wanted, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(
        found[0], linear_cross_entropy(*given, targets, reduction=reduction, backend="reference")
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rounding_is_to_the_type_of_autocast(reduction):
    given = steep(torch.float32)
    low = *(tensor.detach().bfloat16() for tensor in given[:2]), given[2]
    options = {"reduction": reduction, "chunk": 60}
    with torch.autocast("cpu", torch.bfloat16):
        found = results(linear_cross_entropy, *given, **options)[0]
    torch.testing.assert_close(found, results(linear_cross_entropy, *low, **options, backend="reference")[0])
    exactly = linear_cross_entropy(*low, reduction=reduction, round_logits=False)
    assert not torch.allclose(found, exactly, rtol=1e-6)


def on_a_gpu(rows, dim, vocab, dtype=torch.bfloat16):
    """Return inputs without memory in a FakeTensorMode; `a_gpu` makes them say that they are on one."""
    targets = torch.empty(rows, dtype=torch.int64)
    return torch.empty(rows, dim, dtype=dtype), torch.empty(vocab, dim, dtype=dtype), targets


@pytest.fixture
def a_gpu(monkeypatch):
    """Let tensors say that they are on a GPU: fake ones, since a torch without CUDA cannot index fake CUDA tensors."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


class Living(TorchDispatchMode):
    """Counts the bytes of the storages that live at once, beside those that were there before."""

    def __init__(self):
        super().__init__()
        self.living = self.highest = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {id(s): s for s in storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            key = storage._cdata
            if key in self.seen or key in {s._cdata for s in before.values()}:
                continue
            self.seen.add(key)
            self.living += storage.nbytes()
            self.highest = max(self.highest, self.living)
            weakref.finalize(storage, self.gone, key, storage.nbytes())
        return result

    def gone(self, key, nbytes):
        self.seen.discard(key)
        self.living -= nbytes


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def peak_on_a_gpu(monkeypatch, a_gpu):
    """Return what counts the bytes of forward and backward on a GPU that is not there."""
    # It adds in place; torch 2.11's fake of it raises.
    monkeypatch.setattr(torch, "addmm", lambda total, a, b, *, out_dtype, out: out)
    monkeypatch.setattr(module, "step_on", lambda *_: lambda *_: None)  # as the kernel: allocates nothing

    def peak(shape, **options):
        with FakeTensorMode():
            hidden, weight, targets = on_a_gpu(*shape, **options.pop("like", {}))
            dtype = options.pop("dtype", hidden.dtype)
            given = (hidden, weight, targets, targets != -100)
            chunk = options.pop("chunk", 0)
            rounded = options.pop("round_logits", True)
            with Living() as living:
                module._chunks(
                    *given, module.Settings(0.0, 0.0), chunk, dtype, rounded, options.pop("want", (True, True))
                )
        return living.highest

    return peak


LLAMA, WIDE, SMALL = (16384, 2048, 128256), (16384, 4096, 128256), (32768, 768, 50304)


@pytest.mark.parametrize("shape", [LLAMA, WIDE, SMALL])
def test_memory_on_a_gpu_is_what_is_promised(peak_on_a_gpu, shape):
    rows, dim, vocab = shape
    grads, small = 4 * vocab * dim + 2 * rows * dim, 32 * rows
    assert 0 <= peak_on_a_gpu(shape) - (4096 * vocab * 2 + grads) < small
    assert 0 <= peak_on_a_gpu(shape, round_logits=False) - (4096 * vocab * 5 // 2 + grads) < small
    few = grads + small + 1024 * dim * 2 * (vocab > 0)
    assert peak_on_a_gpu(shape, chunk=1024) < 1024 * vocab * 2 + few
    assert peak_on_a_gpu(shape, chunk=1024, round_logits=False) < 1024 * vocab * 4 + few
    without = {"want": (False, False)}
    assert peak_on_a_gpu(shape, **without) < 512 * vocab * 2 + small, "no gradient, no memory for one"
    assert peak_on_a_gpu(shape, **without, round_logits=False) < 512 * vocab * 4 + small


def test_a_float32_weight_sums_its_gradient_where_it_stays(peak_on_a_gpu):
    rows, dim, vocab = LLAMA
    copies = 2 * (vocab + rows) * dim  # of weight and hidden states in bfloat16
    peak = peak_on_a_gpu(LLAMA, like={"dtype": torch.float32}, dtype=torch.bfloat16)
    assert peak < 4096 * vocab * 2 + 4 * (vocab + rows) * dim + copies + 32 * rows


def test_rows_of_a_chunk(monkeypatch, a_gpu):
    def rows(num_rows, dim, vocab, dtype=torch.bfloat16):
        with FakeTensorMode():
            return module.auto_rows(num_rows, on_a_gpu(1, dim, vocab, dtype)[1], dtype=torch.bfloat16)

    assert rows(*LLAMA) == rows(*WIDE) == rows(*SMALL) == 4096
    assert rows(65536, 2048, 128256) == 8192, "an eighth"
    assert rows(8192, 2048, 128256) == 2048, "a quarter"
    assert rows(10000, 2048, 128256) == 2560, "a quarter, too"
    assert rows(17000, 2048, 128256) == 3456, "equal lengths"
    assert rows(4096, 2048, 128256) == 4096, "the sum would take as much as the logits that it saves"
    assert rows(4096, 2048, 128256, torch.float32) == 2048, "the sum is the gradient"
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert module.auto_rows(100, torch.empty(50304, 4), dtype=torch.float32) == 128
    assert module.auto_rows(10000, torch.empty(50304, 4), dtype=torch.float32) == 384, "64 MiB on a CPU"
    assert module.auto_rows(0, torch.empty(9, 4), dtype=torch.float32) > 0


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no F.linear_cross_entropy")
@pytest.mark.parametrize("chunk", [16, "auto"])
def test_torchs_own(chunk):
    given = inputs()
    found = results(linear_cross_entropy, *given, backend="torch", chunk=chunk)
    assert_close(found, exact(*given), 1e-5)
    with pytest.raises(ValueError, match="Use backend='chunked'"):
        linear_cross_entropy(*given, backend="torch", z_loss=0.1)
    with pytest.raises(ValueError, match="Use backend='chunked', or round_logits=False"):
        linear_cross_entropy(*inputs(torch.bfloat16), backend="torch", chunk=chunk)


H, W, T = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tensors", "options", "cure"),
    [
        ((H, W.T, T), {}, "as it is"),
        ((H, W, T[:3]), {}, "one class for each row"),
        ((H, W, T), {"reduction": "median"}, "Use one of"),
        ((H, W, T), {"backend": "liger"}, "Use one of"),
        ((H, W, T), {"chunk": 0}, "Use a positive number"),
        ((H, W, T.to("meta")), {}, "targets on meta.*Move them to one device"),
        ((H, W, T), {"softcap": -30.0}, "Use 0 or more"),
        ((H, W, T), {"z_loss": float("nan")}, "Use 0 or more"),
    ],
)
def test_what_does_not_fit_is_refused(tensors, options, cure):
    with pytest.raises(ValueError, match=cure):
        linear_cross_entropy(*tensors, **options)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("name", ["softcap", "z_loss"])
def test_a_learned_number_would_have_no_gradient(name, backend):
    with pytest.raises(TypeError, match=f"a tensor as {name}"):
        linear_cross_entropy(H, W, T, backend=backend, **{name: torch.ones((), requires_grad=True)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_targets_are_whole_numbers(dtype):
    with pytest.raises(TypeError, match=r"Use targets\.long\(\)"):
        linear_cross_entropy(H, W, T.to(dtype))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_targets_of_every_width_are_the_same_classes(dtype, backend):
    hidden, weight, _ = inputs(rows=4, vocab=256)
    targets = torch.tensor([156, 3, 255, 156] if dtype in (torch.uint8, torch.uint16) else [56, 3, 0, 127])
    wanted = F.cross_entropy(hidden @ weight.t(), targets)
    found = linear_cross_entropy(hidden, weight, targets.to(dtype), backend=backend)  # 156 is -100 as a byte
    torch.testing.assert_close(found, wanted)
    if dtype in (torch.int16, torch.int32):
        ignored = torch.tensor([56, -100, 0, 127]).to(dtype)
        found = linear_cross_entropy(hidden, weight, ignored, backend=backend)
        torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.t(), ignored.long()))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_on_meta_nothing_is_computed(backend):
    hidden, weight, targets = inputs(device="meta")
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, targets, backend=backend)
    assert loss.shape == ()
    loss.backward()
    assert [leaf.grad.shape for leaf in leaves] == [hidden.shape, weight.shape]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_gradient_of_its_gradient_is_refused(reduction):
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="take backend='reference'"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, backend="reference").sum()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    grad.square().sum().backward()
    assert weight.grad.any()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # which torch's jvp calls
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_torch_func_would_lose_is_refused(reduction):
    hidden, weight, targets = (tensor.detach() for tensor in inputs())

    def loss(hidden, backend="auto"):
        return linear_cross_entropy(hidden, weight, targets, reduction=reduction, backend=backend).sum()

    for call in (torch.func.grad(loss), torch.func.jacfwd(loss)):
        with pytest.raises(RuntimeError, match="take backend='reference'"):
            call(hidden)
    expected = torch.func.grad(lambda hidden: loss(hidden, backend="reference"))(hidden)
    torch.testing.assert_close(torch.func.jacfwd(lambda hidden: loss(hidden, backend="reference"))(hidden), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_leaves_gradients_whole(reduction):
    hidden, weight, targets = inputs(rows=30)
    parts = hidden.view(3, 10, -1), targets.view(3, 10)

    def grads(backend):
        def call(hidden, targets):
            return linear_cross_entropy(hidden, weight, targets, reduction=reduction, backend=backend)

        loss = torch.func.vmap(call)(*parts).sum()
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    for found, wanted in zip(grads("chunked"), grads("reference"), strict=True):
        torch.testing.assert_close(found, wanted)


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


GPU = pytest.mark.gpu(capability=(8, 0))


# Of losses, to the largest, and of gradients, to their length. Logits go beyond 40 there, so that rounding them moves
# gradients by 1 to 1.6e-2, and by 2.7e-2 with the z-loss, which multiplies the softmax by eight.
ROUNDED, PRECISE = (1e-2, 4e-2), (1e-5, 5e-3)
EACH = pytest.mark.parametrize("round_logits", [True, False])


def assert_within(found, wanted, bands):
    assert_close(found[:1], wanted[:1], bands[0])
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert (a.double() - b).norm() < bands[1] * b.norm()


def each_way(options, *, rows=1000, dim=256, vocab=5000, device="cpu"):
    """Compare the loss, as it is called and with float32 logits, with float64."""
    given = inputs(torch.bfloat16, rows=rows, dim=dim, vocab=vocab, device=device)
    wanted = exact(*given, **options)
    assert_within(results(linear_cross_entropy, *given, **options, chunk=256), wanted, ROUNDED)
    assert_within(results(linear_cross_entropy, *given, **options, chunk=256, round_logits=False), wanted, PRECISE)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
@pytest.mark.usefixtures("halves")
def test_in_bfloat16_as_on_a_gpu(options):
    each_way({**options, "reduction": "none"}, rows=500, vocab=2000)


@GPU
@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab", [5000, 50257])
def test_on_a_gpu(options, reduction, vocab):
    each_way({**options, "reduction": reduction}, vocab=vocab, device="cuda")


@GPU
@EACH
def test_on_a_gpu_under_autocast_and_compiled(round_logits):
    given = inputs(rows=700, dim=128, vocab=3001, device="cuda")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        found = results(compiled, *given, z_loss=0.1, chunk=300, round_logits=round_logits)
    wanted = exact(*(tensor.bfloat16() for tensor in given[:2]), given[2], z_loss=0.1)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 3
    assert_within(found, wanted, ROUNDED if round_logits else PRECISE)


@GPU
def test_on_a_gpu_without_triton(monkeypatch):
    monkeypatch.setattr(module, "step_on", lambda *_: reference_step)
    for options in OPTIONS[:-1]:
        test_on_a_gpu(options, "mean", 5000)


@GPU
@pytest.mark.parametrize("shape", [(8192, 512, 128256), (8192, 2048, 50257)])
@EACH
@pytest.mark.parametrize("chunk", [1024, 4096])
def test_on_a_gpu_memory_is_that_of_a_chunk(shape, round_logits, chunk):
    rows, dim, vocab = shape
    given = inputs(torch.bfloat16, rows=rows, dim=dim, vocab=vocab, device="cuda")
    results(linear_cross_entropy, *given, chunk=chunk, round_logits=round_logits)  # what is allocated once
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(*given, chunk=chunk, round_logits=round_logits).backward()
    peak = torch.cuda.max_memory_allocated() - before
    memory = chunk * vocab * 2 + (0 if round_logits else 512 * vocab * 4)
    grads = vocab * dim * 4 + rows * dim * 2
    assert peak < 1.02 * (memory + grads) + 32 * rows + (8 << 20)

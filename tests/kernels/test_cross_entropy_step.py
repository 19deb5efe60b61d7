"""The step and its kernel: interpreted where there is no GPU, and itself where there is one, against autograd."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from lightning_ups.kernels import cross_entropy_step as module
from lightning_ups.kernels.cross_entropy_step import Settings, _width, launch, reference_step, step_on
from tests.interpreted import assert_equal_interpreted

SETTINGS = [Settings(0.0, 0.0), Settings(0.1, 0.0), Settings(0.0, 2.0), Settings(0.1, 2.0)]
SHAPES = [(1, 5), (6, 200), (4, 257), (3, 5000)]


def given(rows, vocab, dtype=torch.float32, device="cpu"):
    """Return logits with room between their rows, which is not a number; targets, the second of them none; factors."""
    generator = torch.Generator().manual_seed(rows + vocab)
    room = torch.full((rows, -(-vocab // 64) * 64), float("nan"), dtype=dtype)
    room[:, :vocab] = 3 * torch.randn(rows, vocab, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[-1] = vocab - 1
    per_row = torch.linspace(0.5, 2, rows)
    if rows > 1:
        targets[1], per_row[1] = -100, 0.0
    return room.to(device)[:, :vocab], targets.to(device), per_row.to(device)


def by_autograd(logits, targets, per_row, settings):
    """Return loss and gradient in float64."""
    leaf = logits.double().detach().requires_grad_()
    bent = settings.softcap * torch.tanh(leaf / settings.softcap) if settings.softcap else leaf
    loss = F.cross_entropy(bent, targets, reduction="none") + settings.z_loss * bent.logsumexp(-1).square()
    loss = torch.where(per_row != 0, loss, 0.0)
    (loss * per_row).sum().backward()
    return loss.detach(), leaf.grad


def made(step, rows, vocab, settings, *, dtype, into, device="cpu", gradient=True, **options):
    """Return loss and gradient by a step, and what they should be; ``into`` another type than ``dtype`` or in place."""
    logits, targets, per_row = given(rows, vocab, dtype, device)
    wanted = by_autograd(logits, targets, per_row, settings)
    place = logits if into == dtype else given(rows, vocab, into, device)[0]
    loss = torch.full((rows,), 7.0, device=device, dtype=torch.promote_types(dtype, torch.float32))
    step(logits, place if gradient else None, targets, per_row, loss, settings, **options)
    return (loss, place), wanted


def assert_close(found, wanted):
    """Assert what is promised: float32's error, and one rounding to the gradient's type."""
    loss, gradient = found
    torch.testing.assert_close(loss.double(), wanted[0], rtol=3e-6, atol=3e-6)
    # An interpreter cuts bfloat16 off where a GPU rounds.
    rtol = 2**-7 if gradient.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient.double(), wanted[1], rtol=rtol, atol=1e-6)
    assert not gradient[1:2].any(), "the second row is not counted"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "into"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_loss_and_gradient_are_autograds(shape, settings, dtype, into):
    assert_close(*made(reference_step, *shape, settings, dtype=dtype, into=into))


def test_float64_keeps_its_precision():
    found, wanted = made(reference_step, 6, 200, SETTINGS[-1], dtype=torch.float64, into=torch.float64)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_without_gradient_there_is_a_loss():
    (loss, _), wanted = made(
        reference_step, 6, 200, SETTINGS[1], dtype=torch.float32, into=torch.float32, gradient=False
    )
    torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-6, atol=1e-6)


def test_a_row_that_is_not_counted_may_have_any_target():
    logits = given(2, 9)[0]
    loss, nothing = torch.ones(2), torch.zeros(2)
    reference_step(logits, logits, torch.tensor([-1, 99]), nothing, loss, Settings(0.1, 0.0))
    assert not loss.any()
    assert not logits.any()


def test_the_kernel_is_for_float32_on_a_gpu_with_triton(monkeypatch):
    monkeypatch.setattr(module, "has", lambda name: name == "triton")
    assert step_on("cuda", torch.float32) is launch
    assert step_on("cuda", torch.float64) is reference_step
    assert step_on("cpu", torch.float32) is reference_step
    monkeypatch.setattr(module, "has", lambda name: False)
    assert step_on("cuda", torch.float32) is reference_step


INTERPRETED = """
import itertools

import torch
from lightning_ups.kernels import linear_cross_entropy as module
from lightning_ups.kernels.cross_entropy_step import launch
from tests.kernels import test_cross_entropy_step as own
from tests.kernels.test_cross_entropy_step import SETTINGS, SHAPES, assert_close, made

KINDS = ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16))
for (dtype, into), settings, shape in itertools.product(KINDS, SETTINGS, SHAPES):
    for block in (64, 1024):  # rows of many blocks, of one, and of less than one
        assert_close(*made(launch, *shape, settings, dtype=dtype, into=into, block=block))
own.no_gradient("cpu")
own.a_class_that_does_not_exist("cpu")
own.rows_without_room_between("cpu")
own.extremes("cpu")
own.targets_of_a_column("cpu")

# The whole loss, whose step it is.
from tests.kernels.test_linear_cross_entropy import OPTIONS, exact, inputs, results
from tests.kernels.test_linear_cross_entropy import assert_close as close

module.step_on = lambda device, dtype: launch
for options, reduction in itertools.product(OPTIONS, ("mean", "none")):
    given = inputs()
    found = results(module.linear_cross_entropy, *given, **options, reduction=reduction, chunk=16)
    close(found, exact(*given, **options, reduction=reduction), 4e-6)
print("equal")
"""


def no_gradient(device):
    (loss, place), wanted = made(
        launch, 4, 257, SETTINGS[1], dtype=torch.float32, into=torch.float32, gradient=False, device=device
    )
    torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(place, given(4, 257, device=device)[0]), "nothing is written"


def a_class_that_does_not_exist(device):
    logits, targets, per_row = given(4, 30, device=device)
    targets[2], targets[3] = 30, -5
    loss = torch.zeros(4, device=device)
    launch(logits, logits, targets, per_row, loss, Settings(0.0, 0.0))
    assert loss.isnan().tolist() == [False, False, True, True]
    assert logits[0].isfinite().all()


def _assert_rounded_alike(found, wanted):
    # Rows that are read in other vectors are summed in another order.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def rows_without_room_between(device):
    """Let rows follow one another, so that nothing may be written behind one."""
    logits, targets, per_row = given(5, 37, device=device)
    loss, tight = torch.zeros(5, device=device), logits.contiguous()
    launch(logits, logits, targets, per_row, loss, Settings(0.0, 0.0))
    launch(tight, tight, targets, per_row, loss.clone(), Settings(0.0, 0.0))
    _assert_rounded_alike(tight, logits)


def extremes(device):
    """Logits far apart, equal ones, and minus infinity; then what is not a number."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -3e4], [-torch.inf, 0.0, 1.0], [torch.nan, 0.0, 0.0]])
    logits = logits.to(device)
    loss, ones = torch.zeros(4, device=device), torch.ones(4, device=device)
    targets = torch.tensor([0, 1, 2, 1], device=device)
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    launch(logits, logits, targets, ones, loss, Settings(0.0, 0.0), block=16)
    torch.testing.assert_close(loss, wanted, equal_nan=True)
    assert logits[:3].isfinite().all()
    assert loss[3].isnan()
    assert logits[3].isnan().any()


def targets_of_a_column(device):
    """Let targets and factors lie apart, as those of a column of a table do."""
    logits, targets, per_row = given(6, 37, device=device)
    loss, apart = torch.zeros(6, device=device), logits.clone()
    launch(logits, logits, targets, per_row, loss, Settings(0.0, 0.0))
    strided, found = (
        (torch.stack([t, torch.zeros_like(t)], 1)[:, 0] for t in (targets, per_row)),
        torch.zeros_like(loss),
    )
    launch(apart, apart, *strided, found, Settings(0.0, 0.0))
    assert torch.equal(found, loss)
    _assert_rounded_alike(apart, logits)


def test_rows_are_read_in_whole_vectors_where_the_memory_is_theirs():
    assert _width(torch.empty(5, 64)[:, :37]) == 48
    assert _width(torch.empty(5, 64)[:, :64]) == 64
    assert _width(torch.empty(5, 37)) == 37, "the next row begins there"
    assert _width(torch.empty(4 * 64 + 37).as_strided((5, 37), (64, 1))) == 37, "the memory ends there"
    assert _width(torch.empty(5, 64)[1:, :37]) == 48
    assert _width(torch.empty(5, 64, dtype=torch.bfloat16)[4:, :50]) == 64


@pytest.mark.slow
def test_the_kernel_interpreted_is_the_specification():
    assert_equal_interpreted(INTERPRETED)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 50257), (300, 50257), (37, 128256)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "into"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_the_kernel_on_a_gpu(shape, settings, dtype, into):
    assert_close(*made(launch, *shape, settings, dtype=dtype, into=into, device="cuda"))


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize(
    "way", [no_gradient, a_class_that_does_not_exist, rows_without_room_between, extremes, targets_of_a_column]
)
def test_edges_on_a_gpu(way):
    way("cuda")


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("tuning", [(8192, 32, 1), (8192, 32, 3), (2048, 8, 1), (512, 2, 4)], ids=str)
def test_however_it_is_tuned_on_a_gpu(tuning):
    options = dict(zip(("block", "warps", "stages"), tuning, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        kind = {"dtype": dtype, "into": torch.bfloat16, "device": "cuda"}
        assert_close(*made(launch, 600, 50257, SETTINGS[-1], **kind, **options))

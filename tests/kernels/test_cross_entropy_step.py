import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from lightning_ups.kernels import cross_entropy_step as module
from lightning_ups.kernels.cross_entropy_step import Settings, reference_step, step_on

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
    from lightning_ups.kernels.cross_entropy_triton import launch

    assert step_on("cuda", torch.float32) is launch
    assert step_on("cuda", torch.float64) is reference_step
    assert step_on("cpu", torch.float32) is reference_step
    monkeypatch.setattr(module, "has", lambda name: False)
    assert step_on("cuda", torch.float32) is reference_step

"""Gradients put together for their reduction: the specification is torch's own way, the kernel is the specification."""

from unittest.mock import patch

import pytest
import torch

from lightning_ups._compat.torch.compile.graph_passes import copy_together
from lightning_ups.kernels import reduction_input
from lightning_ups.kernels.reduction_input import launch, put_together
from tests.interpreted import assert_equal_interpreted

SHAPES = {
    "block": [(8, 16), (4,), (12, 3, 5)],
    "one": [(4, 7)],
    "larger than a chunk": [(4, 20000), (8, 4099)],
    "empty": [(4, 0), (4, 3)],
}
TYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]


def given(shapes, dtype, into, *, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return gradients, torch.full((sum(g.numel() for g in gradients),), torch.nan, dtype=into, device=device)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shapes", [SHAPES["block"], SHAPES["one"]], ids=str)
@pytest.mark.parametrize(("dtype", "into"), TYPES)
def test_the_specification_is_what_torch_does(shapes, size, dtype, into):
    gradients, out = given(shapes, dtype, into)
    wanted = torch.empty_like(out)
    torch._chunk_cat(gradients, dim=0, num_chunks=size, out=wanted.view(size, -1))
    copy_together(gradients, out, size)
    assert torch.equal(out, wanted)


@pytest.fixture
def anywhere(monkeypatch):
    """Pretend that every device has the kernel, and that nothing is too small for it."""
    monkeypatch.setattr(reduction_input, "LEAST", 1)
    monkeypatch.setattr(reduction_input, "launch", copy_together)
    plain = reduction_input._is_plain

    def is_plain(tensor):
        with patch.object(type(tensor), "device", torch.device("cuda")), patch.object(reduction_input, "has", bool):
            return plain(tensor)

    monkeypatch.setattr(reduction_input, "_is_plain", is_plain)
    reduction_input._compiles.cache_clear()
    yield
    reduction_input._compiles.cache_clear()


@pytest.mark.usefixtures("anywhere")
def test_what_can_be_is_put_together():
    gradients, out = given(SHAPES["block"], torch.bfloat16, torch.float32)
    wanted = torch.empty_like(out)
    copy_together(gradients, wanted, 4)
    assert put_together(gradients, out, 4)
    assert torch.equal(out, wanted)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "change",
    [
        lambda gradients, out: ([*gradients[:-1], torch.zeros(6, 30)], out),
        lambda gradients, out: ([gradients[0].t(), *gradients[1:]], out),
        lambda gradients, out: (gradients, out[1:]),
        lambda gradients, out: ([g.double() for g in gradients], out),
        lambda gradients, out: ([*gradients, torch.tensor(1.0)], out),
    ],
    ids=["rows that leave a rest", "not contiguous", "another size", "another type", "a number"],
)
def test_what_cannot_be_is_left_to_torch_and_nothing_is_written(change):
    gradients, out = change(*given(SHAPES["block"], torch.float32, torch.float32))
    assert not put_together(gradients, out, 4)
    assert out.isnan().all()


@pytest.mark.usefixtures("anywhere")
def test_where_nothing_compiles_torch_does_it_and_says_so_once(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(reduction_input, "launch", no_compiler)
    gradients, out = given(SHAPES["block"], torch.float32, torch.float32)
    with pytest.warns(UserWarning, match="by torch, since Triton compiles nothing here: Failed to find C") as said:
        assert [put_together(gradients, out, 4) for _ in range(2)] == [False, False]
    assert len(said) == 1
    assert out.isnan().all()


def test_on_a_cpu_and_where_there_is_little_torch_does_it():
    gradients, out = given([(4, 2**18)], torch.float32, torch.float32)
    assert not put_together(gradients, out, 4)


INTERPRETED = """
import torch
from tests.kernels.test_reduction_input import SHAPES, TYPES, given
from lightning_ups._compat.torch.compile.graph_passes import copy_together
from lightning_ups.kernels.reduction_input import launch
for shapes in SHAPES.values():
    for dtype, into in TYPES:
        if into.itemsize < dtype.itemsize:
            continue  # the interpreter cuts numbers off, and does not round them
        for size in (1, 2, 4):
            gradients, out = given(shapes, dtype, into)
            wanted = out.clone()
            launch(gradients, out, size)
            copy_together(gradients, wanted, size)
            assert torch.equal(out, wanted), (shapes, dtype, into, size)
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_interpreted_is_the_specification():
    assert_equal_interpreted(INTERPRETED)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("shapes", [*SHAPES.values(), [(4096, 1024), (4096,), (14336, 512)]], ids=str)
@pytest.mark.parametrize(("dtype", "into"), TYPES)
def test_the_kernel_on_a_gpu(shapes, dtype, into):
    for size in (1, 2, 4):
        gradients, out = given(shapes, dtype, into, device="cuda")
        wanted = out.clone()
        launch(gradients, out, size)
        copy_together(gradients, wanted, size)
        assert torch.equal(out, wanted)


@pytest.mark.gpu(capability=(8, 0))
def test_on_a_gpu_large_gradients_are_put_together():
    gradients, out = given([(2048, 1024)], torch.bfloat16, torch.float32, device="cuda")
    assert put_together(gradients, out, 2)
    assert torch.equal(out, gradients[0].float().flatten())

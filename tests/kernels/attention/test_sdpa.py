import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.kernels.attention.sdpa import torch_attention
from tests.kernels.attention.cases import Case


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("backend", "operator"), [("math", "_softmax"), ("flash", "_scaled_dot_product_flash_attention_for_cpu")]
)
def test_the_kernel_asked_for_runs(backend, operator, window):
    with Names() as names:
        torch_attention(*Case("").tensors(), backend=backend, causal=True, window=window, documents=None, scale=1.0)
    fused = any("flash_attention" in name for name in names.seen)
    assert fused == (backend == "flash")
    assert any(operator in name for name in names.seen)


def test_none_other_runs_in_its_place():
    with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
        torch_attention(*Case("").tensors(), backend="cudnn", causal=True, window=None, documents=None, scale=1.0)


def test_the_choice_of_kernel_is_put_back():
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    torch_attention(*Case("").tensors(), backend="flash", causal=True, window=None, documents=None, scale=1.0)
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before

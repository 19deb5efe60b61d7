import time
from threading import Event, Thread

import pytest
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups._compat.torch.flags import allowed_attention
from lightning_ups.kernels.attention import routed_attention, routing, sdpa
from lightning_ups.kernels.attention.sdpa import TORCH_BACKENDS, torch_attention
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


@pytest.mark.parametrize("routed", [False, True])
def test_threads_take_turns_and_leave_torchs_choice_as_it_was(monkeypatch, routed):
    """Which kernels torch may use is one state for all threads."""
    before, function, seen = allowed_attention(), F.scaled_dot_product_attention, {}
    tensors, first_is_in = Case("").tensors(), Event()

    def slowly(*args, held=(function,), **kwargs):
        seen[len(seen)] = allowed_attention()
        first_is_in.set()
        time.sleep(0.1 * len(seen))  # the first is out before the second
        return held[0](*args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", slowly)
    monkeypatch.setattr(routing, "scaled_dot_product_attention", slowly)

    def attend(backend):
        if routed:
            with_heads_first = (tensor.transpose(1, 2) for tensor in tensors)
            F.scaled_dot_product_attention(*with_heads_first, is_causal=True, enable_gqa=True)
        else:
            torch_attention(*tensors, backend=backend, causal=True, window=None, documents=None, scale=1.0)

    with routed_attention("flash"):
        first, second = (Thread(target=attend, args=(backend,)) for backend in ("flash", "math"))
        first.start()
        assert first_is_in.wait(10)
        second.start()
        for thread in (first, second):
            thread.join()
    wanted = ("flash", "flash" if routed else "math")
    assert seen == {i: {TORCH_BACKENDS[backend]} for i, backend in enumerate(wanted)}
    assert allowed_attention() == before

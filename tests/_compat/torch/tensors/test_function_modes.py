import torch
from torch.overrides import TorchFunctionMode

from lightning_ups._compat.torch.tensors.function_modes import outside_function_modes


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_sees_what_is_called_inside_and_all_is_seen_afterwards():
    x = torch.ones(2)
    with Seen() as seen:
        torch.add(x, x)
        with outside_function_modes():
            torch.mul(x, x)
        torch.sub(x, x)
    assert seen.names == ["add", "sub"]

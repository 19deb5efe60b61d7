"""Finds manual writes to gathered parameters, such as codebooks that follow their inputs. They would be lost."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_ups._compat.torch.fsdp.state import held_parameters, replaced, written_to
from lightning_ups.transforms.fsdp.gathered_together import gathered_when_called
from lightning_ups.transforms.fsdp.step_check import StepCheck
from lightning_ups.transforms.sharding import StepState

__all__ = ["ManualWrites", "refuse_replaced"]

# A copy of a layer that follows it, such as a teacher network, changes only after the layer was stepped, and the first
# learning rate of a warm-up may be 0.
_STEPS = 3


class ManualWrites(StepCheck):
    """Finds writes to gathered parameters in the first steps. They are lost when the parameters are freed.

    Each device compares its shard with its part of the gathered tensor. Version counters are not enough: they do not
    count writes through ``.data``.

    Args:
        root: The sharded model.
        device: The device of this rank.

    Raises:
        RuntimeError: At the end of a step or before its backward, if a write would be lost.
    """

    def __init__(self, root: FSDPModule, *, device: torch.device) -> None:
        self._root, self._device = root, device
        self._looks = False
        self._looked_at: set[int] = set()  # numbers of optimizer steps
        self._written: dict[int, Tensor] = {}

    @override
    def begin(self, step: StepState, undo: ExitStack) -> None:
        self._looks = step.is_training and step.number not in self._looked_at and len(self._looked_at) < _STEPS
        if not self._looks:
            return
        self._looked_at.add(step.number)
        self._written.clear()
        for module, gathered in gathered_when_called(self._root).items():
            look = partial(self._after_forward, gathered)  # before torch's own hook, which frees them
            undo.callback(module.register_forward_hook(look, prepend=True).remove)

    @override
    def end(self, step: StepState) -> None:
        if self._looks:
            self.before_free()
            self._refuse()
            self._looks = not step.is_manual

    @override
    def before_free(self) -> None:
        for module in self._root.modules() if self._looks else ():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                self._look_at(module)

    @override
    def before_backward(self, step: StepState) -> None:
        if self._looks and not step.is_manual:
            self.before_free()  # writes by hooks since the step
            self._refuse()
            self._looks = False

    def _refuse(self) -> None:
        held = [(name, handle) for _, _, _, name, handle in held_parameters(self._root)]
        if not held:
            return
        no = torch.zeros((), dtype=torch.bool, device=self._device)
        found = torch.stack([self._written.get(id(handle), no).to(self._device) for _, handle in held]).int()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if names := sorted(name for (name, _), yes in zip(held, found.tolist(), strict=True) if yes):
            raise RuntimeError(
                f"{', '.join(names[:3])} {'is' if len(names) == 1 else 'are'} written to within training_step,"
                " or by a hook between it and its backward."
                " There, a sharded parameter is a gathered copy that is freed after use, so the write would be lost."
                f" Use a buffer, self.register_buffer({names[0].rpartition('.')[2]!r}, ...), which is not sharded, or"
                " write to the parameter in on_train_batch_end, where it is a shard, or train with strategy='ddp'."
            )

    def _after_forward(self, gathered: Sequence[FSDPModule], *_: Any) -> None:
        for module in gathered:
            self._look_at(module)

    def _look_at(self, module: FSDPModule) -> None:
        for handle, differs in written_to(module):
            before = self._written.get(id(handle))
            self._written[id(handle)] = differs if before is None else before | differs


def refuse_replaced(root: FSDPModule) -> None:
    """Raise if a module has another parameter than the one that was sharded.

    Raises:
        RuntimeError: In that case.
    """
    if names := replaced(root):
        module, _, name = names[0].rpartition(".")
        raise RuntimeError(
            f"{', '.join(names[:3])} {'was' if len(names) == 1 else 'were'} set to another parameter after sharding."
            " The old shard is gathered, trained and saved, and the new parameter would be lost."
            f" Write values into it, within torch.no_grad(), as {module or 'self'}.{name}[:] = values; or set it before"
            " fit."
        )

"""Checks of the steps of a sharded model: lost writes, replaced parameters, gradients that come too late."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_ups._compat.torch.fsdp.state import held_parameters, replaced, unreduced, written_to
from lightning_ups.transforms.fsdp.model_forward import gathered_when_called, sharded_in
from lightning_ups.transforms.quoted import listed
from lightning_ups.transforms.sharding import StepState

# A copy of a layer that follows it, such as a teacher network, changes only after the layer was stepped, and the first
# learning rate of a warm-up may be 0.
_STEPS_WITH_WRITES = 3


class ManualWrites:
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
        self._looks, self._num_looks, self._last = False, 0, -1  # the optimizer step of the last look
        self._written: dict[int, Tensor] = {}

    def begin(self, step: StepState, undo: ExitStack) -> None:
        """Called before a step; ``undo`` is closed when the step ends or fails."""
        # Looks are counted, since a manual training_step may make several optimizer steps.
        self._looks = step.is_training and step.number > self._last and self._num_looks < _STEPS_WITH_WRITES
        if not self._looks:
            return
        self._num_looks += 1
        self._last = step.number
        self._written.clear()
        for module, gathered in gathered_when_called(self._root).items():
            look = partial(self._after_forward, gathered)  # before torch's own hook, which frees them
            undo.callback(module.register_forward_hook(look, prepend=True).remove)

    def end(self, step: StepState) -> None:
        """Called after a step, while the model's own group is still gathered."""
        if self._looks:
            self.before_free()
            self._refuse()
            self._looks = not step.is_manual

    def before_free(self) -> None:
        """Called before the model's own group is freed; several times in a manual step."""
        for module in sharded_in(self._root) if self._looks else ():
            self._look_at(module)

    def before_backward(self, step: StepState) -> None:
        """Called before each backward."""
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
                f"{', '.join(names[:3])} {'is' if len(names) == 1 else 'are'} written to within training_step, or"
                " between it and its backward. The write would be lost with the gathered copy. Use"
                f" self.register_buffer({names[0].rpartition('.')[2]!r}, ...), write in on_train_batch_end, or train"
                " with strategy='ddp'."
            )

    def _after_forward(self, gathered: Sequence[FSDPModule], *_: Any) -> None:
        for module in gathered:
            self._look_at(module)

    def _look_at(self, module: FSDPModule) -> None:
        for handle, differs in written_to(module):
            before = self._written.get(id(handle))
            self._written[id(handle)] = differs if before is None else before | differs


def refuse_replaced(root: FSDPModule) -> None:
    """Raise if a module has another parameter than the one that was sharded."""
    if names := replaced(root):
        module, _, name = names[0].rpartition(".")
        raise RuntimeError(
            f"{', '.join(names[:3])} {'was' if len(names) == 1 else 'were'} set to another parameter after sharding,"
            f" which would not be trained. Write {module or 'self'}.{name}[:] = values within torch.no_grad(), or set"
            " it before fit."
        )


def refuse_late_gradients(root: FSDPModule) -> None:
    """Raise if gradients arrived after their group was reduced, so that they would be added to the next step."""
    if left := unreduced(root):
        raise RuntimeError(
            f"The gradients of {listed(left)} arrived after their group was reduced, because they are read outside"
            f" the forward of the module that gathers them. Name them: FSDP2Strategy(outside={left[:3]})."
        )
